"""Compiles Triton kernels for several GPU architectures, on a machine without a GPU.

A variant is a kernel with the types of its arguments, its compile-time constants and its options. Each combination is
compiled once. Every room with kernels lists its variants, and engine/build/compile_kernels.py compiles all of them:

    python -m graftwork.engine.build.compile_kernels

The compiled kernel tells what it needs on a GPU: registers and shared memory, and how much of its registers it keeps in
slow local memory because they are too many (spills). Do not set TRITON_INTERPRET: an interpreted kernel is not
compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from graftwork.engine.kernels.launch import Launch

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by compute capability."""
CAPABILITIES = tuple(SHARED_LIMIT_BYTES)
"""The compute capabilities that kernels are compiled for: 80 is Ampere, 90 Hopper, 100 Blackwell."""

POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.bool: "*u1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""Triton's name for the type of a tensor argument, by the tensor's dtype."""
_NEVER_SPECIALIZED = ("fp32", "u1")
"""The types of arguments whose values never lead to another compiled kernel."""
_ALIGNMENT = 16
"""Triton compiles wider loads for addresses (in bytes) and numbers that are multiples of this."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What decides the machine code of a kernel, besides the architecture."""

    name: str
    """What the variant is for, such as "qkv decode bf16". Stands in the printed table."""
    kernel: Any
    signature: Mapping[str, str]
    """Triton's type of each argument, such as "*bf16" or "i32", in the kernel's order. "constexpr" for constants."""
    constants: Mapping[str, Any]
    """The values of the arguments that are constants."""
    aligned: frozenset[str]
    """The arguments that are multiples of 16."""
    options: Mapping[str, Any]
    least_capability: int = 80
    """The oldest architecture that has its instructions."""

    @property
    def key(self) -> tuple[object, ...]:
        """What Triton compiles a kernel anew for. Variants with equal keys are one."""
        constants, options = (
            tuple(sorted((name, str(value)) for name, value in numbers.items()))
            for numbers in (self.constants, self.options)
        )
        return self.kernel.__name__, tuple(self.signature.items()), tuple(sorted(self.aligned)), constants, options


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A variant, compiled for one GPU architecture, and what it needs there."""

    variant: KernelVariant
    capability: int
    registers: int  # of one thread
    spilled_bytes: int
    """Bytes of local memory (stack) of one thread. 0 if no register is spilled."""
    shared_bytes: int  # of one program
    cubin_bytes: int
    ptx: str


def variant_of(name: str, launch: Launch, *, least_capability: int = 80) -> KernelVariant:
    """Returns the variant that Triton compiles for a launch. `name` says what it is for.

    The launch may have tensors of the device `meta`, which have a dtype but no memory. They count as aligned. Raises
    RuntimeError if the kernel is interpreted, and KeyError if an argument is missing or has a dtype without a Triton
    type.
    """
    _refuse_interpreted(launch.kernel)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: set[str] = set()
    for parameter in launch.kernel.params:
        argument = launch.arguments[parameter.name]
        is_specialized = not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else _type_of(argument, is_specialized)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = argument
        elif is_specialized and not parameter.do_not_specialize_on_alignment and _is_aligned(argument):
            aligned.add(parameter.name)
    return KernelVariant(
        name, launch.kernel, signature, constants, frozenset(aligned), launch.options, least_capability
    )


def _type_of(argument: Any, is_specialized: bool) -> str:
    """Returns Triton's type of an argument. As Triton does, takes None and the specialized number 1 for constants."""
    match argument:
        case torch.Tensor():
            return POINTER_TYPES[argument.dtype]
        case None:
            return "constexpr"
        case bool():
            return "u1"
        case float():
            return "fp32"
        case int():
            if argument == 1 and is_specialized:
                return "constexpr"
            return "i32" if -(2**31) <= argument < 2**31 else "i64"
    raise KeyError(f"Triton has no type for an argument of {type(argument).__name__}")


def _is_aligned(argument: Any) -> bool:
    match argument:
        case torch.Tensor():
            return argument.data_ptr() % _ALIGNMENT == 0
        case bool() | float():
            return False
        case int():
            return argument % _ALIGNMENT == 0
    return False


def compile_all(
    variants: Iterable[KernelVariant], capabilities: Sequence[int] = CAPABILITIES
) -> Iterator[CompiledKernel]:
    """Compiles each variant for each architecture (compute capability) that can run it. Yields them as they are compiled."""
    for variant in variants:
        for capability in capabilities:
            if capability < variant.least_capability:
                continue
            yield compile_variant(variant, capability)


def compile_variant(variant: KernelVariant, capability: int) -> CompiledKernel:
    """Compiles one variant to a cubin (GPU machine code).

    Raises RuntimeError if Triton's interpreter is on, because an interpreted kernel cannot be compiled.
    """
    _refuse_interpreted(variant.kernel)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source_of(variant, make_backend(target)), target=target, options=dict(variant.options))
    usage = _resource_usage(built.asm["cubin"])
    return CompiledKernel(
        variant=variant,
        capability=capability,
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=built.metadata.shared,
        cubin_bytes=len(built.asm["cubin"]),
        ptx=built.asm["ptx"],
    )


def is_cached(variant: KernelVariant, capability: int) -> bool:
    """Returns whether Triton's cache on this machine has the compiled kernel, so that its launch compiles nothing."""
    backend = make_backend(GPUTarget("cuda", capability, 32))
    options = backend.parse_options(dict(variant.options))
    key = get_cache_key(source_of(variant, backend), backend, options, get_cache_invalidating_env_vars())
    group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(f"{variant.kernel.__name__[:150]}.json")
    return bool(group)


def source_of(variant: KernelVariant, backend: Any) -> ASTSource:
    """Returns what Triton compiles for a variant: the same source as when the kernel is launched.

    Only then does a launch find the compiled kernel in Triton's cache, whose names depend on more than the machine code
    does. So Triton itself makes the source, from what it would find out about the arguments. `backend` is Triton's, for
    a GPU.
    """
    specialization: list[tuple[str, Any]] = []
    for parameter in variant.kernel.params:
        kind = variant.signature[parameter.name]
        if kind == "constexpr":
            specialization.append((kind, variant.constants[parameter.name]))
        elif parameter.do_not_specialize or kind in _NEVER_SPECIALIZED:
            specialization.append((kind, None))
        else:
            specialization.append((kind, "D" if parameter.name in variant.aligned else ""))
    values = {parameter.name: variant.constants.get(parameter.name) for parameter in variant.kernel.params}
    options = dict(variant.options)
    packed = variant.kernel._pack_args(backend, values | options, values, specialization, options)
    _, signature, constants, attributes = packed
    return ASTSource(variant.kernel, signature, constants, attributes)


def _refuse_interpreted(kernel: Any) -> None:
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(  # noqa: TRY004 -- the environment is at fault, not the argument
            "the kernels are interpreted here: unset TRITON_INTERPRET and start again"
        )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Returns what cuobjdump, which Triton brings along, says about the one function of a cubin: REG, STACK, …"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", printed)}


_LINE = "{:<24} {:<30} {:>6} {:>9} {:>7} {:>12} {:>11}"
HEADING = _LINE.format("kernel", "variant", "arch", "registers", "spilled", "shared bytes", "cubin bytes")


def line_of(built: CompiledKernel) -> str:
    """Returns one line of a table about compiled kernels. HEADING is the heading of this table."""
    return _LINE.format(
        built.variant.kernel.__name__,
        built.variant.name,
        f"sm_{built.capability}",
        built.registers,
        built.spilled_bytes,
        f"{built.shared_bytes:,}",
        f"{built.cubin_bytes:,}",
    )
