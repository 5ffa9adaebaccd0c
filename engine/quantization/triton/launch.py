"""Plans and launches the kernels that multiply rows with quantised weights on a GPU.

The grids follow from the number of rows and the layer, and nothing waits for the device. So a CUDA graph may hold the
launches.

The bits of a row must not depend on the other rows, nor on how many there are. So the order of all sums follows from the
layer alone: `Plan` cuts the features into spans, each of which is summed by itself. The number of rows decides only
whether the spans of an output are computed by one program or by several (`is_parallel`); both add them in the same order.
Tiles have 16 or 32 rows, for which every architecture uses the same matrix instruction, mma.sync (see
engine/lora/triton/launch_plan.py). Prompts and decoding rows take the same tiles, so their rows have the same bits too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch
from graftwork.engine.quantization.triton.kernels import add_spans_kernel, multiply_codes_kernel, sum_parts_kernel
from graftwork.engine.quantization.weight import BLOCK, Codes, QuantizedWeight

TILE_ROWS = (16, 32)
"""The rows of a tile. Larger tiles would change the matrix instruction, and so the bits of a row."""
STEP_FEATURES = {Codes.INT4: 16, Codes.FLOAT4: 16, Codes.INT8: 32, Codes.FLOAT8: 32}
"""The features of one step: the codes of a block that have one place in their words."""
_PROGRAMS = 512
"""So many programs of 16 rows keep a large device busy."""
_MOST_SPANS = 8
_LEAST_SPAN = 4
"""The least blocks of a span."""
_BUSY_PROGRAMS = 128
"""With more, a large device is busy without parallel spans."""
_ADDED_OUTPUTS = 1024


@dataclass(frozen=True, slots=True)
class CodesTable:
    """A quantised weight as the kernels read it, on the device."""

    kind: Codes
    packed: torch.Tensor  # [out_features, row_words]: int8 for INT8, else int32 words
    scales: torch.Tensor  # [groups, out_features] fp32, or uint8 in FLOAT4
    offsets: torch.Tensor | None  # [groups, out_features] fp32, - scale * zero point
    group_size: int
    in_features: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "CodesTable":
        """Returns the table of a weight whose scales are adjacent along its outputs, and whose codes are in words."""
        is_words = weight.kind is not Codes.INT8
        if not weight.scales.t().is_contiguous() or (weight.kind is Codes.FLOAT8 and not weight.in_words):
            raise ValueError("the kernels read another layout: pass the weight's `for_kernels`")
        offsets = None if weight.zeros is None else (-weight.scales * weight.zeros).t().contiguous()
        return cls(
            weight.kind,
            weight.packed.view(torch.int32 if is_words else torch.int8),
            weight.scales.t(),
            offsets,
            weight.group_size,
            weight.in_features,
        )

    @classmethod
    def of_float8(cls, weight: QuantizedWeight) -> "CodesTable":
        """Returns the table of a weight of FLOAT8 in its own order, as the kernels of float8_kernels.py read it."""
        if weight.kind is not Codes.FLOAT8 or weight.in_words:
            raise ValueError("only weights of float8_e4m3fn in their own order multiply with rows of float8_e4m3fn")
        scales = weight.scales.t().contiguous()
        packed = weight.packed.view(torch.float8_e4m3fn)
        return cls(weight.kind, packed, scales, None, weight.group_size, weight.in_features)

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def has_one_group(self) -> bool:
        """Whether each output has one scale."""
        return len(self.scales) == 1

    @property
    def ends(self) -> str:
        """With what a row of x ends: a whole block of codes, a whole step, or any feature."""
        if self.in_features % BLOCK == 0:
            return "block"
        return "feature" if self.in_features % STEP_FEATURES[self.kind] else "step"

    @property
    def part_features(self) -> int:
        """The features over which x is summed for the zero points: those of a block that share one, or all."""
        return self.in_features if self.has_one_group else min(self.group_size, BLOCK)

    @property
    def num_parts(self) -> int:
        """The parts of all whole blocks of codes: those of padding count too."""
        return 1 if self.has_one_group else -(-self.in_features // BLOCK) * BLOCK // self.part_features


@dataclass(frozen=True, slots=True)
class Plan:
    """How one layer is cut. It follows from the layer alone, so the bits of a row do."""

    block_out: int
    num_blocks: int
    """The blocks of codes along the input features."""
    num_spans: int

    @classmethod
    def of(cls, out_features: int, in_features: int, dtype: torch.dtype) -> "Plan":
        block_out = 128 if dtype.itemsize == 2 else 32
        num_blocks = -(-in_features // BLOCK)
        wanted = min(_PROGRAMS // -(-out_features // block_out), num_blocks // _LEAST_SPAN, _MOST_SPANS)
        return cls(block_out, num_blocks, 1 << max(wanted, 1).bit_length() - 1)

    @property
    def span_blocks(self) -> int:
        return -(-self.num_blocks // self.num_spans)

    def out_blocks(self, out_features: int) -> int:
        return -(-out_features // self.block_out)

    def is_parallel(self, num_tiles: int) -> bool:
        """Returns whether each span of so many tiles, of rows and outputs, has a program of its own."""
        return self.num_spans > 1 and num_tiles < _BUSY_PROGRAMS


@dataclass(frozen=True, slots=True)
class Product:
    """One product: y = x @ W.T + bias."""

    x: torch.Tensor  # [num_rows, in_features]
    table: CodesTable
    bias: torch.Tensor | None  # [out_features]
    y: torch.Tensor  # [num_rows, out_features]

    def launches(self) -> Iterator[Launch]:
        """Yields the launches in their order, each with the memory that it needs. Raises ValueError if shapes do not fit."""
        x, table, y = self.x, self.table, self.y
        num_rows = len(x)
        check_fits(x, y, table)
        plan = Plan.of(table.out_features, table.in_features, x.dtype)
        tile_rows = TILE_ROWS[num_rows > TILE_ROWS[0]]
        row_tiles, out_blocks = -(-num_rows // tile_rows), plan.out_blocks(table.out_features)
        is_parallel = plan.is_parallel(row_tiles * out_blocks)
        sums = None
        if table.offsets is not None:
            sums = torch.empty(num_rows, table.num_parts, dtype=torch.float32, device=x.device)
            yield sum_launch(x, sums, table)
        if not is_parallel:
            yield self._multiply(plan, tile_rows, sums, y)
            return
        planes = torch.empty(plan.num_spans, *y.shape, dtype=torch.float32, device=x.device)
        yield self._multiply(plan, tile_rows, sums, planes)
        yield add_launch(planes, table, sums, self.bias, y)

    def _multiply(self, plan: Plan, tile_rows: int, sums: torch.Tensor | None, target: torch.Tensor) -> Launch:
        x, table, is_parallel = self.x, self.table, target is not self.y
        row_tiles = -(-len(x) // tile_rows)
        arguments: dict[str, Any] = {
            "x": x,
            "packed": table.packed,
            "scales": table.scales,
            "offsets": table.offsets,
            "sums": sums,
            "bias": None if is_parallel else self.bias,
            "y": target,
            "num_rows": len(x),
            "row_tiles": row_tiles,
            "num_blocks": plan.num_blocks,
            "span_blocks": plan.span_blocks,
            "num_spans": plan.num_spans,
            "in_features": table.in_features,
            "out_features": table.out_features,
            "row_words": table.packed.stride(0),
            "x_stride": x.stride(0),
            "y_stride": target.stride(-2),
            "sum_stride": 0 if sums is None else sums.stride(0),
            "plane_stride": target.stride(0) if is_parallel else 0,
            "KIND": table.kind.value,
            "GROUP": 0 if table.has_one_group else table.group_size,
            "HAS_ZEROS": sums is not None,
            "HAS_BIAS": self.bias is not None and not is_parallel,
            "ENDS": table.ends,
            "IS_PARALLEL": is_parallel,
            "DTYPE": TRITON_DTYPES[product_dtype(x)],
            "BLOCK": BLOCK,
            "STEP_FEATURES": STEP_FEATURES[table.kind],
            "BLOCK_ROWS": tile_rows,
            "BLOCK_OUT": plan.block_out if tile_rows == TILE_ROWS[0] else plan.block_out // 2,
        }
        out_blocks = -(-table.out_features // arguments["BLOCK_OUT"])
        programs = row_tiles * out_blocks * (plan.num_spans if is_parallel else 1)
        options = _options(tile_rows, x.dtype, table, is_parallel=is_parallel)
        return Launch(multiply_codes_kernel, (programs,), arguments, options)


def add_launch(
    planes: torch.Tensor,
    table: CodesTable,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    is_scaled: bool = False,
) -> Launch:
    """Returns the launch that adds planes, [num_spans, num_rows, out_features] fp32, and writes y. Planes are scaled already
    if the layer has groups, or if `is_scaled`.
    """
    arguments: dict[str, Any] = {
        "planes": planes,
        "scales": table.scales,
        "offsets": table.offsets,
        "sums": sums,
        "bias": bias,
        "y": y,
        "num_spans": len(planes),
        "out_features": table.out_features,
        "sum_stride": 0 if sums is None else sums.stride(0),
        "y_stride": y.stride(0),
        "plane_stride": planes.stride(0),
        "HAS_SCALE": table.has_one_group and not is_scaled,
        "HAS_ZEROS": table.has_one_group and sums is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_OUT": _ADDED_OUTPUTS,
    }
    grid = (len(y), -(-table.out_features // _ADDED_OUTPUTS))
    return Launch(add_spans_kernel, grid, arguments, {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False})


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which codes are multiplied. Triton's interpreter multiplies no bf16."""
    return torch.float32 if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype


def check_fits(x: torch.Tensor, y: torch.Tensor, table: CodesTable) -> None:
    """Raises ValueError if x and y do not fit a layer."""
    num_rows = len(x)
    if tuple(x.shape) != (num_rows, table.in_features) or tuple(y.shape) != (num_rows, table.out_features):
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a layer of {table.in_features} input and "
            f"{table.out_features} output features"
        )
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("the features of a row must be adjacent in memory: pass a contiguous x and y")


def sum_launch(x: torch.Tensor, sums: torch.Tensor, table: CodesTable) -> Launch:
    """Returns the launch that sums x over the parts of a layer's features, for its zero points: fp32 [num_rows, num_parts]."""
    arguments: dict[str, Any] = {
        "x": x,
        "sums": sums,
        "in_features": table.in_features,
        "part_features": table.part_features,
        "x_stride": x.stride(0),
        "sum_stride": sums.stride(0),
        "BLOCK": BLOCK,
    }
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(sum_parts_kernel, tuple(sums.shape), arguments, options)


def _options(tile_rows: int, dtype: torch.dtype, table: CodesTable, *, is_parallel: bool) -> dict[str, Any]:
    """Returns the options of the compiler for a product. They change no bit of the result."""
    options = {"num_warps": 4, "num_stages": 3 if dtype.itemsize == 2 else 2, "enable_fp_fusion": False}
    most = _most_registers(tile_rows, dtype, table, is_parallel=is_parallel)
    return options if most is None else options | {"maxnreg": most}


def _most_registers(tile_rows: int, dtype: torch.dtype, table: CodesTable, *, is_parallel: bool) -> int | None:
    """Returns the most registers of one thread; None leaves the number to ptxas.

    Where there is a limit, ptxas without it aims at more programs at a time, and spills for that. With these numbers no
    variant of a small tile spills. Those of many rows spill up to 16 bytes in 16 bits: three programs at a time are worth
    more.
    """
    if dtype.itemsize > 2:
        return 255
    if tile_rows == TILE_ROWS[1]:
        return 232 if table.group_size < BLOCK else 168
    return None if is_parallel or table.kind is Codes.INT8 or table.group_size < BLOCK else 224
