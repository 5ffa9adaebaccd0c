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
def find_slice(
    block, widths, offsets, NUM_SLICES: tl.constexpr, BLOCK_OUT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr
):
    """Finds the slice (projection of a fused layer, such as q of qkv) that contains output block `block`.

    Returns its number, its number of output columns, its first column in y, and the number of its first block. The
    blocks of all slices are numbered one after another, from 0. `widths` and `offsets` are the addresses of arrays with
    the columns and the first column of each slice: multiples of COLUMN_ALIGNMENT. No load waits for another.
    """
    slice_index = 0
    width = tl.load(widths)
    offset = tl.load(offsets)
    first_block = 0
    blocks_before = (width + BLOCK_OUT - 1) // BLOCK_OUT
    for candidate in tl.static_range(1, NUM_SLICES):
        candidate_width = tl.load(widths + candidate)
        is_later = block >= blocks_before
        slice_index = tl.where(is_later, candidate, slice_index)
        width = tl.where(is_later, candidate_width, width)
        offset = tl.where(is_later, tl.load(offsets + candidate), offset)
        first_block = tl.where(is_later, blocks_before, first_block)
        blocks_before += (candidate_width + BLOCK_OUT - 1) // BLOCK_OUT
    # The hints belong here: Triton forgets those that are given to the results of a function.
    return slice_index, tl.multiple_of(width, COLUMN_ALIGNMENT), tl.multiple_of(offset, COLUMN_ALIGNMENT), first_block


@triton.jit
def load_part(parts, part_weights, part, ranks, pointers, scales, slice_index, slot_words):
    """Returns the rank, the address of B and the scale of one adapter of a tile, for the projection `slice_index`.

    A tile is a group of tokens with the same adapters. `parts` is the address of the slots of these adapters, and
    `part_weights` that of their weights. An adapter's slot is its row in `ranks`, `pointers` and `scales`.
    """
    slot = tl.load(parts + part)
    number = slot * slot_words * 2 + slice_index
    scale = tl.load(scales + number) * tl.load(part_weights + part)
    return tl.load(ranks + number), tl.load(pointers + slot * slot_words + slice_index), scale


@triton.jit
def is_missing(row, address):
    """Returns False. A branch that asks for it cannot be taken before the row's number and the address are there.

    Without it the compiler loads them behind the branch, because nothing before it needs them, and a program waits for
    memory once more.
    """
    return (row < 0) | (address == -1)


@triton.jit
def is_changed(
    first_rank,
    ranks,
    column_scales,
    column_shifts,
    parts,
    num_parts,
    slice_index,
    slot_words,
    NUM_PARTS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Returns whether any adapter of a tile changes the projection `slice_index` of a fused layer (such as qkv).

    `first_rank` is the rank of the tile's first adapter. `parts` is the address of the slots of all of them; entries
    from `num_parts` on are padding, and name a slot that may be read.
    """
    largest = first_rank
    for part in tl.static_range(1, NUM_PARTS):
        rank = tl.load(ranks + tl.load(parts + part) * slot_words * 2 + slice_index)
        largest = max(largest, tl.where(part < num_parts, rank, 0))
    changed = largest > 0
    if HAS_COLUMNS:
        entry = tl.load(parts) * slot_words + slice_index
        changed = changed | (tl.load(column_scales + entry) != 0) | (tl.load(column_shifts + entry) != 0)
    return changed & (num_parts > 0)


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
