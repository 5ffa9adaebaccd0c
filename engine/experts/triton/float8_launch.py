"""Plans and launches the products of rows and experts' weights that are both float8_e4m3fn (W8A8).

Each row of x is rounded with a scale of its own. All tiles have 64 rows (see engine/quantization/triton/float8_launch.py), so
the layer's rows must be arranged in such tiles. One program adds all input features.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from graftwork.engine.experts.triton.code_kernels import multiply_float8_tiles_kernel
from graftwork.engine.experts.triton.code_launch import CodeExpertTable, check_rows, of_tiles
from graftwork.engine.experts.triton.launch import TiledRows
from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch
from graftwork.engine.quantization.triton.float8_launch import TILE_ROWS, round_launch
from graftwork.engine.quantization.weight import BLOCK

_BLOCK_OUT = 64


@dataclass(frozen=True, slots=True)
class Float8ExpertProduct:
    """One product: each row of x, rounded, with the weight of its expert."""

    x: torch.Tensor  # [num_rows, in_features], in the order of `rows`
    table: CodeExpertTable
    y: torch.Tensor  # [num_rows, out_features]
    rows: TiledRows

    def launches(self) -> Iterator[Launch]:
        """Yields the launches in their order, each with the memory that it needs. Raises ValueError if shapes do not fit."""
        x = self.x
        check_rows(x, self.y, self.table, self.rows)
        if self.rows.grid.tile_rows != TILE_ROWS:
            raise ValueError(
                f"tiles of {self.rows.grid.tile_rows} rows do not multiply float8: give tiles of {TILE_ROWS}"
            )
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        row_scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        yield round_launch(x, codes, row_scales)
        yield self._multiply(codes, row_scales)

    def _multiply(self, codes: torch.Tensor, row_scales: torch.Tensor) -> Launch:
        table, form, y = self.table, self.table.form, self.y
        block = BLOCK if form.has_one_group else min(form.group_size, BLOCK)
        out_blocks = -(-form.out_features // _BLOCK_OUT)
        arguments: dict[str, Any] = of_tiles(self.rows) | {
            "x": codes,
            "row_scales": row_scales,
            "packed": table.packed,
            "scales": table.scales,
            "biases": table.biases,
            "y": y,
            "num_blocks": -(-form.in_features // block),
            "in_features": form.in_features,
            "out_features": form.out_features,
            "out_blocks": out_blocks,
            "row_words": form.packed.stride(0),
            "x_stride": codes.stride(0),
            "y_stride": y.stride(0),
            "GROUP": 0 if form.has_one_group else form.group_size,
            "HAS_BIAS": table.biases is not None,
            "IS_WHOLE": form.in_features % block == 0,
            "UPCAST": codes.device.type == "cpu",
            "CODE_DTYPE": tl.float8e4nv,
            "BIAS_DTYPE": TRITON_DTYPES[table.bias_dtype or y.dtype],
            "ALIGNMENT": table.alignment,
            "BLOCK": block,
            "BLOCK_OUT": _BLOCK_OUT,
        }
        options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
        return Launch(multiply_float8_tiles_kernel, (self.rows.grid.num_tiles * out_blocks,), arguments, options)
