"""How LoRA deltas are applied to a mixed batch.

The rows of a batch stand ordered by adapter, so that each adapter's rows are one run [start, end): a segment.
Segments are made once a step and serve all layers. Rows of the bare base belong to no segment and cost nothing.

This is the plain torch path: the one the CPU runs, and the reference of the fused kernels in engine/kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.adapter_weights import AdapterWeights, LoraPair


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Linear layers that read the same input and are computed by one GEMM."""

    name: str
    targets: tuple[str, ...]


GROUPS = (
    ProjectionGroup("qkv", ("q_proj", "k_proj", "v_proj")),
    ProjectionGroup("o", ("o_proj",)),
    ProjectionGroup("gate_up", ("gate_proj", "up_proj")),
    ProjectionGroup("down", ("down_proj",)),
)


@dataclass(frozen=True, slots=True)
class SliceDelta:
    """One target's part of a group: v[:, rank_start:rank_end] @ B.T goes to y[:, out_start:out_end]."""

    B_transposed: torch.Tensor  # [rank, out_features]
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int


@dataclass(frozen=True, slots=True)
class GroupDelta:
    """One adapter's delta of one group in one layer; the ranks of its targets may differ."""

    A_transposed: torch.Tensor  # [in_features, sum of ranks]
    scales: torch.Tensor  # [sum of ranks]
    slices: tuple[SliceDelta, ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y += delta(x), in place. x: [rows, in_features], y: [rows, out_features of the group]."""
        v = torch.mm(x, self.A_transposed).mul_(self.scales)  # [rows, sum of ranks]
        for part in self.slices:
            out = y[:, part.out_start : part.out_end]
            out.addmm_(v[:, part.rank_start : part.rank_end], part.B_transposed)


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter in the form that the forward pass uses, on the device."""

    digest: str
    deltas: dict[tuple[int, str], GroupDelta]
    """By (layer, group name); absent where the adapter leaves a group alone."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, end) of the batch that use one adapter."""

    start: int
    end: int
    adapter: ResidentAdapter


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """A step's segments, shared by all layers."""

    segments: tuple[Segment, ...]

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Add each segment's delta of one group, in place."""
        for segment in self.segments:
            delta = segment.adapter.deltas.get((layer, group))
            if delta is not None:
                delta.add_to(y[segment.start : segment.end], x[segment.start : segment.end])


def prepare(
    weights: AdapterWeights, widths: dict[str, int], device: torch.device, dtype: torch.dtype
) -> ResidentAdapter:
    """Bring an adapter to the device. `widths` are the out_features of each target."""
    deltas: dict[tuple[int, str], GroupDelta] = {}
    for layer in sorted({layer for layer, _ in weights.pairs}):
        for group in GROUPS:
            pairs = [weights.pairs.get((layer, target)) for target in group.targets]
            if any(pairs):
                group_widths = [widths[target] for target in group.targets]
                deltas[layer, group.name] = _fuse(pairs, group_widths, device, dtype)
    return ResidentAdapter(weights.digest, deltas, sum(_num_bytes(delta) for delta in deltas.values()))


def _fuse(
    pairs: Sequence[LoraPair | None], widths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> GroupDelta:
    present = [pair for pair in pairs if pair is not None]
    stacked = torch.cat([pair.A for pair in present])  # [sum of ranks, in_features]
    scales = torch.cat([torch.full((pair.rank,), pair.scale) for pair in present])
    slices: list[SliceDelta] = []
    rank_start = out_start = 0
    for pair, width in zip(pairs, widths, strict=True):
        if pair is not None:
            B_transposed = pair.B.to(device, dtype).t().contiguous()
            rank_end = rank_start + pair.rank
            slices.append(SliceDelta(B_transposed, rank_start, rank_end, out_start, out_start + width))
            rank_start = rank_end
        out_start += width
    A_transposed = stacked.to(device, dtype).t().contiguous()
    return GroupDelta(A_transposed, scales.to(device, dtype), tuple(slices))


def _num_bytes(delta: GroupDelta) -> int:
    return delta.A_transposed.nbytes + delta.scales.nbytes + sum(part.B_transposed.nbytes for part in delta.slices)
