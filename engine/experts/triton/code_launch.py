"""Plans and launches the products of rows with experts whose weights are codes (see engine/quantization/triton/launch.py).

The tiles are those of launch.py, so the plan follows from the numbers of tokens, choices and experts alone. The order of
all sums follows from the layer alone: one program adds all blocks of codes, from the first to the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from graftwork.engine.experts.triton.code_kernels import multiply_code_tiles_kernel, sort_features_kernel
from graftwork.engine.experts.triton.launch import TiledRows, addresses_of
from graftwork.engine.kernels.launch import TRITON_DTYPES, Launch
from graftwork.engine.quantization.triton.launch import (
    STEP_FEATURES,
    CodesTable,
    check_fits,
    product_dtype,
    sum_launch,
)
from graftwork.engine.quantization.weight import BLOCK, Codes

_ALIGNED_BYTES = 16
_SORTED_FEATURES = 128


@dataclass(frozen=True, slots=True)
class CodeExpertTable:
    """Where the codes of one projection of all experts of a layer are in the memory of the device."""

    form: CodesTable
    """That of the first expert. Those of the others have the same shapes, kind and group size."""
    packed: torch.Tensor  # [num_experts] int64, addresses
    scales: torch.Tensor  # [num_experts] int64, addresses
    offsets: torch.Tensor | None  # [num_experts] int64, addresses; None if no expert has zero points
    orders: torch.Tensor | None  # [num_experts] int64, addresses of int64 [in_features]; None if no columns are sorted
    biases: torch.Tensor | None  # [num_experts] int64, addresses of [out_features]
    bias_dtype: torch.dtype | None
    alignment: int
    """The bytes of which the address of each expert's codes is a multiple: 16, or 1 if nothing is known."""
    kept: tuple[object, ...] = ()
    """What has the memory that the addresses point to."""

    @classmethod
    def of(
        cls,
        tables: Sequence[CodesTable],
        orders: Sequence[torch.Tensor | None],
        biases: Sequence[torch.Tensor] | None,
    ) -> "CodeExpertTable":
        """Returns the table of some weights of one form, which it holds.

        orders: the order of each weight's columns; None in place of the order in which features are. Raises ValueError if
        the weights have different forms, or biases are not contiguous.
        """
        first = tables[0]
        if any(_form(one) != _form(first) for one in tables):
            raise ValueError("the quantised weights of a layer's experts have different forms")
        if any(not bias.is_contiguous() for bias in biases or ()):
            raise ValueError("the biases of experts must be contiguous")
        kept: list[object] = [*tables, *orders, *(biases or ())]

        def filled(tensors: Sequence[torch.Tensor | None], default: torch.Tensor) -> torch.Tensor | None:
            """Returns the addresses of tensors, those that are missing replaced by `default`; None if all are."""
            if all(tensor is None for tensor in tensors):
                return None
            kept.append(default)
            return addresses_of([default if tensor is None else tensor for tensor in tensors])

        device = first.packed.device
        starts = (first.packed.stride(0) * first.packed.itemsize, *(one.packed.data_ptr() for one in tables))
        return cls(
            first,
            addresses_of([one.packed for one in tables]),
            addresses_of([one.scales for one in tables]),
            filled([one.offsets for one in tables], torch.zeros(first.scales.shape, device=device)),
            filled(orders, torch.arange(first.in_features, device=device)),
            None if biases is None else addresses_of(biases),
            None if biases is None else biases[0].dtype,
            1 if any(start % _ALIGNED_BYTES for start in starts) else _ALIGNED_BYTES,
            tuple(kept),
        )

    @property
    def out_features(self) -> int:
        return self.form.out_features


def _form(table: CodesTable) -> tuple[object, ...]:
    """Returns what the weights of experts must have in common, so that one launch multiplies with all of them."""
    return table.kind, table.group_size, table.in_features, tuple(table.packed.shape), tuple(table.scales.shape)


@dataclass(frozen=True, slots=True)
class CodeExpertProduct:
    """One product: each row of x with the weight of its expert."""

    x: torch.Tensor  # [num_rows, in_features], in the order of `rows`
    table: CodeExpertTable
    y: torch.Tensor  # [num_rows, out_features]
    rows: TiledRows

    def launches(self) -> Iterator[Launch]:
        """Yields the launches in their order, each with the memory that it needs. Raises ValueError if shapes do not fit."""
        x, table, form = self.x, self.table, self.table.form
        check_rows(x, self.y, table, self.rows)
        if table.orders is not None:
            x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            yield self._sort(table.orders, x)
        sums = None
        if table.offsets is not None:
            sums = torch.empty(len(x), form.num_parts, dtype=torch.float32, device=x.device)
            yield sum_launch(x, sums, form)
        yield self._multiply(x, sums)

    def _sort(self, orders: torch.Tensor, target: torch.Tensor) -> Launch:
        feature_blocks = -(-self.table.form.in_features // _SORTED_FEATURES)
        arguments = of_tiles(self.rows) | {
            "x": self.x,
            "orders": orders,
            "y": target,
            "in_features": self.table.form.in_features,
            "feature_blocks": feature_blocks,
            "x_stride": self.x.stride(0),
            "y_stride": target.stride(0),
            "BLOCK": _SORTED_FEATURES,
        }
        programs = self.rows.grid.num_tiles * feature_blocks
        return Launch(sort_features_kernel, (programs,), arguments, {"num_warps": 4, "num_stages": 1})

    def _multiply(self, x: torch.Tensor, sums: torch.Tensor | None) -> Launch:
        table, form, y = self.table, self.table.form, self.y
        block_out = 64 if x.dtype.itemsize == 2 else 32
        out_blocks = -(-form.out_features // block_out)
        bias_dtype = x.dtype if table.bias_dtype is None else table.bias_dtype
        arguments = of_tiles(self.rows) | {
            "x": x,
            "packed": table.packed,
            "scales": table.scales,
            "offsets": table.offsets,
            "biases": table.biases,
            "sums": sums,
            "y": y,
            "num_blocks": -(-form.in_features // BLOCK),
            "in_features": form.in_features,
            "out_features": form.out_features,
            "out_blocks": out_blocks,
            "row_words": form.packed.stride(0),
            "x_stride": x.stride(0),
            "y_stride": y.stride(0),
            "sum_stride": 0 if sums is None else sums.stride(0),
            "KIND": form.kind.value,
            "GROUP": 0 if form.has_one_group else form.group_size,
            "HAS_ZEROS": sums is not None,
            "HAS_BIAS": table.biases is not None,
            "ENDS": form.ends,
            "DTYPE": TRITON_DTYPES[product_dtype(x)],
            "CODE_DTYPE": tl.int8 if form.kind is Codes.INT8 else tl.int32,
            "SCALE_DTYPE": tl.uint8 if form.kind is Codes.FLOAT4 else tl.float32,
            "BIAS_DTYPE": TRITON_DTYPES[bias_dtype],
            "ALIGNMENT": table.alignment,
            "BLOCK": BLOCK,
            "STEP_FEATURES": STEP_FEATURES[form.kind],
            "BLOCK_OUT": block_out,
        }
        programs = self.rows.grid.num_tiles * out_blocks
        return Launch(multiply_code_tiles_kernel, (programs,), arguments, self._options(x.dtype))

    def _options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the options of the compiler. They change no bit of the result."""
        return {"num_warps": 4, "num_stages": 3 if dtype.itemsize == 2 else 2, "enable_fp_fusion": False}


def check_rows(x: torch.Tensor, y: torch.Tensor, table: CodeExpertTable, rows: TiledRows) -> None:
    """Raises ValueError if x and y do not fit a layer and its rows."""
    if len(x) != rows.grid.num_rows:
        raise ValueError(f"x has {len(x)} rows, not {rows.grid.num_rows}")
    check_fits(x, y, table.form)


def of_tiles(rows: TiledRows) -> dict[str, Any]:
    """Returns the arguments that say which rows each tile has."""
    return {
        "tile_expert": rows.tile_expert,
        "tile_start": rows.tile_start,
        "tile_length": rows.tile_length,
        "BLOCK_ROWS": rows.grid.tile_rows,
    }
