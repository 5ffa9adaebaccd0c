# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the kernels that multiply tiles of rows with the codes of their experts on GPUs.

    sort_features        a program puts some features of one tile in the order in which its expert's codes are stored
    multiply_code_tiles  a program multiplies one tile with one block of its expert's outputs
    multiply_float8_tiles  the same with rows and weights of float8_e4m3fn

The codes are read as quantization/triton reads those of a layer. Tiles are those of kernels.py.
"""

import triton
import triton.language as tl

from graftwork.engine.experts.triton.kernels import rows_of_tile
from graftwork.engine.quantization.triton.float8_kernels import sum_float8_blocks
from graftwork.engine.quantization.triton.kernels import scaled, sum_blocks

COUNTS = ("num_blocks", "in_features", "out_features", "out_blocks", "feature_blocks", "sum_stride")
"""Counts that are passed to the kernels. Without this list Triton would compile variants for special values."""
UNALIGNED = ("packed", "scales", "offsets", "orders", "biases", "sums", "y")
"""Arguments whose alignment does not matter."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def sort_features_kernel(
    x,
    orders,  # int64 [num_experts], the addresses of int64 [in_features]
    y,
    tile_expert,
    tile_start,
    tile_length,
    in_features,
    feature_blocks,
    x_stride,
    y_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes BLOCK features of one tile to y, in the order of its expert."""
    tile = tl.program_id(0) // feature_blocks
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    order = tl.load(orders + tl.load(tile_expert + tile)).to(tl.pointer_type(tl.int64))
    rows, row_mask = rows_of_tile(tile, tile_start, length, BLOCK_ROWS)
    features = tl.program_id(0) % feature_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = features < in_features
    sources = tl.load(order + features, mask=mask, other=0)
    own = tl.load(x + rows * x_stride + sources[None, :], mask=row_mask & mask[None, :])
    tl.store(y + rows * y_stride + features[None, :], own, mask=row_mask & mask[None, :])


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def multiply_code_tiles_kernel(
    x,
    packed,  # int64 [num_experts], the addresses of codes, as CODE_DTYPE [out_features, row_words]
    scales,  # int64 [num_experts], the addresses of SCALE_DTYPE [groups, out_features]
    offsets,  # int64 [num_experts], the addresses of fp32 [groups, out_features]
    biases,  # int64 [num_experts], the addresses of BIAS_DTYPE [out_features]
    sums,  # fp32 [num_rows, parts]
    y,
    tile_expert,
    tile_start,
    tile_length,
    num_blocks,
    in_features,
    out_features,
    out_blocks,
    row_words,
    x_stride,
    y_stride,
    sum_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # codes of a group, or 0 for one scale for each output
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ENDS: tl.constexpr,
    DTYPE: tl.constexpr,  # in which codes are multiplied
    CODE_DTYPE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of the codes of every expert
    BLOCK: tl.constexpr,
    STEP_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Multiplies one tile, up to BLOCK_ROWS rows of one expert, with BLOCK_OUT outputs of the expert's codes.

    All blocks of codes are summed in one program, from the first to the last, and the sum is rounded once.
    """
    tile = tl.program_id(0) // out_blocks
    out_block = tl.program_id(0) % out_blocks
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    expert = tl.load(tile_expert + tile)
    rows, row_mask = rows_of_tile(tile, tile_start, length, BLOCK_ROWS)
    columns = (out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT))[None, :]
    column_mask = columns < out_features
    codes = tl.multiple_of(tl.load(packed + expert).to(tl.pointer_type(CODE_DTYPE)), ALIGNMENT)
    own_scales = tl.load(scales + expert).to(tl.pointer_type(SCALE_DTYPE))
    own_offsets = tl.load(offsets + expert).to(tl.pointer_type(tl.float32)) if HAS_ZEROS else None

    total = sum_blocks(
        x + rows * x_stride,
        codes + columns.to(tl.int64) * row_words,
        own_scales,
        own_offsets,
        sums,
        rows,
        row_mask,
        columns,
        column_mask,
        0,
        num_blocks,
        in_features,
        out_features,
        sum_stride,
        KIND,
        GROUP,
        HAS_ZEROS,
        ENDS,
        DTYPE,
        BLOCK,
        STEP_FEATURES,
        BLOCK_ROWS,
        BLOCK_OUT,
    )
    if GROUP == 0:
        total = scaled(
            total,
            own_scales,
            own_offsets,
            sums,
            rows,
            row_mask,
            columns,
            column_mask,
            sum_stride,
            HAS_ZEROS,
            BLOCK_ROWS,
            BLOCK_OUT,
        )
    if HAS_BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS_DTYPE))
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(y + rows * y_stride + columns, total.to(y.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def multiply_float8_tiles_kernel(
    x,  # float8_e4m3fn [num_rows, in_features]
    row_scales,  # fp32 [num_rows]
    packed,  # int64 [num_experts], the addresses of float8_e4m3fn [out_features, row_words]
    scales,  # int64 [num_experts], the addresses of fp32 [groups, out_features]
    biases,  # int64 [num_experts], the addresses of BIAS_DTYPE [out_features]
    y,
    tile_expert,
    tile_start,
    tile_length,
    num_blocks,
    in_features,
    out_features,
    out_blocks,
    row_words,
    x_stride,
    y_stride,
    GROUP: tl.constexpr,  # codes of a group, or 0 for one scale for each output
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    BIAS_DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # in bytes, of the codes of every expert
    BLOCK: tl.constexpr,  # features of a product: a group at most
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Multiplies one tile with BLOCK_OUT outputs of its expert. See multiply_code_tiles_kernel."""
    tile = tl.program_id(0) // out_blocks
    out_block = tl.program_id(0) % out_blocks
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    expert = tl.load(tile_expert + tile)
    rows, row_mask = rows_of_tile(tile, tile_start, length, BLOCK_ROWS)
    columns = (out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT))[None, :]
    column_mask = columns < out_features
    codes = tl.multiple_of(tl.load(packed + expert).to(tl.pointer_type(CODE_DTYPE)), ALIGNMENT)
    total = sum_float8_blocks(
        x + rows * x_stride,
        codes + columns.to(tl.int64) * row_words,
        tl.load(scales + expert).to(tl.pointer_type(tl.float32)),
        row_scales + rows,
        row_mask,
        columns,
        column_mask,
        0,
        num_blocks,
        in_features,
        out_features,
        GROUP,
        IS_WHOLE,
        UPCAST,
        BLOCK,
        BLOCK_ROWS,
        BLOCK_OUT,
    )
    if HAS_BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(BIAS_DTYPE))
        total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    tl.store(y + rows * y_stride + columns, total.to(y.dtype.element_ty), mask=row_mask & column_mask)
