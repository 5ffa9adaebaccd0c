"""Plans and launches the products of rows and weights that are both float8_e4m3fn (W8A8).

Each row of x is rounded with a scale of its own, so its bits depend on no other row. Tiles have 64 rows, whatever the number
of rows: matrix units multiply float8 in tiles of so many rows, and fewer rows would be multiplied in fp16 by another
instruction, with other bits. As in launch.py, the number of rows decides only whether spans have programs of their own.

Needs compute capability 8.9 or later: older matrix units have no float8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graftwork.engine.kernels.launch import Launch
from graftwork.engine.quantization.triton.float8_kernels import multiply_float8_kernel, round_rows_kernel
from graftwork.engine.quantization.triton.launch import CodesTable, Plan, add_launch, check_fits
from graftwork.engine.quantization.weight import BLOCK

TILE_ROWS = 64
_ROUNDED_FEATURES = 1024


@dataclass(frozen=True, slots=True)
class Float8Product:
    """One product: y = rounded(x) @ W.T + bias."""

    x: torch.Tensor  # [num_rows, in_features]
    table: CodesTable
    bias: torch.Tensor | None  # [out_features]
    y: torch.Tensor  # [num_rows, out_features]

    def launches(self) -> Iterator[Launch]:
        """Yields the launches in their order, each with the memory that it needs. Raises ValueError if shapes do not fit."""
        x, table, y = self.x, self.table, self.y
        check_fits(x, y, table)
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        row_scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        yield round_launch(x, codes, row_scales)
        plan = Plan.of(table.out_features, table.in_features, torch.bfloat16)
        if not plan.is_parallel(-(-len(x) // TILE_ROWS) * plan.out_blocks(table.out_features)):
            yield self._multiply(plan, codes, row_scales, y)
            return
        planes = torch.empty(plan.num_spans, *y.shape, dtype=torch.float32, device=x.device)
        yield self._multiply(plan, codes, row_scales, planes)
        yield add_launch(planes, table, None, self.bias, y, is_scaled=True)

    def _multiply(self, plan: Plan, codes: torch.Tensor, row_scales: torch.Tensor, target: torch.Tensor) -> Launch:
        table, is_parallel = self.table, target is not self.y
        block = BLOCK if table.has_one_group else min(table.group_size, BLOCK)
        num_blocks = -(-table.in_features // block)
        row_tiles = -(-len(codes) // TILE_ROWS)
        arguments: dict[str, Any] = {
            "x": codes,
            "row_scales": row_scales,
            "packed": table.packed,
            "scales": table.scales,
            "bias": None if is_parallel else self.bias,
            "y": target,
            "num_rows": len(codes),
            "row_tiles": row_tiles,
            "num_blocks": num_blocks,
            "span_blocks": -(-num_blocks // plan.num_spans),
            "num_spans": plan.num_spans,
            "in_features": table.in_features,
            "out_features": table.out_features,
            "row_words": table.packed.stride(0),
            "x_stride": codes.stride(0),
            "y_stride": target.stride(-2),
            "plane_stride": target.stride(0) if is_parallel else 0,
            "GROUP": 0 if table.has_one_group else table.group_size,
            "HAS_BIAS": self.bias is not None and not is_parallel,
            "IS_WHOLE": table.in_features % block == 0,
            "IS_PARALLEL": is_parallel,
            "UPCAST": codes.device.type == "cpu",
            "BLOCK": block,
            "BLOCK_ROWS": TILE_ROWS,
            "BLOCK_OUT": plan.block_out,
        }
        programs = row_tiles * plan.out_blocks(table.out_features) * (plan.num_spans if is_parallel else 1)
        options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
        return Launch(multiply_float8_kernel, (programs,), arguments, options)


def round_launch(x: torch.Tensor, codes: torch.Tensor, row_scales: torch.Tensor) -> Launch:
    """Returns the launch that rounds each row of x to `codes`, float8_e4m3fn [num_rows, in_features], and writes the scales of
    the rows, fp32 [num_rows].
    """
    arguments: dict[str, Any] = {
        "x": x,
        "codes": codes.view(torch.uint8),
        "row_scales": row_scales,
        "in_features": x.shape[1],
        "x_stride": x.stride(0),
        "code_stride": codes.stride(0),
        "BLOCK": _ROUNDED_FEATURES,
    }
    return Launch(round_rows_kernel, (len(x),), arguments, {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False})
