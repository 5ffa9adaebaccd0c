"""Computes in plain torch what the Triton LoRA kernels must compute. Every kernel is tested against this file.

The code is slow and simple on purpose. It computes one tile (group of tokens with the same adapters), one adapter and
one projection at a time, in fp32.
"""

from collections.abc import Iterator, Sequence

import torch

from graftwork.engine.lora.triton.slice_table import SlotPairs, slice_terms
from graftwork.engine.lora.triton.tiles import LoraSegments, Parts


def lora_delta(
    x: torch.Tensor, segments: LoraSegments, slots: Sequence[SlotPairs], slice_widths: Sequence[int]
) -> torch.Tensor:
    """Returns what the low-rank factors of the adapters add to the output of a fused layer, such as qkv.

    x: [num_rows, in_features]. The result is fp32 [num_rows, sum of slice_widths]. Rows without an adapter get zeros.
    `slots` holds one adapter for each slot (place for one adapter), with one entry for each slice (projection, such as
    q).
    """
    delta = torch.zeros(x.shape[0], sum(slice_widths), dtype=torch.float32, device=x.device)
    for rows, parts in _tiles(segments):
        for slot, weight in parts:
            first_column = 0
            for entry, width in zip(slots[slot], slice_widths, strict=True):
                pair = slice_terms(entry).pair
                if pair is not None:
                    v = x[rows].float() @ pair.A.to(x.device).float().t()  # [length, rank]
                    part = pair.scale * weight * (v @ pair.B.to(x.device).float().t())  # [length, width]
                    delta[rows, first_column : first_column + width] += part
                first_column += width
    return delta


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    segments: LoraSegments,
    slots: Sequence[SlotPairs],
    slice_widths: Sequence[int],
) -> torch.Tensor:
    """Returns a copy of `y`, the output of a fused layer, with the adapters applied. `x` is the input of the layer.

    First scales and shifts columns, then adds the LoRA delta. Computes in fp32 and rounds once, to y's dtype. If a row
    uses several adapters, only the first of them scales and shifts columns.
    """
    delta = lora_delta(x, segments, slots, slice_widths)
    expected = y.clone()
    for rows, parts in _tiles(segments):
        base = y[rows].float()
        first_column = 0
        for entry, width in zip(slots[parts[0][0]], slice_widths, strict=True):
            columns = slice(first_column, first_column + width)
            change = slice_terms(entry)
            if change.column_scale is not None:
                base[:, columns] *= change.column_scale.to(y.device).float()
            if change.column_shift is not None:
                base[:, columns] += change.column_shift.to(y.device).float()
            first_column += width
        expected[rows] = (base + delta[rows]).to(y.dtype)
    return expected


def _tiles(segments: LoraSegments) -> Iterator[tuple[torch.Tensor, Parts]]:
    """Yields the row numbers ([length] int64) and the parts (slots with weights) of each tile that is not padding."""
    for tile in range(segments.num_tiles):
        start, length = int(segments.tile_start[tile]), int(segments.tile_length[tile])
        if length:
            num_parts = int(segments.tile_parts[tile])
            slots = segments.part_slot[tile, :num_parts].tolist()
            weights = segments.part_weight[tile, :num_parts].tolist()
            yield segments.permutation[start : start + length].long(), tuple(zip(slots, weights, strict=True))
