"""Computes the LoRA deltas of decoding rows on a CPU. Each adapter of a row adds weight * scales * (x @ A.T) @ B to y.

A row is one token of the step. `weight` is the adapter's weight in a mixture (several adapters in one request), else 1.

One call serves all rows, for one group of projections of one layer. The kernel reads the adapters' matrices where they
are. It computes two rows of the same adapter together, so it reads each matrix once for both. A row that is left over
is paired with itself. Invariant: both rows of a pair run the same instructions, so the bits of a row do not depend on
the other row. cpu_selftest.py checks that on each machine.

Sums are fp32 and are rounded once, when they are added to y. Rounding to bf16 is to the nearest, ties to even; a NaN
stays a NaN. Ranks are padded to a multiple of eight.

numba compiles this file at the first call, and again when this file changes. It does not notice changes in other files,
so all compiled code must be here. The machine code is stored in `__pycache__`, or in the folder that `NUMBA_CACHE_DIR`
names. Importing this file loads numba, so import it only on CPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Elements = NDArray[Any]
"""An array of float32, or of bf16 as uint16."""
Integers = NDArray[np.int64]
Address = int | np.int64

A_ADDRESS, SCALES_ADDRESS, NUM_RANKS, FIRST_SLICE = range(4)
"""Fields of an adapter's entry in a group's table: the addresses of A [ranks, in_features] and of its scales (0: none),
and the number of ranks. The fields below follow, once for each slice of the group."""
B_ADDRESS, RANK_START, SLICE_RANKS = range(3)
"""Fields of one slice in an adapter's entry: the address of B [ranks, columns], and the ranks of A that B is multiplied
with. If there are no ranks, the adapter does not change the slice."""
SLICE_FIELDS = 3

FIRST_ROW, SECOND_ROW, FIRST_PART, END_PART = range(4)
"""Fields of a pair: its two rows, which may be the same row, and the range of its parts."""

X, V, SUMS = 0, 2, 4
"""Rows of the scratch memory. Each name stands for two rows, one for each row of a pair: X holds x, V holds x @ A.T of
all parts, and SUMS holds y of one slice."""
SCRATCH_ROWS = 6

Matrix = tuple[int, int, int]
"""A matrix in memory: its address, the number of elements from one row to the next, and the number of columns. The
elements of a row are adjacent."""
Group = tuple[Integers, Integers]
"""A group of projections in one layer: the entries of all adapters [slots, FIRST_SLICE + slices * SLICE_FIELDS], and
the first and end column of each slice [slices, 2]."""
Pairs = tuple[Integers, Integers, Floats]
"""The rows of a step: the pairs [pairs, 4], and for each part its slot in the tables [parts] and its weight [parts]."""

_RANKS = 4
"""The number of rows of a matrix that are multiplied together."""
_LANES = 16
_TURN = 2 * _LANES
"""The elements of a row that one iteration of a loop reads. In bf16 they fill one cache line."""
_LINE_BYTES = 64
_AHEAD_BYTES = 12288
"""The bytes by which prefetch is ahead of the multiplication. Without it a core reads at a fraction of its rate."""


def _compiled(function: Compiled) -> Compiled:
    """Compiles a function with numba, for one thread. NaN and infinity keep their meaning."""
    return cast(Compiled, numba.njit(error_model="numpy", boundscheck=False)(function))


def _compiled_and_kept(function: Compiled) -> Compiled:
    """Compiles a function with numba and stores the result on disk, if a folder can be written."""
    try:
        return cast(Compiled, numba.njit(error_model="numpy", boundscheck=False, cache=True)(function))
    except RuntimeError:
        return _compiled(function)


_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT32, _LANES)


class _Writer:
    """Writes LLVM instructions for vectors of fp32. Loads widen the elements of rows to fp32."""

    def __init__(self, builder: Any, like: Any) -> None:
        self._builder = builder
        self._is_float = like == numba.types.float32
        self._element_bytes = 4 if self._is_float else 2

    @contextmanager
    def turns(self, count: Any) -> Iterator[Any]:
        """Writes a loop over [0, count) in steps of `_TURN`."""
        step = _INT64(_TURN)
        with cgutils.for_range_slice(self._builder, _INT64(0), count, step) as (start, _):
            yield start

    def row(self, rows: Any, row_bytes: Any, number: int) -> Any:
        """Writes the computation of a row's address. Returns the address."""
        return self._builder.add(rows, self._builder.mul(row_bytes, _INT64(number)))

    def read_ahead(self, row: Any, start: Any) -> None:
        """Prefetches the cache lines that are `_AHEAD_BYTES` after element `start` of a row. The address may be outside
        the matrix.
        """
        for line in range(0, _TURN * self._element_bytes, _LINE_BYTES):
            address = self._builder.add(row, self._builder.mul(start, _INT64(self._element_bytes)))
            self.prefetch(self._builder.add(address, _INT64(_AHEAD_BYTES + line)))

    def prefetch(self, address: Any) -> None:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(self._builder.module, kind, "llvm.prefetch.p0")
        to_read, keep_near, data = _INT32(0), _INT32(3), _INT32(1)
        self._builder.call(function, [self._builder.inttoptr(address, byte), to_read, keep_near, data])

    def floats(self, address: Any, at: Any) -> Any:
        return self._load(address, at, _FLOATS, 4)

    def elements(self, address: Any, at: Any) -> Any:
        """Loads elements of a row as a vector of fp32."""
        if self._is_float:
            return self.floats(address, at)
        bits = self._load(address, at, ir.VectorType(_INT16, _LANES), 2)
        upper = self._builder.shl(self._builder.zext(bits, _WORDS), _WORDS([16] * _LANES))
        return self._builder.bitcast(upper, _FLOATS)

    def everywhere(self, address: Any, place: int) -> Any:
        """Returns a vector that has the number at index `place` in all lanes."""
        number = self._load(address, _INT64(place), _FLOAT, 4)
        first = self._builder.insert_element(_FLOATS(ir.Undefined), number, _INT32(0))
        return self._builder.shuffle_vector(first, first, _WORDS([0] * _LANES))

    def store(self, value: Any, address: Any, at: Any) -> None:
        self._builder.store(value, self._pointer(address, at, value.type, 4), align=4)

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """Returns left * right + total, rounded once if the processor can do that."""
        product = self._builder.fmul(left, right, flags=("contract",))
        return self._builder.fadd(product, total, flags=("contract",))

    def sum(self, vector: Any) -> Any:
        """Returns the sum of all lanes, computed by halving the vector."""
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _FLOATS])
        name = f"llvm.vector.reduce.fadd.v{_LANES}f32"
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._builder.call(function, [_FLOAT(-0.0), vector], fastmath=("reassoc",))

    def _load(self, address: Any, at: Any, kind: Any, item_bytes: int) -> Any:
        return self._builder.load(self._pointer(address, at, kind, item_bytes), align=item_bytes)

    def _pointer(self, address: Any, at: Any, kind: Any, item_bytes: int) -> Any:
        place = self._builder.add(address, self._builder.mul(at, _INT64(item_bytes)))
        return self._builder.inttoptr(place, kind.as_pointer())


def _multiply(context: Any, x: Any, y: Any, rows: Any, row_bytes: Any, count: Any, v: Any, w: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, y, rows, row_bytes, count, v, w, _ = values
        writer = _Writer(builder, like)
        addresses = [writer.row(rows, row_bytes, number) for number in range(_RANKS)]
        zero = _FLOATS([0.0] * _LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in addresses]
        with writer.turns(count) as start:
            for address in addresses:
                writer.read_ahead(address, start)
            for offset in range(0, _TURN, _LANES):
                at = builder.add(start, _INT64(offset))
                pair = [writer.floats(x, at), writer.floats(y, at)]
                for address, totals in zip(addresses, sums, strict=True):
                    row = writer.elements(address, at)
                    for one, total in zip(pair, totals, strict=True):
                        builder.store(writer.fused(one, row, builder.load(total)), total)
        for number, totals in enumerate(sums):
            for target, total in zip((v, w), totals, strict=True):
                writer.store(writer.sum(builder.load(total)), target, _INT64(number))
        return context.get_dummy_value()

    return numba.types.void(x, y, rows, row_bytes, count, v, w, like), generate


def _accumulate(context: Any, x: Any, y: Any, rows: Any, row_bytes: Any, count: Any, v: Any, w: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, y, rows, row_bytes, count, v, w, _ = values
        writer = _Writer(builder, like)
        addresses = [writer.row(rows, row_bytes, number) for number in range(_RANKS)]
        factors = [[writer.everywhere(each, number) for each in (v, w)] for number in range(_RANKS)]
        with writer.turns(count) as start:
            for address in addresses:
                writer.read_ahead(address, start)
            for offset in range(0, _TURN, _LANES):
                at = builder.add(start, _INT64(offset))
                totals = [writer.floats(x, at), writer.floats(y, at)]
                for address, own in zip(addresses, factors, strict=True):
                    row = writer.elements(address, at)
                    totals = [writer.fused(factor, row, total) for factor, total in zip(own, totals, strict=True)]
                for target, total in zip((x, y), totals, strict=True):
                    writer.store(total, target, at)
        return context.get_dummy_value()

    return numba.types.void(x, y, rows, row_bytes, count, v, w, like), generate


def _pointer(context: Any, address: Any, like: Any) -> Any:
    signature = numba.types.CPointer(like)(address, like)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return signature, generate


def _widened(context: Any, element: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if element == numba.types.float32:
            return values[0]
        return builder.bitcast(builder.shl(builder.zext(values[0], _INT32), _INT32(16)), _FLOAT)

    return numba.types.float32(element), generate


def _narrowed(context: Any, value: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return values[0] if like == numba.types.float32 else _bfloat16_bits(builder, values[0])

    return like(numba.types.float32, like), generate


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """Writes the rounding of fp32 to bf16: to the nearest, and to an even last bit on a tie."""
    bits = builder.bitcast(value, _INT32)
    upper = builder.lshr(bits, _INT32(16))
    half = builder.add(_INT32(0x7FFF), builder.and_(upper, _INT32(1)))
    rounded = builder.lshr(builder.add(bits, half), _INT32(16))
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _INT32(0x7FFFFFFF)), _INT32(0x7F800000))
    quiet = builder.or_(upper, _INT32(0x40))
    return builder.trunc(builder.select(is_nan, quiet, rounded), _INT16)


def _prefetch(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _Writer(builder, None).prefetch(values[0])
        return context.get_dummy_value()

    return numba.types.void(address), generate


multiply = cast(Callable[[Address, Address, Address, int, int, Address, Address, Any], None], intrinsic(_multiply))
"""multiply(x, y, rows, row_bytes, count, v, w, like): v[:4] and w[:4] become the products of x and y with four rows.

All arguments but `count` and `like` are addresses. `count` counts elements and is a multiple of `_TURN`.
"""
accumulate = cast(Callable[[Address, Address, Address, int, int, Address, Address, Any], None], intrinsic(_accumulate))
"""accumulate(…), with the arguments of `multiply`: x += v[:4] @ four rows, and y += w[:4] @ four rows."""
pointer = cast(Callable[[int, Any], Any], intrinsic(_pointer))
widened = cast(Callable[[Any], np.float32], intrinsic(_widened))
narrowed = cast(Callable[[np.float32, Any], Any], intrinsic(_narrowed))
prefetch = cast(Callable[[int], None], intrinsic(_prefetch))
array_at = cast(Callable[[Any, int], Elements], numba.carray)


@_compiled
def elements_at(address: int, count: int, like: Any) -> Elements:
    """Returns an array of the `count` elements at a memory address, without a copy. The dtype is the type of `like`."""
    return array_at(pointer(address, like), count)


@_compiled
def row_of(matrix: Matrix, row: int, like: Any) -> Elements:
    """Returns one row of a matrix as an array, without a copy. The dtype is the type of `like`."""
    address, row_stride, columns = matrix
    start = row * row_stride
    return elements_at(address, start + columns, like)[start:]


@_compiled
def widen(source: Elements, target: Floats) -> None:
    """Copies all elements of `source` to the start of `target`, as fp32."""
    for k in range(len(source)):
        target[k] = widened(source[k])


@_compiled
def narrow(source: Floats, target: Elements) -> None:
    """Fills `target` with the first elements of `source`, rounded from fp32 to the type of `target`."""
    for k in range(len(target)):
        target[k] = narrowed(source[k], target[k])


@_compiled
def _shrink(entry: Integers, weight: np.float32, scratch: Floats, at: int, in_features: int, like: Any) -> None:
    """Computes weight * scales * (x @ A.T) for both rows of a pair, and writes it to V in the scratch memory, from rank
    `at` on.
    """
    num_ranks, whole = entry[NUM_RANKS], in_features // _TURN * _TURN
    A = elements_at(entry[A_ADDRESS], num_ranks * in_features, like)
    row_bytes, stride = in_features * A.itemsize, scratch.strides[0]
    x = np.int64(scratch.ctypes.data)
    v = x + V * stride + at * scratch.itemsize
    for rank in range(0, num_ranks, _RANKS):
        rows, own = entry[A_ADDRESS] + rank * row_bytes, v + rank * scratch.itemsize
        multiply(x, x + stride, rows, row_bytes, whole, own, own + stride, like)
    for row in range(2):
        x_row, v_row = scratch[X + row], scratch[V + row, at : at + num_ranks]
        for rank in range(num_ranks):
            for k in range(whole, in_features):
                v_row[rank] += x_row[k] * widened(A[rank * in_features + k])
        if entry[SCALES_ADDRESS]:
            scales = elements_at(entry[SCALES_ADDRESS], num_ranks, np.float32(0))
            for rank in range(num_ranks):
                v_row[rank] *= scales[rank]
        for rank in range(num_ranks):
            v_row[rank] *= weight


@_compiled
def _expand(part: Integers, at: int, scratch: Floats, columns: int, like: Any) -> None:
    """Adds v @ B of one slice to both rows of SUMS in the scratch memory, [:columns]. The adapter's ranks in V begin at
    `at`.
    """
    start, num_ranks, whole = at + part[RANK_START], part[SLICE_RANKS], columns // _TURN * _TURN
    B = elements_at(part[B_ADDRESS], num_ranks * columns, like)
    row_bytes, stride = columns * B.itemsize, scratch.strides[0]
    sums = np.int64(scratch.ctypes.data) + SUMS * stride
    v = np.int64(scratch.ctypes.data) + V * stride + start * scratch.itemsize
    for rank in range(0, num_ranks, _RANKS):
        rows, own = part[B_ADDRESS] + rank * row_bytes, v + rank * scratch.itemsize
        accumulate(sums, sums + stride, rows, row_bytes, whole, own, own + stride, like)
    for row in range(2):
        total, v_row = scratch[SUMS + row], scratch[V + row, start:]
        for rank in range(num_ranks):
            for k in range(whole, columns):
                total[k] += v_row[rank] * widened(B[rank * columns + k])


@_compiled
def _shrink_all(x: Matrix, table: Integers, rows: Pairs, number: int, scratch: Floats, like: Any) -> None:
    """Computes V for all parts (adapters with weights) of a pair of rows, one after another."""
    pairs, slots, weights = rows
    _, _, columns = x
    for place in range(2):
        widen(row_of(x, pairs[number, FIRST_ROW + place], like), scratch[X + place])
    at = 0
    for part in range(pairs[number, FIRST_PART], pairs[number, END_PART]):
        entry = table[slots[part]]
        _shrink(entry, weights[part], scratch, at, columns, like)
        at += entry[NUM_RANKS]


@_compiled
def _expand_all(
    y: Elements, z: Elements, table: Integers, slots: Integers, field: int, scratch: Floats, like: Any
) -> None:
    """Adds the deltas of the adapters in `slots` to one slice's columns of a pair's rows y and z.

    The slice's fields begin at `field`.
    """
    num_ranks = 0
    for slot in slots:
        num_ranks += table[slot, field + SLICE_RANKS]
    if num_ranks == 0:
        return
    widen(y, scratch[SUMS])
    widen(z, scratch[SUMS + 1])
    at = 0
    for slot in slots:
        _expand(table[slot, field:], at, scratch, len(y), like)
        at += table[slot, NUM_RANKS]
    narrow(scratch[SUMS], y)
    narrow(scratch[SUMS + 1], z)


@_compiled_and_kept
def add_to_rows(y: Matrix, x: Matrix, group: Group, rows: Pairs, scratch: Floats, like: Any) -> None:
    """Adds the LoRA deltas of one group of projections to rows of y, in place. Row i of x is the input of row i of y.

    `like` is any value of the element type of x and y: np.float32, or np.uint16 for bf16. `scratch` is overwritten:
    [SCRATCH_ROWS, width]. Its width must be at least the number of columns of x, the number of output columns of any
    projection, and the sum of the ranks of all adapters of one pair of rows.
    """
    table, slices = group
    pairs, parts, _ = rows
    for number in range(len(pairs)):
        pair = pairs[number]
        slots = parts[pair[FIRST_PART] : pair[END_PART]]
        _shrink_all(x, table, rows, number, scratch, like)
        if number + 1 < len(pairs):
            following = table[parts[pairs[number + 1, FIRST_PART]], A_ADDRESS]
            for ahead in range(0, _AHEAD_BYTES, _LINE_BYTES):
                prefetch(following + ahead)
        first, second = row_of(y, pair[FIRST_ROW], like), row_of(y, pair[SECOND_ROW], like)
        for place in range(len(slices)):
            start, end = slices[place, 0], slices[place, 1]
            field = FIRST_SLICE + place * SLICE_FIELDS
            _expand_all(first[start:end], second[start:end], table, slots, field, scratch, like)
