"""Holds an adapter in the form that the forward pass uses: in the engine's dtype, in one buffer.

All tensors of the adapter are views of this buffer. So one copy moves the whole adapter between host and device, and its
size in bytes is known exactly. Linear layers with the same input, such as q, k and v, form a group of projections and
are computed together.

Each adapter's rank is padded with zeros to a multiple of eight, and not to the largest rank of the batch. So an adapter
of rank 8 costs only eight ranks, even beside an adapter of rank 128. The padding also keeps the bits of a delta the
same, whichever other adapters are multiplied in the same product (see packs.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch

from graftwork.engine.model.projections import HEAD, HEAD_LAYER

RANK_PAGE = 8


_ALIGNMENT = 64  # bytes, of every tensor in its buffer


TensorChange = Callable[[torch.Tensor], torch.Tensor]


def _changed(tensor: torch.Tensor | None, change: TensorChange) -> torch.Tensor | None:
    return None if tensor is None else change(tensor)


@dataclass(frozen=True, slots=True)
class SliceDelta:
    """The matrix B of one projection in a group of projections (linear layers with the same input x).

    The group's v = x @ A.T has the ranks of all its projections as columns. The columns [rank_start, rank_end) of v are
    multiplied by `B`. The product is added to the columns [out_start, out_end) of the group's output.
    """

    B: torch.Tensor  # [ranks, out_features]
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int
    scale: float = 1.0
    """The factor that `GroupDelta.scales` has for these ranks, where the host reads it without the device."""

    def mapped(self, change: TensorChange) -> "SliceDelta":
        return replace(self, B=change(self.B))


@dataclass(frozen=True, slots=True)
class GroupDelta:
    """An adapter's change of the output y of one group of projections, for the input x:

        y = column_scale * y + column_shift + (scales * (x @ A.T)) @ B

    B stands for the matrices in `slices`. A group of projections is the linear layers with the same input, such as q, k
    and v. Scales that are powers of two are multiplied into A, which is exact; most scales are. Other scales are kept
    apart from A, so that a 16-bit adapter is rounded in the same way as in PEFT.
    """

    A: torch.Tensor  # [sum of ranks, in_features]; the ranks of the slices behind one another
    scales: torch.Tensor | None  # [sum of ranks] fp32; None where all are 1
    slices: tuple[SliceDelta, ...]
    column_scale: torch.Tensor | None = None  # [out_features of the group] fp32; DoRA
    column_shift: torch.Tensor | None = None  # [out_features of the group] fp32; biases

    @property
    def num_ranks(self) -> int:
        return self.A.shape[0]

    def mapped(self, change: TensorChange) -> "GroupDelta":
        return GroupDelta(
            change(self.A),
            _changed(self.scales, change),
            tuple(part.mapped(change) for part in self.slices),
            _changed(self.column_scale, change),
            _changed(self.column_shift, change),
        )

    @property
    def is_low_rank(self) -> bool:
        """Whether the adapter changes these layers by low-rank factors only, without column_scale or column_shift.

        Only such a change may be in a mixture: a request that uses several adapters at once, each with its own weight.
        """
        return self.column_scale is None and self.column_shift is None


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """An adapter's low-rank change of the embedding. It adds scale * (A[token] @ B) to the embedding of a token."""

    A: torch.Tensor  # [vocab, ranks]
    B: torch.Tensor  # [ranks, hidden]
    scale: float

    def mapped(self, change: TensorChange) -> "EmbeddingDelta":
        return EmbeddingDelta(change(self.A), change(self.B), self.scale)


@dataclass(frozen=True, slots=True)
class ExpertDelta:
    """An adapter's change of one group of projections of all experts of a layer. For a row x of one expert, it adds
    (scales * (x @ A.T)) @ B. Experts that the adapter does not change have zeros.
    """

    A: torch.Tensor  # [experts, ranks, in_features]
    B: torch.Tensor  # [experts, ranks, out_features]
    scales: torch.Tensor | None  # [experts, ranks] fp32; None where all are 1

    @property
    def num_ranks(self) -> int:
        return self.A.shape[1]

    def mapped(self, change: TensorChange) -> "ExpertDelta":
        return ExpertDelta(change(self.A), change(self.B), _changed(self.scales, change))


ExpertDeltas = dict[tuple[int, str], ExpertDelta]
"""Changes of experts by layer and group (one of EXPERT_GROUPS)."""


class OtherShares(Protocol):
    """Holds the parts of an adapter that the other ranks of a tensor-parallel engine need, in host memory."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """An adapter whose tensors are all in one buffer, on the host or on the device."""

    digest: str
    buffer: torch.Tensor  # [num_bytes] uint8; every tensor below is a view of it
    deltas: dict[tuple[int, str], GroupDelta]
    """The changes by (layer, group name). A group that the adapter does not change is absent."""
    embedding: EmbeddingDelta | None
    saved_embedding: torch.Tensor | None  # [vocab, hidden]
    saved_head: torch.Tensor | None  # [vocab, hidden]
    max_ranks: int
    """The most ranks of any projection, rounded up to whole pages of eight."""
    is_low_rank: bool
    """Whether the adapter has only low-rank factors of linear layers, so that it may be part of a weighted mixture."""
    shares: "OtherShares | None" = None
    """The parts of the adapter that other ranks place on their devices; None without other ranks. The adapter has them on
    the host, and on the device only until they were passed on.
    """
    experts: ExpertDeltas = field(default_factory=dict)
    """The changes of experts. They are low-rank factors alone."""
    input_embedding: EmbeddingDelta | None = None
    """The change of the table that gives each layer an input of its own."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the adapter in host memory, with the parts of other ranks."""
        return self.buffer.nbytes + (0 if self.shares is None else self.shares.num_bytes)

    @property
    def changes_vocabulary(self) -> bool:
        """Whether the adapter changes an embedding or the output head."""
        embeddings = (self.embedding, self.input_embedding, self.saved_embedding)
        parts = (*embeddings, self.saved_head, self.deltas.get((HEAD_LAYER, HEAD.name)))
        return any(part is not None for part in parts)

    def over(self, buffer: torch.Tensor) -> "ResidentAdapter":
        """Returns the same adapter with tensors that are views of `buffer`. Copies nothing.

        The caller must make sure that `buffer` has the same content as the adapter's own buffer.
        """
        start_of_own, views = int(self.buffer.storage_offset()), _Views(buffer)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return views.at(int(tensor.storage_offset()) * tensor.itemsize - start_of_own, tensor)

        return self.mapped(view, buffer)

    def mapped(self, change: TensorChange, buffer: torch.Tensor) -> "ResidentAdapter":
        """Returns an adapter in which each tensor is replaced by what `change` returns for it.

        `change` is called for the tensors in a fixed order. `buffer` becomes the buffer of the returned adapter.
        """
        return replace(
            self,
            buffer=buffer,
            shares=None,
            deltas={key: delta.mapped(change) for key, delta in self.deltas.items()},
            experts={key: delta.mapped(change) for key, delta in self.experts.items()},
            embedding=None if self.embedding is None else self.embedding.mapped(change),
            input_embedding=None if self.input_embedding is None else self.input_embedding.mapped(change),
            saved_embedding=_changed(self.saved_embedding, change),
            saved_head=_changed(self.saved_head, change),
        )


class _Views:
    """Makes contiguous tensors in a buffer. Each takes one torch operation, because an adapter has about a hundred
    tensors.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a view that begins `start` bytes into the buffer, with the shape and dtype of another tensor."""
        typed = self._typed.get(like.dtype)
        if typed is None:
            typed = self._typed[like.dtype] = self._buffer.view(like.dtype)
        shape, strides, stride = like.shape, list[int](), 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= size
        return typed.as_strided(shape, strides[::-1], typed.storage_offset() + start // like.itemsize)


def scattered(
    digest: str,
    deltas: dict[tuple[int, str], GroupDelta],
    embedding: EmbeddingDelta | None,
    saved_embedding: torch.Tensor | None,
    saved_head: torch.Tensor | None,
    experts: ExpertDeltas | None = None,
    input_embedding: EmbeddingDelta | None = None,
) -> ResidentAdapter:
    """Returns an adapter whose tensors are not in one buffer. See `compacted` for the arguments."""
    widths = [part.rank_end - part.rank_start for delta in deltas.values() for part in delta.slices]
    widths += [delta.num_ranks for delta in (experts or {}).values()]
    more = (embedding, saved_embedding, saved_head)
    is_low_rank = all(part is None for part in (*more, input_embedding))
    return ResidentAdapter(
        digest,
        torch.empty(0, dtype=torch.uint8),
        deltas,
        *more,
        max_ranks=max(widths, default=0),
        is_low_rank=is_low_rank and all(delta.is_low_rank for delta in deltas.values()),
        experts=experts or {},
        input_embedding=input_embedding,
    )


def compacted(
    digest: str,
    deltas: dict[tuple[int, str], GroupDelta],
    embedding: EmbeddingDelta | None,
    saved_embedding: torch.Tensor | None,
    saved_head: torch.Tensor | None,
    experts: ExpertDeltas | None = None,
    input_embedding: EmbeddingDelta | None = None,
) -> ResidentAdapter:
    """Builds an adapter from separate tensors: copies them into one new buffer of CPU memory.

    The keys of `deltas` are pairs (layer, name of the group of projections). `saved_embedding` and `saved_head` replace
    the base model's embedding and output head; None replaces nothing.
    """
    loose = scattered(digest, deltas, embedding, saved_embedding, saved_head, experts, input_embedding)
    buffer = torch.zeros(_starts(loose)[-1], dtype=torch.uint8)
    arranged = arranged_in(loose, buffer)
    copies = iter(_tensors(loose))
    arranged.mapped(lambda view: view.copy_(next(copies)), buffer)
    return arranged


def arranged_in(loose: ResidentAdapter, buffer: torch.Tensor) -> ResidentAdapter:
    """Returns an adapter with the shapes and dtypes of `loose`, whose tensors are views of `buffer`. Copies nothing.

    `buffer` must have the content that `compacted` has written for the same shapes.
    """
    start_of, views = iter(_starts(loose)), _Views(buffer)
    return loose.mapped(lambda tensor: views.at(next(start_of), tensor), buffer)


def _tensors(adapter: ResidentAdapter) -> list[torch.Tensor]:
    """Returns all tensors of an adapter, in the order of `ResidentAdapter.mapped`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    adapter.mapped(note, adapter.buffer)
    return found


def _starts(adapter: ResidentAdapter) -> list[int]:
    """Returns where in its buffer each tensor of an adapter begins, in bytes, and at last the size of the buffer."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in _tensors(adapter)]
    return list(accumulate(sizes, initial=0))


def pages_of_ranks(rank: int) -> int:
    """Returns the number of ranks that are stored for an adapter of rank `rank`: the next multiple of eight.

    The added ranks are zeros.
    """
    return -(-rank // RANK_PAGE) * RANK_PAGE
