# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines code that the Triton kernels share: lists of arguments for which no variants are compiled, and helpers for
output blocks.

A slice is one projection of a fused layer, such as q of qkv. An output block is a range of a slice's output columns
that one program computes.
"""

import triton
import triton.language as tl

UNALIGNED = ("a_pointers", "b_pointers", "column_scales", "column_shifts", "ranks", "scales")
"""Arguments whose alignment does not matter, because only scalars are read from them.

Without this list Triton would compile a variant for every combination of alignments.
"""
COUNTS = ("slot_words", "rank_blocks", "num_spans", "out_blocks")
"""Counts that are passed to the kernels. Without this list Triton would compile variants for special values."""


@triton.jit
def find_slice(block, widths, NUM_SLICES: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Returns the slice (projection of a fused layer) that output block `block` belongs to, and the slice's first
    block.

    Blocks are numbered through all slices. Block 0 is the first of slice 0.
    """
    slice_index = 0
    first_block = 0
    blocks_before = 0
    for candidate in tl.static_range(NUM_SLICES):
        slice_index = tl.where(block >= blocks_before, candidate, slice_index)
        first_block = tl.where(block >= blocks_before, blocks_before, first_block)
        blocks_before += (tl.load(widths + candidate) + BLOCK_OUT - 1) // BLOCK_OUT
    return slice_index, first_block


@triton.jit
def is_changed(
    ranks,
    column_scales,
    column_shifts,
    part_slot,
    num_parts,
    slice_index,
    slot_words,
    HAS_COLUMNS: tl.constexpr,
):
    """Returns whether any adapter of a tile (a group of rows) changes the slice (projection) `slice_index`.

    `part_slot` is the address of the tile's `num_parts` slots, one for each adapter.
    """
    largest = 0
    for part in range(num_parts):
        largest = max(largest, tl.load(ranks + tl.load(part_slot + part) * slot_words * 2 + slice_index))
    changed = largest > 0
    if HAS_COLUMNS:
        entry = tl.load(part_slot) * slot_words + slice_index
        changed = changed | (tl.load(column_scales + entry) != 0) | (tl.load(column_shifts + entry) != 0)
    return changed


@triton.jit
def change_columns(y_block, column_scales, column_shifts, entry, columns, width):
    """Returns column_scale * y_block + column_shift in fp32. Scale and shift are those of one adapter and one
    projection.

    `entry` is the index of their addresses in `column_scales` and `column_shifts`. An absent scale counts as 1, an
    absent shift as 0. `columns` are the numbers of the columns within the projection. They must broadcast with y_block.
    """
    scale_address = tl.load(column_scales + entry)
    shift_address = tl.load(column_shifts + entry)
    scale_pointers = scale_address.to(tl.pointer_type(tl.float32)) + columns
    shift_pointers = shift_address.to(tl.pointer_type(tl.float32)) + columns
    scale = tl.load(scale_pointers, mask=columns < tl.where(scale_address != 0, width, 0), other=1.0)
    shift = tl.load(shift_pointers, mask=columns < tl.where(shift_address != 0, width, 0), other=0.0)
    return y_block * scale + shift
