# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Defines the kernels that multiply rows with quantised weights on GPUs: y = x @ dequantised(W).T + bias.

    sum_parts       a program sums x over a part of the features of one row; only weights with zero points need it
    multiply_codes  a program multiplies a tile of rows with a block of outputs, over one span of features or over all
    add_spans       a program adds what the programs of all spans have computed for one row

Codes become numbers of x's dtype in registers, without rounding. Matrix units multiply them, and the sum over a group of
codes is multiplied by the group's scale in fp32. So no weight is ever rounded. Zero points join as one more product: the
sums of x over each group, or over a block's part of it, times the offsets, which are - scale * zero point.

A block of BLOCK codes is multiplied in steps, because the codes of a step have the same place in all words of the block.
The order of additions follows from the layer alone: the steps of a group, the groups of a span, the spans. A product that
is added is fused by name, so the compiler never chooses.
"""

import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import sum_of

COUNTS = (
    "num_rows",
    "row_tiles",
    "num_blocks",
    "span_blocks",
    "in_features",
    "out_features",
    "num_spans",
    "part_features",
    "sum_stride",
)
"""Counts that are passed to the kernels. Without this list Triton would compile variants for special values."""
UNALIGNED = ("bias", "y", "sums")
"""Arguments whose alignment does not matter."""


@triton.jit
def bits_of(words, STEP: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the bits of numbers in DTYPE, from which `numbers_of` makes the codes of one step. See weight.py for how words
    hold them.

    An integer of 4 bits, with its sign bit flipped, becomes the last bits of a number whose last bit counts 1. Exponent
    and fraction of a float8_e4m3fn or a float4_e2m1 are put where DTYPE has them. In 16 bits, two codes of a word are
    moved at once.
    """
    if KIND == "int4" and tl.float32 == DTYPE:
        bits = ((words >> (4 * STEP)) & 15) ^ 0x4B000008
    elif KIND == "int4":
        pairs = (words >> (4 * (STEP % 4))) & 0x000F000F
        pairs = pairs ^ (0x64086408 if tl.float16 == DTYPE else 0x43084308)
        bits = (pairs >> (16 * (STEP // 4))).to(tl.int16)
    elif KIND == "float4_e2m1" and tl.float32 == DTYPE:
        moved = words << (28 - 4 * STEP)
        bits = (moved & -0x80000000) | ((moved >> 6) & 0x01C00000)
    elif KIND == "float4_e2m1":
        moved = words << (12 - 4 * (STEP % 4))  # two nibbles are at the upper ends of the halves
        if tl.float16 == DTYPE:
            pairs = (moved & -0x7FFF8000) | ((moved >> 3) & 0x0E000E00)
        else:
            pairs = (moved & -0x7FFF8000) | ((moved >> 6) & 0x01C001C0)
        bits = (pairs >> (16 * (STEP // 4))).to(tl.int16)
    elif tl.float32 == DTYPE:
        moved = words << (24 - 8 * STEP)
        bits = (moved & -0x80000000) | ((moved >> 4) & 0x07F00000)
    else:
        moved = words << 8 if STEP % 2 == 0 else words  # two bytes are at the upper ends of the halves
        if tl.float16 == DTYPE:
            pairs = (moved & -0x7FFF8000) | ((moved >> 1) & 0x3F803F80)
        else:
            pairs = (moved & -0x7FFF8000) | ((moved >> 4) & 0x07F007F0)
        bits = (pairs >> (16 * (STEP // 2))).to(tl.int16)
    return bits


@triton.jit
def numbers_of(words, STEP: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the codes of one step in DTYPE, exactly.

    A product with a power of two corrects the bias of an exponent, also of subnormal numbers: 2 ** 8 or 2 ** 120 that of a
    float8, 2 ** 14 or 2 ** 126 that of a float4.
    """
    if KIND == "int8":
        numbers = words.to(DTYPE)
    else:
        numbers = bits_of(words, STEP, KIND, DTYPE).to(DTYPE, bitcast=True)
        if KIND == "int4":
            if tl.float32 == DTYPE:
                numbers -= 8388616.0
            elif tl.float16 == DTYPE:
                numbers -= 1032.0
            else:
                numbers -= 136.0
        elif KIND == "float4_e2m1":
            if tl.float16 == DTYPE:
                numbers *= 16384.0
            else:
                numbers *= 8.507059173023462e37
        elif tl.float16 == DTYPE:
            numbers *= 256.0
        else:
            numbers *= 1.329227995784916e36
    return numbers


@triton.jit
def scales_of(stored, KIND: tl.constexpr):
    """Returns scales in fp32. Those of float4_e2m1 are stored as exponents, as powers_of_two of mxfp4.py reads them."""
    if KIND == "float4_e2m1":
        exponents = stored.to(tl.int32)
        scales = tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)
    else:
        scales = stored
    return scales


@triton.jit
def sum_blocks(
    x_rows,  # the address of each row of x, [BLOCK_ROWS, 1]
    word_rows,  # the address of each output's codes, [1, BLOCK_OUT]
    scales,
    offsets,
    sums,
    rows,  # [BLOCK_ROWS, 1], the row in `sums`
    row_mask,
    columns,  # [1, BLOCK_OUT]
    column_mask,
    first_block,
    end_block,
    in_features,
    out_features,
    sum_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ENDS: tl.constexpr,  # with what a row of x ends: a whole "block", a whole "step", or any "feature"
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Returns the products of some rows with the codes of some blocks, in fp32: [BLOCK_ROWS, BLOCK_OUT].

    They have the scales and the zero points of groups, but not one scale and zero point for each output (see `scaled`).
    """
    inner = tl.arange(0, STEP_FEATURES)
    CHUNK: tl.constexpr = BLOCK if GROUP == 0 or GROUP > BLOCK else GROUP  # codes that share a scale in a block
    STEPS: tl.constexpr = CHUNK // STEP_FEATURES
    shape: tl.constexpr = (BLOCK_ROWS, BLOCK_OUT)
    spanned = tl.full(shape, 0.0, tl.float32)
    for block in range(first_block, end_block):
        if KIND != "int8":
            words = tl.load(word_rows + block * STEP_FEATURES + inner[:, None], mask=column_mask, other=0)
        for chunk in tl.static_range(BLOCK // CHUNK):
            summed = spanned if GROUP == 0 else tl.full(shape, 0.0, tl.float32)
            for step in tl.static_range(chunk * STEPS, (chunk + 1) * STEPS):
                first = block * BLOCK + step * STEP_FEATURES
                features = first + inner
                x_mask = row_mask
                if ENDS == "step":  # one truth for all features, so that they are loaded together
                    x_mask = row_mask & (first < in_features)
                elif ENDS == "feature":
                    x_mask = row_mask & (features < in_features)[None, :]
                x_part = tl.load(x_rows + features[None, :], mask=x_mask, other=0.0).to(DTYPE)
                if KIND == "int8":
                    words = tl.load(word_rows + features[:, None], mask=column_mask, other=0)
                summed = tl.dot(x_part, numbers_of(words, step, KIND, DTYPE), summed, input_precision="ieee")
            if GROUP == 0:
                spanned = summed
            else:
                group = block // (GROUP // BLOCK) if GROUP > BLOCK else block * (BLOCK // CHUNK) + chunk
                at_group = group * out_features + columns
                scale = scales_of(tl.load(scales + at_group, mask=column_mask, other=0), KIND)
                spanned = tl.fma(summed, tl.broadcast_to(scale, shape), spanned)
                if HAS_ZEROS:
                    offset = tl.load(offsets + at_group, mask=column_mask, other=0.0)
                    part = block * (BLOCK // CHUNK) + chunk
                    sum_of_part = tl.load(sums + rows * sum_stride + part, mask=row_mask, other=0.0)
                    spanned = tl.fma(tl.broadcast_to(sum_of_part, shape), tl.broadcast_to(offset, shape), spanned)
    return spanned


@triton.jit
def scaled(
    total,
    scales,
    offsets,
    sums,
    rows,
    row_mask,
    columns,
    column_mask,
    sum_stride,
    HAS_ZEROS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Returns the sums of all blocks with the one scale, and the one zero point, of each output."""
    shape: tl.constexpr = (BLOCK_ROWS, BLOCK_OUT)
    total *= tl.load(scales + columns, mask=column_mask, other=0.0)
    if HAS_ZEROS:
        offset = tl.load(offsets + columns, mask=column_mask, other=0.0)
        sum_of_row = tl.load(sums + rows * sum_stride, mask=row_mask, other=0.0)
        total = tl.fma(tl.broadcast_to(sum_of_row, shape), tl.broadcast_to(offset, shape), total)
    return total


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def multiply_codes_kernel(
    x,
    packed,  # int8 [out_features, row_words], or int32 words of several codes
    scales,  # [groups, out_features] fp32, or uint8 exponents of float4_e2m1
    offsets,  # fp32 [groups, out_features]
    sums,  # fp32 [num_rows, parts]
    bias,
    y,  # [num_rows, out_features], or fp32 planes [spans, num_rows, out_features] if IS_PARALLEL
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
    sum_stride,
    plane_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # codes of a group, or 0 for one scale for each output
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ENDS: tl.constexpr,
    IS_PARALLEL: tl.constexpr,  # whether each span has a program
    DTYPE: tl.constexpr,  # in which codes are multiplied
    BLOCK: tl.constexpr,
    STEP_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Multiplies one tile of BLOCK_ROWS rows with BLOCK_OUT outputs."""
    tile = tl.program_id(0) % row_tiles
    rest = tl.program_id(0) // row_tiles
    first_span = rest % num_spans if IS_PARALLEL else 0
    out_block = rest // num_spans if IS_PARALLEL else rest
    rows = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    row_mask = rows < num_rows
    columns = (out_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT))[None, :]
    column_mask = columns < out_features
    x_rows = x + rows * x_stride
    word_rows = packed + columns.to(tl.int64) * row_words
    shape: tl.constexpr = (BLOCK_ROWS, BLOCK_OUT)

    total = tl.full(shape, 0.0, tl.float32)
    for span in range(first_span, first_span + 1 if IS_PARALLEL else num_spans):
        spanned = sum_blocks(
            x_rows,
            word_rows,
            scales,
            offsets,
            sums,
            rows,
            row_mask,
            columns,
            column_mask,
            span * span_blocks,
            tl.minimum((span + 1) * span_blocks, num_blocks),
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
        if IS_PARALLEL:
            total = spanned
        else:
            total += spanned

    mask = row_mask & column_mask
    places = rows * y_stride + columns
    if IS_PARALLEL:
        tl.store(y + first_span.to(tl.int64) * plane_stride + places, total, mask=mask)  # type: ignore[union-attr]
    else:
        if GROUP == 0:
            total = scaled(
                total,
                scales,
                offsets,
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
            total += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
        tl.store(y + places, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def add_spans_kernel(
    planes,  # fp32 [num_spans, num_rows, out_features]
    scales,
    offsets,
    sums,
    bias,
    y,
    num_spans,
    out_features,
    sum_stride,
    y_stride,
    plane_stride,
    HAS_SCALE: tl.constexpr,  # whether each output has one scale, which the planes lack
    HAS_ZEROS: tl.constexpr,  # whether each output has one zero point, which the planes lack
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Adds the planes of BLOCK_OUT outputs of one row, from the first to the last, as multiply_codes adds spans."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = columns < out_features
    total = tl.full((BLOCK_OUT,), 0.0, tl.float32)
    for span in range(num_spans):
        total += tl.load(planes + span * plane_stride + row * out_features + columns, mask=mask, other=0.0)
    if HAS_SCALE:
        total *= tl.load(scales + columns, mask=mask, other=0.0)
    if HAS_ZEROS:
        sum_of_row = tl.load(sums + row * sum_stride)
        offset = tl.load(offsets + columns, mask=mask, other=0.0)
        total = tl.fma(tl.full((BLOCK_OUT,), 0.0, tl.float32) + sum_of_row, offset, total)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + columns, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=UNALIGNED)
def sum_parts_kernel(
    x,
    sums,  # fp32 [num_rows, parts]
    in_features,
    part_features,
    x_stride,
    sum_stride,
    BLOCK: tl.constexpr,
):
    """Sums x over one part of the features of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((part + 1) * part_features, in_features)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(part * part_features, end, BLOCK):
        features = first + tl.arange(0, BLOCK)
        total += tl.load(x + row * x_stride + features, mask=features < end, other=0.0).to(tl.float32)
    tl.store(sums + row * sum_stride + part, sum_of(total))
