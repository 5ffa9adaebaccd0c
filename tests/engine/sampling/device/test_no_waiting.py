"""What the device sampler asks of the device and of torch in a step."""

from collections import Counter
from dataclasses import replace
from random import Random
from traceback import walk_stack
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import MaskFiller
from tests.engine.sampling.device.sampler_cases import AllowedTokens, random_spec

VOCAB = 131
VIEWS = {"aten::slice", "aten::select", "aten::view", "aten::alias", "aten::detach"}


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations, except for those of Triton's interpreter, which copies the arguments of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.copies: list[tuple[int, bool]] = []
        """The bytes of each copy, and whether the host goes on before it is done."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        callers = (frame.f_code.co_filename for frame, _ in walk_stack(None))
        name = func.name().split(".")[0]
        if name not in VIEWS and not any(caller.endswith("triton/runtime/interpreter.py") for caller in callers):
            self.counts[name] += 1
            if name == "aten::copy_":
                is_early = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
                self.copies.append((args[0].nbytes, is_early))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def sampler(interpreted: dict[str, ModuleType]) -> Any:
    sizes = interpreted["launches"].SamplerSizes(block=256, room=256, chunk=256, digits=16)
    return interpreted["device_sampler"].DeviceSampler(MaskFiller(VOCAB), VOCAB, 16, torch.device("cpu"), sizes)


def calls_of_a_step(sampler: Any, specs: list[SampleSpec]) -> TorchCalls:
    logits = torch.randn(len(specs), VOCAB, generator=torch.Generator().manual_seed(1))
    calls = TorchCalls()
    with calls:
        sampled = sampler.begin(specs).sample(logits)
    sampled.result()
    return calls


@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_a_step_makes_two_copies_and_waits_for_none(sampler: Any, kind: str) -> None:
    """A step makes one copy of parameters, one of results, and no other operation: it allocates no memory on host or
    device, whatever its rows ask for. Masks are read where they were filled."""
    specs = [SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)] * 6
    if kind == "everything":
        source = Random(2)
        specs = [random_spec(source, VOCAB) for _ in range(7)]
        specs.append(SampleSpec(SamplingParams(max_tokens=1), 0, 0, mask=AllowedTokens((1, 2))))
    calls_of_a_step(sampler, specs)  # the first step of a request clears its slot, and masks get their memory

    calls = calls_of_a_step(sampler, specs)

    assert calls.counts == {"aten::copy_": 2}
    assert sum(num_bytes for num_bytes, _ in calls.copies) < 8192
    assert all(is_early for _, is_early in calls.copies)


def test_a_step_copies_little(sampler: Any) -> None:
    """Six greedy rows copy their parameters, less than 2 KB, and bring back four bytes for each row of the memory."""
    specs = [SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)] * 6

    (to_device, _), (to_host, _) = calls_of_a_step(sampler, specs).copies

    assert to_device <= 2048
    assert to_host == 16 * 4


def test_parameters_may_travel_with_others(sampler: Any) -> None:
    """If somebody else has sent the parameters, a step makes one copy, of the results, and the tokens are the same."""
    source = Random(3)
    specs = [replace(random_spec(source, VOCAB), mask=None) for _ in range(7)]
    logits = torch.randn(len(specs), VOCAB, generator=torch.Generator().manual_seed(1))
    alone = sampler.begin(specs).sample(logits).result()
    sampling, calls = sampler.begin(specs), TorchCalls()
    on_device = torch.from_numpy(sampling.words.copy())

    sampling.passenger.board(on_device)
    with calls:
        sampled = sampling.sample(logits)

    assert calls.counts == {"aten::copy_": 1}
    assert sampled.result() == alone


def test_launches_do_not_depend_on_what_rows_ask_for(interpreted: dict[str, ModuleType]) -> None:
    """A step is four launches over all rows and blocks; two steps have the same grids, numbers and addresses."""
    launches = interpreted["launches"]
    memory = launches.SamplerMemory(16, 128_256, torch.device("cpu"), launches.SamplerSizes(room=64))
    logits, counts = torch.empty(16, 128_256, dtype=torch.bfloat16), torch.empty(1, 128_256, dtype=torch.int16)

    parameters = torch.empty(2 * memory.columns.lists_at, dtype=torch.int32)
    first, second = ([*memory.launches(logits, counts, parameters, None)] for _ in range(2))

    assert [launch.grid for launch in first] == [(16, 63), (16, 63), (16, 63), (16,)]
    for one, other in zip(first, second, strict=True):
        assert described(one.arguments) == described(other.arguments)


def described(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: one.data_ptr() if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
