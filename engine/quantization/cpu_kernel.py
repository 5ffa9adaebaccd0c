"""Multiplies rows with quantised weights on a CPU, without making the weights dense first: y = x @ dequantised(W).T.

A row of codes is read once for up to four rows of x, so decoding reads int8 or int4 from memory in place of bf16. Codes
become fp32 in registers. Sums are fp32: the products of a group of codes are added up, then multiplied by the group's
scale and added to the sum of a panel; panels are added in their order. Zero points join as one more product: the sums of
x over each group times the offsets, which are scale * zero point.

Invariant: the bits of a row of y do not depend on how many rows there are, nor on their content. Each row has sums of its
own, computed by the same instructions in the same order, alone or beside three others. Every product that is added is
fused by name, so the compiler never chooses.

`expand` makes the weights dense, bit by bit as `QuantizedWeight.dense` does in torch.

numba compiles this file at the first call, and again when this file changes. It does not notice changes in other files,
so all compiled code must be here. Importing this file loads numba, so import it only on CPUs.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Floats = NDArray[np.float32]

LANES = 16
BLOCK = 128
"""The codes that one turn of a loop reads. Rows of codes are padded to whole blocks."""
PANEL_BLOCKS = 8
"""The blocks whose sum is added to y at once. The x of a panel, for four rows, fits the first cache."""
ROWS = 4
"""The rows of x that are computed together. One row is computed alone; other numbers are padded to a multiple."""
_TILE_BYTES = 2**18
"""The bytes of codes that are read again for each four rows of x, and stay in the second cache."""
_AHEAD_BYTES = 8192
_LINE_BYTES = 64

INT4, INT8, FLOAT8 = numba.types.uint8, numba.types.int8, numba.types.int16
"""The kinds of codes: four bits from -8 to 7, eight bits from -128 to 127, and float8_e4m3fn. A kind is told by the type
of an argument `like`, because numba compiles a function anew for each combination of types."""
FP32, BF16, FP16 = numba.types.float32, numba.types.uint16, numba.types.int16
"""The dtypes to which values are rounded, told in the same way."""

_INT8, _INT16, _INT32, _INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_FLOATS, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_HALF, LANES)
_WORDS, _SHORTS, _BYTES = (ir.VectorType(kind, LANES) for kind in (_INT32, _INT16, _INT8))


class _Writer:
    """Writes LLVM instructions for vectors of sixteen numbers."""

    def __init__(self, builder: Any, codes: Any) -> None:
        self.builder = builder
        self._codes = codes
        self.block_bytes = BLOCK // 2 if codes == INT4 else BLOCK

    def address(self, base: Any, at: Any, item_bytes: int) -> Any:
        return self.builder.add(base, self.builder.mul(at, _INT64(item_bytes)))

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: Any) -> None:
        byte = _INT8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self.builder.inttoptr(address, byte), _INT32(0), _INT32(3), _INT32(1)])

    def read_ahead(self, block: Any) -> None:
        for line in range(0, self.block_bytes, _LINE_BYTES):
            self.prefetch(self.builder.add(block, _INT64(_AHEAD_BYTES + line)))

    def everywhere(self, number: Any) -> Any:
        """Returns a vector that has one number in all lanes."""
        first = self.builder.insert_element(_FLOATS(ir.Undefined), number, _INT32(0))
        return self.builder.shuffle_vector(first, first, _WORDS([0] * LANES))

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """Returns left * right + total, rounded once."""
        name = f"llvm.fma.v{LANES}f32"
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [left, right, total])

    def sum(self, vector: Any) -> Any:
        """Returns the sum of all lanes, by adding the halves of the vector again and again."""
        width = LANES
        while width > 1:
            width //= 2
            low, high = (
                self.builder.shuffle_vector(
                    vector, vector, ir.VectorType(_INT32, width)(list(range(first, first + width)))
                )
                for first in (0, width)
            )
            vector = self.builder.fadd(low, high)
        return self.builder.extract_element(vector, _INT32(0))

    def words(self, block: Any) -> Any:
        """Loads the sixteen words of a block of INT4. Word l has in its nibble j the code j * 16 + l."""
        return self.load(block, _WORDS, 4) if self._codes == INT4 else None

    def codes_of(self, block: Any, words: Any, part: int) -> Any:
        """Returns the codes part * 16 … part * 16 + 15 of a block as fp32."""
        builder = self.builder
        if self._codes == INT4:
            upper = builder.shl(words, _WORDS([28 - 4 * part] * LANES))
            return builder.sitofp(builder.ashr(upper, _WORDS([28] * LANES)), _FLOATS)
        bits = self.load(builder.add(block, _INT64(part * LANES)), _BYTES, 1)
        if self._codes == INT8:
            return builder.sitofp(builder.sext(bits, _WORDS), _FLOATS)
        # An e4m3 number has the exponent and fraction of the fp16 number with these bits, 8 powers of two below.
        wide = builder.zext(bits, _SHORTS)
        sign = builder.shl(builder.and_(wide, _SHORTS([0x80] * LANES)), _SHORTS([8] * LANES))
        rest = builder.shl(builder.and_(wide, _SHORTS([0x7F] * LANES)), _SHORTS([7] * LANES))
        halves = builder.bitcast(builder.or_(sign, rest), _HALVES)
        return builder.fmul(builder.fpext(halves, _FLOATS), _FLOATS([256.0] * LANES))

    def scale_of(self, scales: Any, block: Any, quarter: int, per_block: int, shift: Any) -> Any:
        """Loads the scale of a block, or of a quarter of it."""
        builder = self.builder
        number = builder.add(builder.mul(block, _INT64(per_block)), _INT64(quarter))
        return self.load(self.address(scales, builder.lshr(number, shift), 4), _FLOAT, 4)

    def rounded(self, values: Any, kind: Any) -> Any:
        """Returns fp32 values rounded to a dtype, as fp32: to the nearest, and to an even last bit on a tie."""
        builder = self.builder
        if kind == FP16:
            return builder.fpext(builder.fptrunc(values, _HALVES), _FLOATS)
        if kind == BF16:
            upper = builder.shl(builder.zext(self.bfloat16(values), _WORDS), _WORDS([16] * LANES))
            return builder.bitcast(upper, _FLOATS)
        return values

    def bfloat16(self, values: Any) -> Any:
        """Returns the bits of finite fp32 values in bf16."""
        builder = self.builder
        bits = builder.bitcast(values, _WORDS)
        odd = builder.and_(builder.lshr(bits, _WORDS([16] * LANES)), _WORDS([1] * LANES))
        half = builder.add(_WORDS([0x7FFF] * LANES), odd)
        return builder.trunc(builder.lshr(builder.add(bits, half), _WORDS([16] * LANES)), _SHORTS)


def _panel(num_rows: int) -> Callable[..., Any]:
    """Makes the intrinsic panel(row, scales, shift, first, count, x, x_bytes, y, y_bytes, codes, quarters).

    It adds the products of one row of codes with `num_rows` rows of x to y[0], y[y_bytes], …, over the blocks first …
    first + count - 1. All arguments but the last two are addresses or numbers: `x` is that of the first row's first
    feature in `first`. Block b has the scale b >> shift; with `quarters` of a type of 64 bits, quarter q of it has the
    scale (4 * b + q) >> shift.
    """

    def panel(
        context: Any,
        row: Any,
        scales: Any,
        shift: Any,
        first: Any,
        count: Any,
        x: Any,
        x_bytes: Any,
        y: Any,
        y_bytes: Any,
        codes: Any,
        quarters: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _write_panel(_Writer(builder, codes), num_rows, 4 if quarters.bitwidth == 64 else 1, values)
            return context.get_dummy_value()

        return numba.types.void(row, scales, shift, first, count, x, x_bytes, y, y_bytes, codes, quarters), generate

    return cast(Callable[..., Any], intrinsic(panel))


def _write_panel(writer: _Writer, num_rows: int, per_block: int, values: Any) -> None:
    row, scales, shift, first, count, x, x_bytes, y, y_bytes, _, _ = values
    builder, zero = writer.builder, _FLOATS([0.0] * LANES)
    totals = [cgutils.alloca_once_value(builder, zero) for _ in range(num_rows)]
    inputs = [builder.add(x, builder.mul(x_bytes, _INT64(number))) for number in range(num_rows)]
    parts = BLOCK // LANES // per_block
    with cgutils.for_range_slice(builder, _INT64(0), count, _INT64(1)) as (turn, _):
        number = builder.add(first, turn)
        block = writer.address(row, number, writer.block_bytes)
        writer.read_ahead(block)
        words, start = writer.words(block), builder.mul(turn, _INT64(BLOCK * 4))
        for quarter in range(per_block):
            scale = writer.everywhere(writer.scale_of(scales, number, quarter, per_block, shift))
            sums = [zero] * num_rows
            for part in range(quarter * parts, (quarter + 1) * parts):
                weights = writer.codes_of(block, words, part)
                at = builder.add(start, _INT64(part * LANES * 4))
                loaded = [writer.load(builder.add(each, at), _FLOATS, 4) for each in inputs]
                sums = [writer.fused(each, weights, own) for each, own in zip(loaded, sums, strict=True)]
            for own, total in zip(sums, totals, strict=True):
                builder.store(writer.fused(own, scale, builder.load(total)), total)
    for number, total in enumerate(totals):
        target = builder.add(y, builder.mul(y_bytes, _INT64(number)))
        writer.store(builder.fadd(writer.load(target, _FLOAT, 4), writer.sum(builder.load(total))), target, 4)


def _expander(quarter: int) -> Callable[..., Any]:
    """Makes the intrinsic expander(block, zero, scale, target, codes, between, like): it writes a quarter of a block of
    values at the address `target`, which is that of the block, in the dtype `like`.
    """

    def expand(
        context: Any, block: Any, zero: Any, scale: Any, target: Any, codes: Any, between: Any, like: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            block, zero, scale, target, _, _, _ = values
            writer = _Writer(builder, codes)
            words, zeros, scales = writer.words(block), writer.everywhere(zero), writer.everywhere(scale)
            item_bytes, parts = (4 if like == FP32 else 2), BLOCK // LANES // 4
            for place in range(quarter * parts, (quarter + 1) * parts):
                shifted = builder.fsub(writer.codes_of(block, words, place), zeros)
                exact = writer.rounded(builder.fmul(shifted, scales), between)
                address = builder.add(target, _INT64(place * LANES * item_bytes))
                writer.store(exact if like == FP32 else writer.bfloat16(exact), address, item_bytes)
            return context.get_dummy_value()

        return numba.types.void(block, zero, scale, target, codes, between, like), generate

    return cast(Callable[..., Any], intrinsic(expand))


def _dot(context: Any, left: Any, right: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left, right, count = values
        writer = _Writer(builder, INT8)
        total = cgutils.alloca_once_value(builder, _FLOATS([0.0] * LANES))
        with cgutils.for_range_slice(builder, _INT64(0), count, _INT64(1)) as (turn, _):
            one, other = (writer.load(writer.address(each, turn, LANES * 4), _FLOATS, 4) for each in (left, right))
            builder.store(writer.fused(one, other, builder.load(total)), total)
        return writer.sum(builder.load(total))

    return numba.types.float32(left, right, count), generate


_one_row, _four_rows = _panel(1), _panel(ROWS)
_expand_0, _expand_1, _expand_2, _expand_3 = map(_expander, range(4))
_dot_of = cast(Callable[[Any, Any, Any], np.float32], intrinsic(_dot))


def _compiled_and_kept(function: Compiled) -> Compiled:
    """Compiles a function with numba and stores the result on disk, if a folder can be written."""
    options = {"error_model": "numpy", "boundscheck": False, "nogil": True}
    try:
        return cast(Compiled, numba.njit(cache=True, **options)(function))
    except RuntimeError:
        return cast(Compiled, numba.njit(**options)(function))


@_compiled_and_kept
def products(
    matrix: tuple[int, int, int, int, int],
    outputs: tuple[int, int],
    x: Floats,
    y: Floats,
    codes: Any,
    quarters: Any,
) -> None:
    """Writes y[:, first:end] = x @ W.T for the outputs (first, end) of a weight.

    `matrix` is the address of the codes, the bytes of a row of them, the address of the scales (fp32), the number of
    scales in a row, and the shift of `panel`. x: [rows, blocks * BLOCK], y: [rows, outputs]; one row or a multiple of
    ROWS. `codes` and `quarters` are values whose types count.
    """
    code_address, row_bytes, scale_address, num_scales, shift = matrix
    first_output, end_output = outputs
    rows, width = x.shape
    blocks, x_bytes, y_bytes = width // BLOCK, x.strides[0], y.strides[0]
    x_address, y_address = np.int64(x.ctypes.data), np.int64(y.ctypes.data)
    y[:, first_output:end_output] = np.float32(0.0)
    tile = end_output - first_output if rows == 1 else max(_TILE_BYTES // row_bytes, 1)
    panels = 1 if rows == 1 else -(-blocks // PANEL_BLOCKS)
    for start in range(first_output, end_output, tile):
        for panel in range(panels):
            for row in range(0, rows, ROWS):
                for output in range(start, min(start + tile, end_output)):
                    own, scales = code_address + output * row_bytes, scale_address + output * num_scales * 4
                    target = y_address + row * y_bytes + output * 4
                    if rows == 1:  # through the whole row of codes, because memory is read best in one line
                        for first in range(0, blocks, PANEL_BLOCKS):
                            count = min(PANEL_BLOCKS, blocks - first)
                            source = x_address + first * BLOCK * 4
                            _one_row(
                                own, scales, shift, first, count, source, x_bytes, target, y_bytes, codes, quarters
                            )
                    else:
                        first = panel * PANEL_BLOCKS
                        count = min(PANEL_BLOCKS, blocks - first)
                        source = x_address + row * x_bytes + first * BLOCK * 4
                        _four_rows(own, scales, shift, first, count, source, x_bytes, target, y_bytes, codes, quarters)


@_compiled_and_kept
def subtract_offsets(offsets: Floats, outputs: tuple[int, int], group: int, x: Floats, y: Floats) -> None:
    """Subtracts from y[:, first:end] the products of the offsets with the sums of x over each group.

    offsets: [outputs, groups padded to a multiple of LANES]; group: features of a group.
    """
    first_output, end_output = outputs
    rows, width = x.shape
    padded = offsets.shape[1]
    sums = np.zeros((rows, padded), np.float32)
    for row in range(rows):
        for k in range(width):
            sums[row, k // group] += x[row, k]
    offset_address, sum_address = np.int64(offsets.ctypes.data), np.int64(sums.ctypes.data)
    for output in range(first_output, end_output):
        for row in range(rows):
            left, right = offset_address + output * padded * 4, sum_address + row * padded * 4
            y[row, output] -= _dot_of(left, right, padded // LANES)


@_compiled_and_kept
def expand(
    code_address: int,
    row_bytes: int,
    scales: Floats,
    zeros: NDArray[np.int16],
    shift: int,
    target: NDArray[Any],
    codes: Any,
    between: Any,
    quarters: Any,
) -> None:
    """Fills `target`, [outputs, blocks * BLOCK] of fp32 or of bf16 as uint16, with the values of the codes.

    A value is (code - zero) * scale, rounded to the dtype `between`, and then to that of `target`. scales, zeros:
    [outputs, scales]; there may be no zeros. Block b has the scale b >> shift; if `quarters` is 4, quarter q of it has the
    scale (4 * b + q) >> shift, and if it is 1, all quarters have the block's.
    """
    outputs, width = target.shape
    blocks, address, item_bytes = width // BLOCK, np.int64(target.ctypes.data), target.itemsize
    like, step = target[0, 0], np.int64(quarters == 4)
    for output in range(outputs):
        for block in range(blocks):
            source = code_address + output * row_bytes + block * (row_bytes // blocks)
            place = address + (output * width + block * BLOCK) * item_bytes
            first = block * quarters
            n0, n1 = first >> shift, (first + step) >> shift
            n2, n3 = (first + 2 * step) >> shift, (first + 3 * step) >> shift
            z0 = z1 = z2 = z3 = np.float32(0.0)
            if zeros.size:
                z0, z1 = np.float32(zeros[output, n0]), np.float32(zeros[output, n1])
                z2, z3 = np.float32(zeros[output, n2]), np.float32(zeros[output, n3])
            _expand_0(source, z0, scales[output, n0], place, codes, between, like)
            _expand_1(source, z1, scales[output, n1], place, codes, between, like)
            _expand_2(source, z2, scales[output, n2], place, codes, between, like)
            _expand_3(source, z3, scales[output, n3], place, codes, between, like)
