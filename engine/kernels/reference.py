"""What the LoRA kernels must compute, in plain torch: the oracle that every kernel is held to.

Never fast, never clever: one tile and one slice at a time, in fp32.
"""

from collections.abc import Sequence

import torch

from graftwork.engine.kernels.lora_segments import LoraSegments
from graftwork.engine.kernels.slice_table import SlotPairs


def lora_delta(
    x: torch.Tensor, segments: LoraSegments, slots: Sequence[SlotPairs], slice_widths: Sequence[int]
) -> torch.Tensor:
    """What the adapters add to a fused layer's output: fp32 [num_rows, sum of widths], zero for rows of the base.

    `x` is [num_rows, in_features]; `slots` are the adapters by slot, each by slice.
    """
    delta = torch.zeros(x.shape[0], sum(slice_widths), dtype=torch.float32, device=x.device)
    tiles = zip(segments.tile_start.tolist(), segments.tile_length.tolist(), segments.tile_slot.tolist(), strict=True)
    for start, length, slot in tiles:
        rows = segments.permutation[start : start + length].long()  # [length]
        first_column = 0
        for pair, width in zip(slots[slot], slice_widths, strict=True):
            if pair is not None:
                v = x[rows].float() @ pair.A.to(x.device).float().t()  # [length, rank]
                part = pair.scale * (v @ pair.B.to(x.device).float().t())  # [length, width]
                delta[rows, first_column : first_column + width] = part
            first_column += width
    return delta


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    segments: LoraSegments,
    slots: Sequence[SlotPairs],
    slice_widths: Sequence[int],
) -> torch.Tensor:
    """The output with the delta added in fp32 and rounded once. Returns a new tensor like y."""
    delta = lora_delta(x, segments, slots, slice_widths)
    expected = y.clone()
    touched = segments.permutation[: int(segments.tile_length.sum())].long()
    expected[touched] = (y[touched].float() + delta[touched]).to(y.dtype)
    return expected
