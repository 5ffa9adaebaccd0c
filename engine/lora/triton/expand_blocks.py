# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines what the Triton LoRA kernels share: helper functions, and lists of kernel arguments.

The lists name arguments that Triton must not specialise for: it compiles one kernel for all their values. A slice is
one projection of a fused layer, such as q of qkv. An output block is a range of a slice's output columns. One program
computes one output block.
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
    """Returns the slice (projection of a fused layer, such as q of qkv) that contains output block `block`.

    Also returns the number of the first block in this slice. The blocks of all slices are numbered one after another,
    from 0. `widths` is the address of an array with the number of output columns of each slice.
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
    """Returns whether any adapter of a tile changes the projection `slice_index` of a fused layer (such as qkv).

    A tile is a group of tokens with the same adapters. `part_slot` is the address of `num_parts` numbers: the slot of
    each of these adapters. An adapter's slot is its row in `ranks`, `column_scales` and `column_shifts`.
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
    """Returns column_scale * y_block + column_shift in fp32, for one adapter and one projection.

    `column_scales` and `column_shifts` are arrays of addresses, and `entry` is an index in both. Address 0 means scale
    1 or shift 0. `columns` are the numbers of y_block's columns within the projection, which has `width` columns.
    """
    scale_address = tl.load(column_scales + entry)
    shift_address = tl.load(column_shifts + entry)
    scale_pointers = scale_address.to(tl.pointer_type(tl.float32)) + columns
    shift_pointers = shift_address.to(tl.pointer_type(tl.float32)) + columns
    scale = tl.load(scale_pointers, mask=columns < tl.where(scale_address != 0, width, 0), other=1.0)
    shift = tl.load(shift_pointers, mask=columns < tl.where(shift_address != 0, width, 0), other=0.0)
    return y_block * scale + shift
