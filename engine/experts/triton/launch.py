"""Plans and launches the kernels of routed layers: the arrangement of rows by expert, and their products.

The plan follows from the numbers of tokens, choices and experts alone, and the host never reads the choice. So a CUDA
graph may hold the launches: the next step has another choice and the same grids.

The bits of a row must not depend on the other rows. Block sizes follow from the dtype alone. Tiles have 16 or 32 rows,
for which every architecture uses the same matrix instruction (see engine/lora/triton/launch_plan.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graftwork.engine.experts.triton.kernels import arrange_rows_kernel, count_rows_kernel, multiply_tiles_kernel
from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch

TILE_ROWS = (16, 32)
"""The rows of a tile. Larger tiles would change the matrix instruction, and so the bits of a row."""
_MANY_ROWS = 64
"""Rows of an expert, on average, from which on tiles are large, so that fewer of them read the same weights."""
_CHOICES_AT_ONCE = 1024
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class TileGrid:
    """How the rows of a routed layer are cut into tiles, whatever the choice is."""

    num_tokens: int
    num_chosen: int
    num_experts: int
    only_rows: int | None = None
    """The rows of every tile; None if their number follows from the step."""

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int, only_rows: int | None = None) -> "TileGrid":
        """Returns the grid for a choice of [num_tokens, num_chosen] experts."""
        num_tokens, num_chosen = chosen.shape
        return cls(num_tokens, num_chosen, num_experts, only_rows)

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.num_chosen

    @property
    def tile_rows(self) -> int:
        if self.only_rows is not None:
            return self.only_rows
        small, large = TILE_ROWS
        return large if self.num_rows >= _MANY_ROWS * self.num_experts else small

    @property
    def num_tiles(self) -> int:
        """The most tiles that any choice needs: each expert but for one with a single row, and the rest in whole tiles."""
        owners = min(self.num_rows, self.num_experts)
        return owners + (self.num_rows - owners) // self.tile_rows


@dataclass(frozen=True, slots=True)
class TiledRows:
    """The rows of a routed layer, arranged by expert and cut into tiles, on the device. Empty tiles have the length 0."""

    grid: TileGrid
    tokens: torch.Tensor  # [num_rows] int64, the token of each row
    places: torch.Tensor  # [num_tokens, num_chosen] int64, the row of each choice
    tile_expert: torch.Tensor  # [num_tiles] int32
    tile_start: torch.Tensor  # [num_tiles] int32
    tile_length: torch.Tensor  # [num_tiles] int32


def empty_rows(grid: TileGrid, device: torch.device) -> TiledRows:
    """Returns memory for an arrangement, which `arrange_launches` fill."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return TiledRows(
        grid,
        numbers(grid.num_rows, dtype=torch.int64),
        numbers(grid.num_tokens, grid.num_chosen, dtype=torch.int64),
        *(numbers(grid.num_tiles) for _ in range(3)),
    )


def arrange_launches(chosen: torch.Tensor, rows: TiledRows) -> tuple[Launch, Launch]:
    """Returns the launches that arrange the choices of a step. chosen: int64 [num_tokens, num_chosen], contiguous."""
    grid = rows.grid
    if tuple(chosen.shape) != (grid.num_tokens, grid.num_chosen) or not chosen.is_contiguous():
        raise ValueError(f"chosen {tuple(chosen.shape)} must be contiguous and have the shape of the grid, {grid}")
    counts = torch.empty(grid.num_experts, dtype=torch.int32, device=chosen.device)
    common: dict[str, Any] = {"chosen": chosen, "counts": counts, "num_rows": grid.num_rows, "BLOCK": _CHOICES_AT_ONCE}
    arguments = common | {
        "tokens": rows.tokens,
        "places": rows.places,
        "tile_expert": rows.tile_expert,
        "tile_start": rows.tile_start,
        "tile_length": rows.tile_length,
        "num_tiles": grid.num_tiles,
        "num_chosen": grid.num_chosen,
        "NUM_EXPERTS": grid.num_experts,
        "EXPERTS_BLOCK": 1 << (grid.num_experts - 1).bit_length(),
        "TILE_ROWS": grid.tile_rows,
    }
    options = {"num_warps": 4, "num_stages": 1}
    programs = (grid.num_experts,)
    return (
        Launch(count_rows_kernel, programs, common, options),
        Launch(arrange_rows_kernel, programs, arguments, options),
    )


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Where one projection of all experts of a layer is in the memory of the device."""

    weights: torch.Tensor  # [num_experts] int64, addresses of [out_features, in_features], contiguous
    biases: torch.Tensor | None  # [num_experts] int64, addresses of [out_features]
    out_features: int
    in_features: int
    dtype: torch.dtype
    alignment: int
    """The bytes of which the address of each weight's row is a multiple: 16, or 1 if nothing is known."""

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> "ExpertTable":
        """Returns the table of some weights of one shape, dtype and device. They must stay where they are."""
        first = weights[0]
        for tensor in (*weights, *(biases or ())):
            if not tensor.is_contiguous() or tensor.dtype != first.dtype:
                raise ValueError("the weights and biases of experts must be contiguous and of one dtype")
        out_features, in_features = first.shape
        starts = (in_features * first.dtype.itemsize, *(one.data_ptr() for one in weights))
        alignment = 1 if any(start % _ALIGNED_BYTES for start in starts) else _ALIGNED_BYTES
        own = addresses_of(weights), None if biases is None else addresses_of(biases)
        return cls(*own, out_features, in_features, first.dtype, alignment)


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns where some tensors of one device begin: int64, one for each."""
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64, device=tensors[0].device)


def multiply_launch(x: torch.Tensor, y: torch.Tensor, table: ExpertTable, rows: TiledRows) -> Launch:
    """Returns the launch that writes each row's product with the weight of its expert.

    x: [num_rows, in_features], y: [num_rows, out_features], both in the order of `rows`, with adjacent features. Raises
    ValueError if they do not fit.
    """
    num_rows = rows.grid.num_rows
    if tuple(x.shape) != (num_rows, table.in_features) or tuple(y.shape) != (num_rows, table.out_features):
        raise ValueError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit {num_rows} rows of experts with {table.in_features} "
            f"input and {table.out_features} output features"
        )
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("the features of a row must be adjacent in memory: pass a contiguous x and y")
    is_narrow = table.dtype.itemsize == 2
    block_out, block_in = (64, 128) if is_narrow else (32, 64)
    out_blocks = -(-table.out_features // block_out)
    arguments: dict[str, Any] = {
        "x": x,
        "y": y,
        "weights": table.weights,
        "biases": table.biases,
        "tile_expert": rows.tile_expert,
        "tile_start": rows.tile_start,
        "tile_length": rows.tile_length,
        "in_features": table.in_features,
        "out_features": table.out_features,
        "out_blocks": out_blocks,
        "x_stride": x.stride(0),
        "y_stride": y.stride(0),
        "HAS_BIAS": table.biases is not None,
        "WEIGHT_DTYPE": TRITON_DTYPES[table.dtype],
        "UPCAST": x.device.type == "cpu",
        "ALIGNMENT": table.alignment,
        "BLOCK_ROWS": rows.grid.tile_rows,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": block_in,
    }
    options = {"num_warps": 4, "num_stages": 4 if is_narrow else 2, "enable_fp_fusion": True}
    return Launch(multiply_tiles_kernel, (rows.grid.num_tiles * out_blocks,), arguments, options)
