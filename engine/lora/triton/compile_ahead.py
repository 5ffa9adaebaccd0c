"""Compiles the Triton LoRA kernels for several GPU architectures, on a machine without a GPU.

Checks that every kernel compiles and fits into the shared memory of each architecture.

    python -m graftwork.engine.lora.triton.compile_ahead

Do not set TRITON_INTERPRET: an interpreted kernel is not compiled.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graftwork.engine.lora.triton.expand_blocks import UNALIGNED
from graftwork.engine.lora.triton.launch import LAUNCH_OPTIONS, TRITON_DTYPES, expand_precision
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE, LaunchShape, LoraPlan, plan_for
from graftwork.engine.lora.triton.row_kernels import expand_rows_kernel, shrink_rows_kernel
from graftwork.engine.lora.triton.tile_kernels import expand_tiles_kernel, shrink_tiles_kernel
from graftwork.engine.lora.triton.tiles import MAX_PARTS

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by compute capability."""

_POINTER_NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
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


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel, compiled for one LayerShape and one GPU architecture."""

    kernel: str
    shape: LayerShape
    capability: int
    shared_bytes: int
    cubin_bytes: int
    ptx: str


def compile_all(capabilities: Sequence[int], shapes: Sequence[LayerShape] = SHAPES) -> Iterator[CompiledKernel]:
    """Compiles the shrink and the expand kernel for each layer shape and each architecture (compute capability)."""
    for capability in capabilities:
        for shape in shapes:
            for kernel in shape.kernels:
                yield compile_kernel(kernel, shape, capability)


def compile_kernel(kernel: Any, shape: LayerShape, capability: int) -> CompiledKernel:
    """Compiles one kernel to a cubin (GPU machine code), for tensors whose addresses are multiples of 16 bytes.

    Raises RuntimeError if Triton's interpreter is on, because an interpreted kernel cannot be compiled.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(  # noqa: TRY004 -- the environment is at fault, not the argument
            "the kernels are interpreted here: unset TRITON_INTERPRET and start again"
        )
    all_constants = constants_of(shape)
    constants = {name: all_constants[name] for name in kernel.arg_names if name in all_constants}
    signature = {name: "constexpr" if name in constants else _type_of(name, shape) for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if name in _ALIGNED_NUMBERS or (kind.startswith("*") and name not in UNALIGNED)
    }
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options=LAUNCH_OPTIONS | {"num_stages": shape.plan.num_stages},
    )
    return CompiledKernel(
        kernel=kernel.__name__,
        shape=shape,
        capability=capability,
        shared_bytes=built.metadata.shared,
        cubin_bytes=len(built.asm["cubin"]),
        ptx=built.asm["ptx"],
    )


def _type_of(name: str, shape: LayerShape) -> str:
    if name in {"x", "y"}:
        return _POINTER_NAMES[shape.dtype]
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


_LINE = "{:<20} {:<14} {:<9} {:>5} {:>7} {:>13} {:>11}"
HEADING = _LINE.format("kernel", "layer", "dtype", "rank", "arch", "shared bytes", "cubin bytes")


def line_of(built: CompiledKernel) -> str:
    """Returns one line of a table about compiled kernels. HEADING is the heading of this table."""
    return _LINE.format(
        built.kernel,
        built.shape.name,
        str(built.shape.dtype).removeprefix("torch."),
        built.shape.max_rank,
        f"sm_{built.capability}",
        f"{built.shared_bytes:,}",
        f"{built.cubin_bytes:,}",
    )


def main() -> None:
    """Compiles every kernel for every layer shape and architecture, and prints a table with one line about each."""
    sys.stdout.write(HEADING + "\n")
    for built in compile_all(tuple(SHARED_LIMIT_BYTES)):
        sys.stdout.write(line_of(built) + "\n")


if __name__ == "__main__":
    main()
