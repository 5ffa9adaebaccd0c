"""A stand-in for a GPU that counts what a step asks of it: a device without memory, and launches that are not compiled.

Tensors of the device `meta` have shapes and dtypes but no memory. The host cannot read them, so a step that waits for
the device fails at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs

from graftwork.engine.kernels.launch import Launch
from tests.engine.kernels.fake_driver import fake_driver

DEVICE = torch.device("meta")
ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


@dataclass
class PinnedWords:
    """Host memory that the gate knows as pinned."""

    blocks: list[torch.Tensor] = field(default_factory=list)

    def words(self, num_words: int) -> torch.Tensor:
        self.blocks.append(torch.zeros(num_words, dtype=torch.int32))
        return self.blocks[-1]

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == block.untyped_storage().data_ptr() for block in self.blocks)


@dataclass
class StepCounts:
    """What one step asked of the device."""

    operations: Counter[str] = field(default_factory=Counter)
    """Torch's operations that launch a kernel: all but views, allocations and copies between host and device."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of our kernels, by name."""
    variants: set[tuple[str, str]] = field(default_factory=set)
    """The kernels that would be compiled, by name and by what Triton compiles anew for."""
    words_in: list[int] = field(default_factory=list)
    """The int32 words of each copy to the device."""
    words_read: int = 0
    """The int32 words of pinned host memory that kernels read."""
    copies_out: int = 0
    allocations: int = 0
    """Allocations on the device."""
    faults: list[str] = field(default_factory=list)
    """Waits for the device, copies that the host waits for, and kernels that get memory which they cannot read."""

    @property
    def copies_in(self) -> int:
        return len(self.words_in)

    @property
    def num_launches(self) -> int:
        return self.operations.total() + self.kernels.total()


class DeviceGate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations on the device, and finds those for which the host waits."""

    def __init__(self, counts: StepCounts, pinned: PinnedWords) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts
        self._pinned = pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition(".")[0], kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        kinds = {one.device.type for one in given}
        if name == "aten::copy_" and len(kinds) == 2:
            self._copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return args[0]
        result = func(*args, **kwargs)
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        on_device = [one for one in given + made if one.device.type == DEVICE.type]
        if not on_device:
            return result
        if name == "aten::detach_" or name in WAITS or len({one.device.type for one in given + made}) > 1:
            self._counts.faults.append(f"{name}: the host waits")
        elif name in ALLOCATIONS:
            self._counts.allocations += 1
        elif not func.is_view:
            self._counts.operations[name] += 1
            self._counts.allocations += any(one is not other for one in made for other in given[:1])
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, is_early: bool) -> None:
        into_device = target.device.type == DEVICE.type
        on_host = source if into_device else target
        if into_device:
            self._counts.words_in.append(source.numel())
        self._counts.copies_out += not into_device
        if not is_early or not self._pinned.holds(on_host):
            self._counts.faults.append("a copy from or to memory that is not pinned")
        if not (source.is_contiguous() and target.is_contiguous()):
            self._counts.faults.append("a copy that is not one block")


@contextmanager
def watched_launches(counts: StepCounts, pinned: PinnedWords) -> Iterator[None]:
    """Looks at the arguments of each launch: a kernel may read the device and pinned host memory alone."""
    run = Launch.run

    def watched(launch: Launch) -> None:
        tensors = [one for one in launch.arguments.values() if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            if tensor.device.type == "cpu":
                counts.words_read += tensor.numel()
                if not pinned.holds(tensor):
                    counts.faults.append(f"{launch.kernel.__name__} reads memory that is not pinned")
        run(launch)

    Launch.run = watched  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Launch.run = run  # type: ignore[method-assign]


@contextmanager
def counted(pinned: PinnedWords) -> Iterator[StepCounts]:
    """Counts what the code inside asks of the device. Kernels are bound to their arguments, but not compiled."""
    counts = StepCounts()

    def launched(*, key: str, fn: Any, **rest: Mapping[str, Any]) -> bool:
        counts.kernels[fn.name.rpartition(".")[2]] += 1
        counts.variants.add((fn.name, key))
        return True  # do not compile, do not launch

    with fake_driver(), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = launched
        with torch.inference_mode(), DeviceGate(counts, pinned), watched_launches(counts, pinned):
            yield counts
