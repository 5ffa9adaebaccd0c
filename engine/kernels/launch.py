"""Describes one launch of a Triton kernel: the kernel, its grid, its arguments and its compile options.

All modules that launch kernels build a Launch first. So tests can look at a launch without a GPU, and the same launch
says which variant of the kernel must be compiled ahead (see compile_ahead.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""The dtype of Triton for each floating-point dtype of torch that an engine computes in."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A Triton kernel, with what it is launched with. Building a Launch neither compiles nor runs anything."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """All arguments of the kernel by name: tensors, numbers, and compile-time constants."""
    options: Mapping[str, Any]
    """The options of the compiler, such as num_warps and num_stages. They are fixed: nothing is autotuned."""

    def run(self) -> None:
        """Launches the kernel on the current CUDA stream, or interprets it on CPU tensors (TRITON_INTERPRET=1)."""
        self.kernel[self.grid](**self.arguments, **self.options)
