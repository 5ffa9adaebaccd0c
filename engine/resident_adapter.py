"""An adapter in the form that the forward pass uses: fused by input, in the engine's dtype, in one block of memory.

One block an adapter means one copy between host and device and exact bytes in every budget. Its tensors are views of
it. Ranks are rounded up to pages of eight with rows of zeros, so that an adapter of rank 8 costs eight ranks beside one
of 128, and equal rows give equal bits wherever their ranks stand (see lora_packs).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

RANK_PAGE = 8
_ALIGNMENT = 64  # bytes, of every tensor in its block
HEAD_LAYER = -1
"""The `layer` of the output head, whose group is the same for all."""


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
HEAD = ProjectionGroup("head", ("lm_head",))


@dataclass(frozen=True, slots=True)
class SliceDelta:
    """One target's part of a group: v[:, rank_start:rank_end] @ B goes to y[:, out_start:out_end]."""

    B: torch.Tensor  # [ranks, out_features]
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int


@dataclass(frozen=True, slots=True)
class GroupDelta:
    """What is done to one group's output: y = column_scale * y + column_shift + (scales * (x @ A.T)) @ B.

    Scales stay beside A, so that a 16-bit adapter is rounded as PEFT rounds it; but a power of two, as most scales
    are, is multiplied into A, which changes no digit of it.
    """

    A: torch.Tensor  # [sum of ranks, in_features]; the ranks of the slices behind one another
    scales: torch.Tensor | None  # [sum of ranks] fp32; None where all are 1
    slices: tuple[SliceDelta, ...]
    column_scale: torch.Tensor | None = None  # [out_features of the group] fp32; DoRA
    column_shift: torch.Tensor | None = None  # [out_features of the group] fp32; biases

    @property
    def num_ranks(self) -> int:
        return self.A.shape[0]

    @property
    def is_low_rank(self) -> bool:
        """Whether it consists of low-rank factors alone, so that it may be mixed with others by weight."""
        return self.column_scale is None and self.column_shift is None


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """hidden += scale * (A[token] @ B)."""

    A: torch.Tensor  # [vocab, ranks]
    B: torch.Tensor  # [ranks, hidden]
    scale: float


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter in one block of memory, on the host or on the device."""

    digest: str
    block: torch.Tensor  # [num_bytes] uint8; every tensor below is a view of it
    deltas: dict[tuple[int, str], GroupDelta]
    """By (layer, group name); absent where the adapter leaves a group alone."""
    embedding: EmbeddingDelta | None
    saved_embedding: torch.Tensor | None  # [vocab, hidden]
    saved_head: torch.Tensor | None  # [vocab, hidden]
    max_ranks: int
    """The most ranks of any slice, in whole pages."""
    is_low_rank: bool
    """Whether it consists of low-rank factors of linear layers alone, so that it may be mixed with others by weight."""

    @property
    def num_bytes(self) -> int:
        return self.block.nbytes

    def moved_to(self, device: torch.device) -> "ResidentAdapter":
        """A copy elsewhere: one transfer, then the same views of the new block."""
        block = torch.empty_like(self.block, device=device)
        block.copy_(self.block, non_blocking=True)
        return rebased(self, block)


def compacted(
    digest: str,
    deltas: dict[tuple[int, str], GroupDelta],
    embedding: EmbeddingDelta | None,
    saved_embedding: torch.Tensor | None,
    saved_head: torch.Tensor | None,
) -> ResidentAdapter:
    """An adapter of loose tensors, copied into one block."""
    widths = [part.rank_end - part.rank_start for delta in deltas.values() for part in delta.slices]
    more = (embedding, saved_embedding, saved_head)
    loose = ResidentAdapter(
        digest,
        torch.empty(0, dtype=torch.uint8),
        deltas,
        *more,
        max_ranks=max(widths, default=0),
        is_low_rank=all(part is None for part in more) and all(delta.is_low_rank for delta in deltas.values()),
    )
    tensors: list[torch.Tensor] = []
    _map_tensors(loose, tensors.append, loose.block)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    block = torch.empty(starts[-1], dtype=torch.uint8)
    start_of = iter(starts)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        start = next(start_of)
        return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    placed: ResidentAdapter = _map_tensors(loose, place, block)
    return placed


def rebased(adapter: ResidentAdapter, block: torch.Tensor) -> ResidentAdapter:
    """The same views over another block with the same bytes."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() * tensor.itemsize
        return block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    moved: ResidentAdapter = _map_tensors(adapter, view, block)
    return moved


def _map_tensors(part: Any, change: Callable[[torch.Tensor], torch.Tensor | None], block: torch.Tensor) -> Any:
    """`part` with every tensor changed, in a fixed order, but for the block itself, which becomes `block`."""
    match part:
        case torch.Tensor():
            return change(part)
        case dict():
            return {key: _map_tensors(value, change, block) for key, value in part.items()}
        case tuple():
            return tuple(_map_tensors(value, change, block) for value in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {item.name: getattr(part, item.name) for item in fields(part)}
    return type(part)(
        **{name: block if name == "block" else _map_tensors(value, change, block) for name, value in values.items()}
    )


def pages_of_ranks(rank: int) -> int:
    """Ranks as they are stored: whole pages."""
    return -(-rank // RANK_PAGE) * RANK_PAGE
