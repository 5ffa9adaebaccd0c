"""Divides an adapter between the ranks of an engine, and hands the other ranks their parts through shared memory.

The division follows that of the base model (see ranks.py), so that applying an adapter needs no communication of its own:

    column parallel (qkv, gate_up)    A whole, B and DoRA's scales and shifts by output columns
    row parallel (o, down)            A by input columns, B and DoRA's scales whole; shifts and biases on rank 0 alone
    embedding                         whole on each rank
    output head                       on rank 0 alone

All parts have the same shapes on all ranks but 0, which has some tensors more. So an adapter needs at most as many frames
on another rank as on rank 0.

Rank 0 reads and converts an adapter once. The parts of the others are in one anonymous block of shared memory, which
they open through rank 0's descriptor. The block ends with its last user.
"""

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from graftwork.engine.lora.resident_adapter import (
    EmbeddingDelta,
    GroupDelta,
    ResidentAdapter,
    SliceDelta,
    arranged_in,
    compacted,
    scattered,
)
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import GROUPS, HEAD_LAYER
from graftwork.engine.parallel.ranks import ROW_PARALLEL, Rank, part_of

_TARGETS_BY_GROUP = {group.name: group.targets for group in GROUPS}


class AdapterDivider:
    """Divides the adapters of one model between a number of ranks. Any thread may use it."""

    def __init__(self, model: ModelConfig, num_ranks: int) -> None:
        """`model` is the whole model."""
        self._model = model
        self._num_ranks = num_ranks

    def divide(self, adapter: ResidentAdapter) -> ResidentAdapter:
        """Returns rank 0's part of a whole adapter. Its `shares` are the parts of the other ranks."""
        own, *others = (self.part(adapter, Rank(number, self._num_ranks)) for number in range(self._num_ranks))
        return replace(own, shares=SharedParts(others))

    def part(self, adapter: ResidentAdapter, rank: Rank) -> ResidentAdapter:
        """Returns one rank's part of a whole adapter, in host memory."""
        deltas = {
            (layer, group): _part_of_group(delta, _TARGETS_BY_GROUP[group], self._model, rank)
            for (layer, group), delta in adapter.deltas.items()
            if layer != HEAD_LAYER
        }
        if rank.leads:
            deltas |= {key: delta for key, delta in adapter.deltas.items() if key[0] == HEAD_LAYER}
        saved_head = adapter.saved_head if rank.leads else None
        return compacted(adapter.digest, deltas, adapter.embedding, adapter.saved_embedding, saved_head)


def _part_of_group(delta: GroupDelta, targets: Sequence[str], model: ModelConfig, rank: Rank) -> GroupDelta:
    if targets[0] in ROW_PARALLEL:
        part = part_of(targets[0], model, rank)
        shift = delta.column_shift if rank.leads else None
        A = delta.A[:, part.start : part.end]
        return GroupDelta(A, delta.scales, delta.slices, delta.column_scale, shift)
    columns = _columns_of_rank(targets, model, rank)
    return GroupDelta(
        delta.A,
        delta.scales,
        tuple(_part_of_slice(one, targets, model, rank) for one in delta.slices),
        None if delta.column_scale is None else delta.column_scale[columns],
        None if delta.column_shift is None else delta.column_shift[columns],
    )


def _part_of_slice(one: SliceDelta, targets: Sequence[str], model: ModelConfig, rank: Rank) -> SliceDelta:
    start = own_start = 0
    for target in targets:
        part = part_of(target, model, rank)
        if start == one.out_start:
            own_end = own_start + part.end - part.start
            own_B = one.B[:, part.start : part.end]
            return replace(one, B=own_B, out_start=own_start, out_end=own_end)
        start += model.target_shapes[target][0]
        own_start += part.end - part.start
    raise AssertionError("a slice that begins at no projection of its group")


def _columns_of_rank(targets: Sequence[str], model: ModelConfig, rank: Rank) -> torch.Tensor:
    """Returns the numbers of a rank's columns in the whole output of a column-parallel group: [own columns]."""
    found: list[torch.Tensor] = []
    start = 0
    for target in targets:
        part = part_of(target, model, rank)
        found.append(torch.arange(start + part.start, start + part.end))
        start += model.target_shapes[target][0]
    return torch.cat(found)


class SharedParts:
    """Holds the parts of an adapter for the ranks above 0, in memory that other processes can open.

    The memory is freed when this object and the mappings of all processes are gone.
    """

    def __init__(self, parts: Sequence[ResidentAdapter]) -> None:
        """`parts` are the parts of the ranks 1, 2, … in order."""
        self._layouts = [_layout_of(part) for part in parts]
        self._ends = list(accumulate(part.num_bytes for part in parts))
        self.num_bytes = self._ends[-1]
        self._descriptor = os.memfd_create("graftwork-adapter")
        weakref.finalize(self, os.close, self._descriptor)
        if self.num_bytes:
            os.truncate(self._descriptor, self.num_bytes)
            with mmap.mmap(self._descriptor, self.num_bytes) as memory:
                for end, part in zip(self._ends, parts, strict=True):
                    memory[end - part.num_bytes : end] = part.buffer.numpy().tobytes()

    def ticket(self, rank: Rank) -> dict[str, Any]:
        """Returns what a rank needs to open its part: JSON values. This object must live until the rank has opened it."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        index = rank.number - 1
        return {"path": path, "end": self._ends[index], "layout": self._layouts[index]}


def open_part(ticket: Mapping[str, Any], dtype: torch.dtype) -> ResidentAdapter:
    """Opens a rank's part of an adapter by the ticket that rank 0 has made. The result lies in the shared memory.

    `dtype` is the dtype in which the engine computes.
    """
    loose = _from_layout(ticket["layout"], dtype)
    num_bytes, end = ticket["layout"]["num_bytes"], ticket["end"]
    if not num_bytes:
        return loose
    memory = torch.from_file(ticket["path"], shared=True, size=end, dtype=torch.uint8)
    return arranged_in(loose, memory[end - num_bytes :])


def _layout_of(adapter: ResidentAdapter) -> dict[str, Any]:
    """Returns the shapes of an adapter's tensors as JSON values."""
    embedding, saved = adapter.embedding, adapter.saved_embedding
    return {
        "digest": adapter.digest,
        "num_bytes": adapter.num_bytes,
        "deltas": [[layer, group, _shapes_of(delta)] for (layer, group), delta in adapter.deltas.items()],
        "embedding": None if embedding is None else [[*embedding.A.shape], [*embedding.B.shape], embedding.scale],
        "saved_embedding": None if saved is None else [*saved.shape],
    }


def _shapes_of(delta: GroupDelta) -> dict[str, Any]:
    optional = (delta.scales, delta.column_scale, delta.column_shift)
    slices = [
        [[*one.B.shape], one.rank_start, one.rank_end, one.out_start, one.out_end, one.scale] for one in delta.slices
    ]
    return {
        "A": [*delta.A.shape],
        "fp32": [None if one is None else [*one.shape] for one in optional],
        "slices": slices,
    }


def _from_layout(layout: Mapping[str, Any], dtype: torch.dtype) -> ResidentAdapter:
    """Returns an adapter without values, which has the shapes of a layout."""

    def empty(shape: Sequence[int], kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def delta(shapes: Mapping[str, Any]) -> GroupDelta:
        scales, column_scale, column_shift = (
            None if shape is None else empty(shape, torch.float32) for shape in shapes["fp32"]
        )
        slices = tuple(SliceDelta(empty(shape), *numbers) for shape, *numbers in shapes["slices"])
        return GroupDelta(empty(shapes["A"]), scales, slices, column_scale, column_shift)

    embedding, saved = layout["embedding"], layout["saved_embedding"]
    return scattered(
        layout["digest"],
        {(layer, group): delta(shapes) for layer, group, shapes in layout["deltas"]},
        None if embedding is None else EmbeddingDelta(empty(embedding[0]), empty(embedding[1]), embedding[2]),
        None if saved is None else empty(saved),
        None,
    )
