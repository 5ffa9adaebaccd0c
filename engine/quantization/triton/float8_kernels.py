# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the kernels that multiply float8_e4m3fn with float8_e4m3fn on GPUs with matrix units for it.

    round_rows       a program rounds one row of x, with a scale of its own: its largest absolute value / 448
    multiply_float8  a program multiplies a tile of such rows with a block of outputs, over one span of features or all

add_spans of kernels.py adds spans. The products of BLOCK features are summed by the matrix unit and then added in fp32,
because Hopper's unit keeps fewer bits of a sum of float8.

Source: the dynamic scales of each token in vLLM (`dynamic_per_token_scaled_fp8_quant`) and compressed-tensors.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import max_of
from graftwork.engine.kernels.codes import float8_of
from graftwork.engine.quantization.triton.kernels import COUNTS, UNALIGNED


@triton.jit(do_not_specialize=COUNTS)
def round_rows_kernel(x, codes, row_scales, in_features, x_stride, code_stride, BLOCK: tl.constexpr):
    """Rounds one row of x to `codes`, as uint8, and writes its scale."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, in_features, BLOCK):
        own = tl.load(x + row * x_stride + first + inner, mask=first + inner < in_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(own))
    scale = tl.maximum(max_of(largest) / 448.0, 4.359654017857143e-06)  # at least 1 / (448 * 512), as in vLLM
    tl.store(row_scales + row, scale)
    for first in range(0, in_features, BLOCK):
        mask = first + inner < in_features
        own = tl.load(x + row * x_stride + first + inner, mask=mask, other=0.0).to(tl.float32)
        scaled = tl.div_rn(own, tl.full((BLOCK,), 0.0, tl.float32) + scale)
        tl.store(codes + row * code_stride + first + inner, float8_of(scaled), mask=mask)


@triton.jit
def sum_float8_blocks(
    x_rows,  # the address of each row of x, [BLOCK_ROWS, 1]
    weight_rows,  # the address of each output's codes, [1, BLOCK_OUT]
    scales,
    row_scales,  # the address of each row's scale, [BLOCK_ROWS, 1]
    row_mask,
    columns,  # [1, BLOCK_OUT]
    column_mask,
    first_block,
    end_block,
    in_features,
    out_features,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Returns the products of some rows with the codes of some blocks, with all scales, in fp32: [BLOCK_ROWS, BLOCK_OUT]."""
    inner = tl.arange(0, BLOCK)
    shape: tl.constexpr = (BLOCK_ROWS, BLOCK_OUT)
    spanned = tl.full(shape, 0.0, tl.float32)
    for block in range(first_block, end_block):
        features = block * BLOCK + inner
        x_mask = row_mask if IS_WHOLE else row_mask & (features < in_features)[None, :]
        own = tl.load(x_rows + features[None, :], mask=x_mask, other=0.0)
        numbers = tl.load(weight_rows + features[:, None], mask=column_mask, other=0.0)
        if UPCAST:
            own, numbers = own.to(tl.float32), numbers.to(tl.float32)
        summed = tl.dot(own, numbers)
        if GROUP == 0:
            spanned += summed
        else:
            scale = tl.load(scales + block // (GROUP // BLOCK) * out_features + columns, mask=column_mask, other=0.0)
            spanned = tl.fma(summed, tl.broadcast_to(scale, shape), spanned)
    if GROUP == 0:
        spanned *= tl.load(scales + columns, mask=column_mask, other=0.0)
    return spanned * tl.load(row_scales, mask=row_mask, other=0.0)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def multiply_float8_kernel(
    x,  # float8_e4m3fn [num_rows, in_features]
    row_scales,  # fp32 [num_rows]
    packed,  # float8_e4m3fn [out_features, row_words]
    scales,  # fp32 [groups, out_features]
    bias,
    y,
    num_rows,
    row_tiles,
    num_blocks,
    span_blocks,
    num_spans,
    in_features,
    out_features,
    row_words,
    x_stride,
    y_stride,
    plane_stride,
    GROUP: tl.constexpr,  # codes of a group, or 0 for one scale for each output
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,  # features of a product: a group at most
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Multiplies one tile of BLOCK_ROWS rows with BLOCK_OUT outputs. See multiply_codes_kernel."""
    tile = tl.program_id(0) % row_tiles
    rest = tl.program_id(0) // row_tiles
    first_span = rest % num_spans if IS_PARALLEL else 0
    out_block = rest // num_spans if IS_PARALLEL else rest
    rows = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    row_mask = rows < num_rows
    columns = (out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT))[None, :]
    column_mask = columns < out_features

    total = tl.full((BLOCK_ROWS, BLOCK_OUT), 0.0, tl.float32)
    for span in range(first_span, first_span + 1 if IS_PARALLEL else num_spans):
        spanned = sum_float8_blocks(
            x + rows * x_stride,
            packed + columns.to(tl.int64) * row_words,
            scales,
            row_scales + rows,
            row_mask,
            columns,
            column_mask,
            span * span_blocks,
            tl.minimum((span + 1) * span_blocks, num_blocks),
            in_features,
            out_features,
            GROUP,
            IS_WHOLE,
            UPCAST,
            BLOCK,
            BLOCK_ROWS,
            BLOCK_OUT,
        )
        if IS_PARALLEL:
            total = spanned
        else:
            total += spanned

    mask = row_mask & column_mask
    places = rows * y_stride + columns
    if IS_PARALLEL:
        tl.store(y + first_span.to(tl.int64) * plane_stride + places, total, mask=mask)  # type: ignore[union-attr]
    else:
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
        tl.store(y + places, total.to(y.dtype.element_ty), mask=mask)
