"""Copies to the device that run beside the steps: loads of KV, layer by layer, and adapters. They run when the test says.

As on a GPU, a step does not wait for a load on the host: the stream of the steps waits for the events of the copies. So
the bytes of a layer may arrive at any moment up to the one at which the device computes the step.
"""

import torch

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.transfer.plan import LayerGate, LoadReadable, TransferDone, TransferKind, TransferPlan
from graftwork.engine.lora.adapter_copies import AdapterCopied
from tests.engine.tagged_kv_cache import DeviceTags, FakeDisk, ManualCopyEngine

NUM_LAYERS = 2
GARBAGE = 255


class LayeredCopyEngine(ManualCopyEngine):
    """A CopyEngine whose loads from the host may be read layer by layer. A layer has one half of each page's tag."""

    def __init__(self, disk: FakeDisk, device: DeviceTags) -> None:
        super().__init__(disk, device)
        self._gates: dict[TransferPlan, LayerGate] = {}
        self._failing: set[TransferPlan] = set()
        self._waits: list[tuple[TransferPlan, int]] = []

    def announce(self, number: int, *, fails: bool) -> LoadReadable | None:
        """Makes one of the running loads readable by layers; None if there is none.

        If it `fails`, all layers but the last can be read.
        """
        loads = [plan for plan, _ in self.under_way if plan.kind is TransferKind.LOAD and plan not in self._gates]
        if not loads:
            return None
        plan = loads[number % len(loads)]
        gate = self._gates[plan] = LayerGate(NUM_LAYERS)
        for end in range(1, NUM_LAYERS + (not fails)):
            gate.open_layers(end, lambda end=end: self._waits.append((plan, end)))  # type: ignore[misc]
        if fails:
            self._failing.add(plan)
            gate.fail()
        for target in (move.target for move in plan.moves):
            assert target is not None
            self._device.write_part(target, bytes([GARBAGE] * 32), 0, 32)
        return LoadReadable(plan, gate)

    def take_waits(self) -> list[tuple[TransferPlan, int]]:
        """Returns what the stream of the steps waits for from now on: loads, and how many layers of each."""
        waits, self._waits = self._waits, []
        return waits

    def arrive(self, plan: TransferPlan, num_layers: int) -> None:
        """Copies the first layers of a load that was announced. Does nothing if the load has ended."""
        sources = next((sources for other, sources in self.under_way if other is plan), None)
        for move, tag in zip(plan.moves, sources or (), strict=False):
            assert move.target is not None
            assert tag is not None
            self._device.write_part(move.target, tag, 0, len(tag) * num_layers // NUM_LAYERS)

    def fire(self, index: int = 0, num_good: int | None = None) -> TransferDone:
        """Ends one plan. A load that was announced ends as it was announced."""
        plan = self.under_way[index][0]
        if plan in self._gates:
            num_good = 0 if plan in self._failing else None
        self._gates.pop(plan, None)
        self._failing.discard(plan)
        return super().fire(index, num_good)

    @property
    def _device(self) -> DeviceTags:
        device = self.tags[Tier.DEVICE]
        assert isinstance(device, DeviceTags)
        return device


class ManualAdapterCopies:
    """AdapterCopies that end when the test says. Until then their targets hold garbage."""

    def __init__(self) -> None:
        self._under_way: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def begin(self, digest: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        target.fill_(GARBAGE)
        self._under_way.append((digest, source, target))
        return False

    def finish(self, number: int) -> AdapterCopied | None:
        """Ends one of the copies that run; None if none does."""
        if not self._under_way:
            return None
        digest, source, target = self._under_way.pop(number % len(self._under_way))
        assert (target == GARBAGE).all(), "the target of a running copy was written"
        target.copy_(source)
        return AdapterCopied(digest)

    def close(self) -> None:
        """Nothing runs."""
