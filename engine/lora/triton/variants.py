"""Lists the variants of the Triton LoRA kernels that are compiled ahead (see engine/kernels/compile_ahead.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graftwork.engine.kernels.compile_ahead import POINTER_TYPES, KernelVariant
from graftwork.engine.kernels.launch import TRITON_DTYPES
from graftwork.engine.lora.triton.expand_blocks import UNALIGNED
from graftwork.engine.lora.triton.launch import expand_precision, launch_options
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE, LaunchShape, LoraPlan, plan_for
from graftwork.engine.lora.triton.row_kernels import expand_rows_kernel, shrink_rows_kernel
from graftwork.engine.lora.triton.tile_kernels import expand_tiles_kernel, shrink_tiles_kernel
from graftwork.engine.lora.triton.tiles import MAX_PARTS

_FP32_POINTERS = {"planes", "scales", "part_weight"}
_ADDRESS_POINTERS = {"a_pointers", "b_pointers", "column_scales", "column_shifts"}
_INT32_POINTERS = {
    "ranks", "offsets", "widths", "tile_start", "tile_length", "tile_parts", "part_slot", "permutation",
}  # fmt: skip
_ALIGNED_NUMBERS = {"in_features", "span_features", "x_stride", "y_stride", "plane_stride", "plane_width"}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one fused layer (such as qkv) in one step. They decide which kernel variants are compiled."""

    name: str
    num_tiles: int
    tile_rows: int
    in_features: int
    num_slices: int
    max_rank: int
    dtype: torch.dtype
    num_parts: int = 1
    has_columns: bool = False

    @property
    def plan(self) -> LoraPlan:
        return plan_for(
            LaunchShape(
                num_tiles=self.num_tiles,
                tile_rows=self.tile_rows,
                num_slices=self.num_slices,
                in_features=self.in_features,
                max_rank=self.max_rank,
                launched_rank=self.max_rank,
                element_bytes=self.dtype.itemsize,
            )
        )

    @property
    def kernels(self) -> tuple[Any, Any]:
        """The shrink kernel and the expand kernel that are launched for these sizes."""
        if self.tile_rows == ROW_WISE:
            return shrink_rows_kernel, expand_rows_kernel
        return shrink_tiles_kernel, expand_tiles_kernel


SHAPES = (
    LayerShape("qkv prefill", 256, GROUPED_TILE_ROWS[1], 4096, 3, 128, torch.bfloat16),
    LayerShape("qkv decode", 32, ROW_WISE, 4096, 3, 64, torch.bfloat16),
    LayerShape("down grouped", 32, GROUPED_TILE_ROWS[0], 14336, 1, 64, torch.bfloat16, MAX_PARTS, has_columns=True),
    LayerShape("down decode", 512, ROW_WISE, 14336, 1, 64, torch.bfloat16, MAX_PARTS, has_columns=True),
    LayerShape("gate_up small", 8, GROUPED_TILE_ROWS[0], 4096, 2, 16, torch.float16),
    LayerShape("gate_up row", 8, ROW_WISE, 4096, 2, 16, torch.float16),
    LayerShape("o prefill", 256, GROUPED_TILE_ROWS[1], 4096, 1, 128, torch.float32),
    LayerShape("o decode", 32, ROW_WISE, 4096, 1, 128, torch.float32),
)
"""The shapes that are compiled. Together they cover every dtype and tile size, parallel and serial spans, one and
several blocks of ranks, and layers with and without mixtures and columns.
"""


def lora_variants() -> Iterator[KernelVariant]:
    """Yields the variants of the shrink and the expand kernel for each layer shape."""
    for shape in SHAPES:
        for kernel in shape.kernels:
            yield variant_for(kernel, shape)


def variant_for(kernel: Any, shape: LayerShape) -> KernelVariant:
    """Returns the variant of one kernel for a layer shape, for tensors whose addresses are multiples of 16 bytes."""
    all_constants = constants_of(shape)
    constants = {name: all_constants[name] for name in kernel.arg_names if name in all_constants}
    signature = {name: "constexpr" if name in constants else _type_of(name, shape) for name in kernel.arg_names}
    dtype = str(shape.dtype).removeprefix("torch.")
    return KernelVariant(
        name=f"{shape.name} {dtype} r{shape.max_rank}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        aligned=frozenset(
            name
            for name, kind in signature.items()
            if name in _ALIGNED_NUMBERS or (kind.startswith("*") and name not in UNALIGNED)
        ),
        options=launch_options(kernel, shape.plan),
    )


def _type_of(name: str, shape: LayerShape) -> str:
    if name in {"x", "y"}:
        return POINTER_TYPES[shape.dtype]
    kinds = {"*fp32": _FP32_POINTERS, "*i64": _ADDRESS_POINTERS, "*i32": _INT32_POINTERS}
    return next((kind for kind, names in kinds.items() if name in names), "i32")


def constants_of(shape: LayerShape) -> dict[str, Any]:
    """Returns the compile-time arguments of the kernels for this layer shape, by name."""
    plan = shape.plan
    return {
        "NUM_SLICES": shape.num_slices,
        "NUM_PARTS": shape.num_parts,
        "NUM_PLANES": plan.num_planes,
        "PARALLEL_SPANS": plan.parallel_spans,
        "HAS_COLUMNS": shape.has_columns,
        "WEIGHT_DTYPE": TRITON_DTYPES[shape.dtype],
        "UPCAST": False,
        "ALIGNMENT": 16,
        "COLUMN_ALIGNMENT": 16,
        "BLOCK_ROWS": shape.tile_rows,
        "BLOCK_RANK": plan.block_rank,
        "BLOCK_IN": plan.block_in,
        "BLOCK_OUT": plan.block_out,
        **expand_precision(shape.dtype),
    }
