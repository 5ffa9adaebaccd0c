"""What do the compiled kernels of an engine need on a GPU: registers, spilled bytes and shared memory?

    python -m benchmarks.kernel_builds [--models llama-8b] [--processes N] [--json OUT]

Compiles every kernel variant that engines of four models may launch, for sm_80, sm_90 and sm_100, on a machine without
a GPU. MODELS covers the three dtypes, windows, norms of heads, an odd vocabulary, and a head size that is no power of
two; ROUTED_MODELS adds experts, CODE_EXPERT_MODELS experts whose weights are codes. All architectures are compiled: register counts and spills are ptxas's choice for each
of them. No two variants have equal code, so none is left out.

Each build takes about a second of one core, and processes share the work. Triton's cache keeps what is compiled, so a
run that was stopped goes on where it was.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.machine import describe_machine
from rich.progress import track

from graftwork.engine.build.compile_kernels import ServedModel, served_variants
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.kernels.compile_ahead import CAPABILITIES, KernelVariant, compile_variant
from graftwork.engine.model.architectures import VARIANTS
from graftwork.engine.model.block import Activation, StreamsSpec
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ClampedSwiGlu, ExpertsConfig, RouterScore, RouterSpec
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.quantization.scheme import Method, Quantization, Scheme

_LLAMA = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    ropes=(RopeConfig(500_000.0, None, 1.0),) * 2,
    biased_targets=(),
    has_qk_norm=False,
    windows=(None, None),
    tie_word_embeddings=False,
    context_tokens=4096,
    eos_token_ids=(0,),
    dtype="bfloat16",
)
_SMALL = replace(
    _LLAMA,
    vocab_size=50_257,
    hidden_size=896,
    intermediate_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    has_qk_norm=True,
    windows=(512, None),
)
_WIDE_HEADS = replace(_LLAMA, vocab_size=200_064, hidden_size=3072, intermediate_size=8192, num_heads=24, head_dim=96)
MODELS: dict[str, ServedModel] = {
    "llama-8b bf16": ServedModel(_LLAMA, torch.bfloat16),
    "windows, norms of heads, odd vocabulary fp32": ServedModel(_SMALL, torch.float32),
    "head size 96 fp16": ServedModel(_WIDE_HEADS, torch.float16),
}
"""The models whose kernels are compiled. The number of layers changes no kernel."""
_EXPERTS = ExpertsConfig(
    ExpertShapes(num_experts=128, hidden_size=2048, intermediate_size=768, layers=(0, 1)),
    RouterSpec(RouterScore.SOFTMAX, num_chosen=8),
)
ROUTED_MODELS: Mapping[str, ServedModel] = {
    "qwen3-30b-a3b bf16": ServedModel(
        replace(_LLAMA, hidden_size=2048, num_kv_heads=4, has_qk_norm=True, experts=_EXPERTS), torch.bfloat16
    ),
}
"""Models with plain experts, compiled besides."""
_STREAMS = replace(
    _LLAMA,
    vocab_size=262_400,
    hidden_size=2048,
    intermediate_size=16_384,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=256,
    rms_norm_eps=1e-6,
    ropes=(RopeConfig(10_000.0), RopeConfig(1_000_000.0)) * 2,
    has_qk_norm=True,
    windows=(512, None) * 2,
    block=VARIANTS["Gemma3nForCausalLM"].block,
    activation=Activation.GELU_TANH,
    streams=StreamsSpec(4, 0, scales_gates=True, laurel_rank=64, input_width=256, input_vocab_size=262_144),
    kv_sources=(0, 1, 0, 1),
    sparsity=(0.95, 0.0, 0.0, 0.0),
)
STREAM_MODELS: dict[str, ServedModel] = {"gemma-3n-e4b bf16": ServedModel(_STREAMS, torch.bfloat16)}
"""Models with several residual streams, compiled besides."""
_FORMS = {
    "int4 with zero points": Scheme(Method.AWQ, 4, 128, is_symmetric=False),
    "int8": Scheme(Method.ROUND_INT8, 8, None),
    "fp8": Scheme(Method.FLOAT8, 8, None),
    "fp8 blocks": Scheme(Method.FLOAT8, 8, 128, block=(128, 128)),
}
QUANTISED_MODELS: dict[str, ServedModel] = {
    f"llama-8b {name}": ServedModel(replace(_LLAMA, quantization=Quantization(form, ("lm_head",))), torch.bfloat16)
    for name, form in _FORMS.items()
}
QUANTISED_MODELS["llama-8b fp8 rows"] = replace(QUANTISED_MODELS["llama-8b fp8"], rounds_rows=True)
"""Models with quantised weights, compiled besides."""
CODED_KV_MODELS: dict[str, ServedModel] = {
    "llama-8b bf16, int8 KV": ServedModel(_LLAMA, torch.bfloat16, kv_dtype="int8"),
    "windows, norms of heads fp32, int8 KV": ServedModel(_SMALL, torch.float32, kv_dtype="int8"),
    "head size 96 fp16, fp8 KV": ServedModel(_WIDE_HEADS, torch.float16, kv_dtype="fp8"),
}
"""Models whose KV is stored in bytes, compiled besides."""
_GPT_OSS = replace(
    _LLAMA,
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_heads=64,
    head_dim=64,
    windows=(128, None),
    experts=ExpertsConfig(
        ExpertShapes(num_experts=32, hidden_size=2880, intermediate_size=2880, layers=(0, 1)),
        RouterSpec(RouterScore.SOFTMAX_OF_CHOSEN, num_chosen=4),
        has_biases=True,
        clamped=ClampedSwiGlu(1.702, 7.0),
        is_mxfp4=True,
    ),
)
_EXPERT_FORMS = {
    "awq": Scheme(Method.AWQ, 4, 128, is_symmetric=False),
    "int4": Scheme(Method.COMPRESSED_INTEGERS, 4, 128),
    "int8": Scheme(Method.ROUND_INT8, 8, None),
    "fp8": Scheme(Method.FLOAT8, 8, None),
    "fp8 blocks": Scheme(Method.FLOAT8, 8, 128, block=(128, 128)),
}
_QWEN = ROUTED_MODELS["qwen3-30b-a3b bf16"].config
CODE_EXPERT_MODELS: dict[str, ServedModel] = {
    "gpt-oss-20b mxfp4": ServedModel(_GPT_OSS, torch.bfloat16),
    **{
        f"qwen3-30b-a3b {name}": ServedModel(replace(_QWEN, quantization=Quantization(form)), torch.bfloat16)
        for name, form in _EXPERT_FORMS.items()
    },
}
CODE_EXPERT_MODELS["qwen3-30b-a3b fp8 rows"] = replace(CODE_EXPERT_MODELS["qwen3-30b-a3b fp8"], rounds_rows=True)
"""Models with experts whose weights are codes, compiled besides."""
ALL_MODELS: Mapping[str, ServedModel] = {
    **MODELS,
    **ROUTED_MODELS,
    **STREAM_MODELS,
    **QUANTISED_MODELS,
    **CODED_KV_MODELS,
    **CODE_EXPERT_MODELS,
}


@dataclass(frozen=True, slots=True)
class Build:
    """One variant for one architecture, and what it needs there."""

    model: str
    kernel: str
    arch: int
    variant: str
    registers: int  # of one thread
    spilled_bytes: int  # of one thread
    shared_bytes: int  # of one program


@lru_cache
def _variants(model: str) -> Sequence[KernelVariant]:
    return served_variants(ALL_MODELS[model])


def _build(wanted: tuple[str, int, int]) -> Build:
    """Compiles one variant. Runs in a process of its own, to which no kernel can be sent."""
    model, number, arch = wanted
    variant = _variants(model)[number]
    built = compile_variant(variant, arch)
    return Build(
        model,
        variant.kernel.__name__,
        arch,
        variant.name,
        built.registers,
        built.spilled_bytes,
        built.shared_bytes,
    )


def compile_models(models: Sequence[str], num_processes: int) -> Iterator[Build]:
    """Yields the builds of all variants of the models in no fixed order. Shows a progress bar."""
    wanted = [
        (model, number, arch)
        for model in models
        for number, variant in enumerate(_variants(model))
        for arch in CAPABILITIES
        if arch >= variant.least_capability
    ]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from track(pool.map(_build, wanted), "compiling", total=len(wanted))


def by_kernel(builds: Sequence[Build]) -> list[dict[str, Any]]:
    """Returns the figures of each kernel of each model on each architecture."""
    place = attrgetter("model", "kernel", "arch")
    rows = []
    for (model, kernel, arch), some in groupby(sorted(builds, key=place), place):
        own = list(some)
        rows.append(
            {
                "model": model,
                "kernel": kernel,
                "arch": f"sm_{arch}",
                "variants": len(own),
                "registers": [min(one.registers for one in own), max(one.registers for one in own)],
                "most_spilled_bytes": max(one.spilled_bytes for one in own),
                "variants_that_spill": sum(one.spilled_bytes > 0 for one in own),
                "most_shared_bytes": max(one.shared_bytes for one in own),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="compile only the models whose names begin with this, separated by commas")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names = [name for name in ALL_MODELS if asked.models is None or name.startswith(tuple(asked.models.split(",")))]
    if not names:
        parser.error(f"no model begins with {asked.models!r}; the models are: {'; '.join(ALL_MODELS)}")
    builds = list(compile_models(names, asked.processes))
    spills = [asdict(build) for build in builds if build.spilled_bytes]
    for row in by_kernel(builds):
        print(*row.values(), sep="  ")
    if asked.json is not None:
        result = {
            "benchmark": "kernel_builds",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": describe_machine(),
            "versions": {"triton": triton.__version__, "torch": torch.__version__},
            "compiled": {name: sum(build.model == name for build in builds) for name in names},
            "by_kernel": by_kernel(builds),
            "variants_that_spill": spills,
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
