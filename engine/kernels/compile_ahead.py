"""Compiles the kernels for GPUs that are not there: a check that they build and fit, for machines without one.

    python -m graftwork.engine.kernels.compile_ahead

It must run without TRITON_INTERPRET, which replaces the compiler's functions by the interpreter's.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graftwork.engine.kernels.lora_matmul import (
    LAUNCH_OPTIONS,
    TRITON_DTYPES,
    expand_kernel,
    expand_precision,
    shrink_kernel,
)
from graftwork.engine.kernels.lora_plan import LoraPlan, plan_for
from graftwork.engine.kernels.lora_segments import TILE_ROWS

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one program may have, by compute capability."""

_POINTER_NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_ALIGNED_ARGUMENTS = {"in_features", "span_features", "x_stride", "y_stride", "plane_stride", "plane_width"}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A fused layer in one step: what decides which variants of the kernels run."""

    name: str
    num_tiles: int
    tile_rows: int
    in_features: int
    num_slices: int
    max_rank: int
    dtype: torch.dtype

    @property
    def plan(self) -> LoraPlan:
        return plan_for(self.num_tiles, self.num_slices, self.in_features, self.max_rank, self.dtype.itemsize)


SHAPES = (
    LayerShape("qkv prefill", 256, TILE_ROWS[1], 4096, 3, 128, torch.bfloat16),
    LayerShape("down decode", 32, TILE_ROWS[0], 14336, 1, 64, torch.bfloat16),
    LayerShape("gate_up decode", 8, TILE_ROWS[0], 4096, 2, 16, torch.float16),
    LayerShape("o prefill", 256, TILE_ROWS[1], 4096, 1, 128, torch.float32),
)
"""Between them: every dtype, both tile sizes, spans in parallel and not, one and several blocks of ranks."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel, built for one architecture."""

    kernel: str
    shape: LayerShape
    capability: int
    shared_bytes: int
    cubin_bytes: int
    ptx: str


def compile_all(capabilities: Sequence[int], shapes: Sequence[LayerShape] = SHAPES) -> Iterator[CompiledKernel]:
    """Build both kernels for each shape and architecture."""
    for capability in capabilities:
        for shape in shapes:
            yield compile_kernel(shrink_kernel, shrink_signature(shape), shrink_constants(shape), shape, capability)
            yield compile_kernel(expand_kernel, expand_signature(shape), expand_constants(shape), shape, capability)


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], shape: LayerShape, capability: int
) -> CompiledKernel:
    """Build one kernel to a cubin, as a launch with 16-byte aligned tensors would.

    Raises RuntimeError if the kernel is an interpreted one.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(  # noqa: TRY004 -- the environment is at fault, not the argument
            "the kernels are interpreted here: unset TRITON_INTERPRET and start again"
        )
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    aligned = {name for name, kind in signature.items() if kind.startswith("*")} | _ALIGNED_ARGUMENTS
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in aligned}
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attributes),
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


_TILE_TYPES = dict.fromkeys(("ranks", "tile_start", "tile_length", "tile_slot", "permutation"), "*i32")


def shrink_signature(shape: LayerShape) -> dict[str, str]:
    return _TILE_TYPES | {"x": _POINTER_NAMES[shape.dtype], "planes": "*fp32", "a_pointers": "*i64"}


def shrink_constants(shape: LayerShape) -> dict[str, Any]:
    plan = shape.plan
    return {
        "NUM_SLICES": shape.num_slices,
        "RANK_BLOCKS": plan.rank_blocks(shape.max_rank),
        "PARALLEL_SPANS": plan.parallel_spans,
        "WEIGHT_DTYPE": TRITON_DTYPES[shape.dtype],
        "UPCAST": False,
        "ALIGNMENT": 16,
        "BLOCK_ROWS": shape.tile_rows,
        "BLOCK_RANK": plan.block_rank,
        "BLOCK_IN": plan.block_in,
    }


def expand_signature(shape: LayerShape) -> dict[str, str]:
    pointers = {"y": _POINTER_NAMES[shape.dtype], "planes": "*fp32", "b_pointers": "*i64", "scales": "*fp32"}
    return _TILE_TYPES | pointers | {"offsets": "*i32", "widths": "*i32"}


def expand_constants(shape: LayerShape) -> dict[str, Any]:
    plan = shape.plan
    return {
        "NUM_SLICES": shape.num_slices,
        "RANK_BLOCKS": plan.rank_blocks(shape.max_rank),
        "NUM_PLANES": plan.num_planes,
        "WEIGHT_DTYPE": TRITON_DTYPES[shape.dtype],
        "UPCAST": False,
        "ALIGNMENT": 16,
        "COLUMN_ALIGNMENT": 16,
        "BLOCK_ROWS": shape.tile_rows,
        "BLOCK_RANK": plan.block_rank,
        "BLOCK_OUT": plan.block_out,
        **expand_precision(shape.dtype),
    }


_LINE = "{:<14} {:<16} {:<9} {:>5} {:>7} {:>13} {:>11}"
HEADING = _LINE.format("kernel", "layer", "dtype", "rank", "arch", "shared bytes", "cubin bytes")


def line_of(built: CompiledKernel) -> str:
    """One kernel's line under HEADING."""
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
    """Print a line for every kernel, shape and architecture."""
    sys.stdout.write(HEADING + "\n")
    for built in compile_all(tuple(SHARED_LIMIT_BYTES)):
        sys.stdout.write(line_of(built) + "\n")


if __name__ == "__main__":
    main()
