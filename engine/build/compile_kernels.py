"""Compiles the Triton kernels that engines may launch, for several GPU architectures, on a machine without a GPU.

Prints a table: for each variant and architecture the registers, the spilled bytes, and the sizes of shared memory and
machine code. See engine/kernels/compile_ahead.py.

    python -m graftwork.engine.build.compile_kernels                          examples from each room
    python -m graftwork.engine.build.compile_kernels --model FOLDER           all that an engine of this model launches

Each room with kernels lists its variants; `all_variants` and `served_variants` join the lists. An engine on a GPU
compiles its list at its first start on a machine, by `CompilingAhead`.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from graftwork.engine.attention.variants import attention_variants, served_attention_variants
from graftwork.engine.experts.triton.variants import expert_variants, served_expert_variants
from graftwork.engine.kernels.compile_ahead import (
    HEADING,
    KernelVariant,
    compile_all,
    compile_variant,
    is_cached,
    line_of,
    variant_of,
)
from graftwork.engine.kernels.norm import NormRules
from graftwork.engine.kernels.variants import ModelShape, row_variants, served_launches
from graftwork.engine.lora.triton.variants import lora_variants, served_lora_variants
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.sampling.device.variants import sampler_variants, served_sampler_variants

_log = logging.getLogger(__name__)
_FEW = 8
"""So few kernels are compiled when they are first launched: processes take longer to start."""
_MOST_PROCESSES = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What decides which kernels an engine launches. With several ranks, `config` is what one of them computes."""

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    """The dtype of KV in the pages; None means `dtype`."""
    page_tokens: int = 16
    max_lora_rank: int = 128


def all_variants() -> Iterator[KernelVariant]:
    """Yields examples of all kernels: the shapes that each room lists."""
    yield from row_variants()
    yield from lora_variants()
    yield from attention_variants()
    yield from expert_variants()
    yield from sampler_variants()


def served_variants(model: ServedModel) -> list[KernelVariant]:
    """Returns every variant that an engine may launch on a GPU, each once.

    They follow from the model, its dtype, the tokens of a page and the largest rank. The limits of batches, the context
    and the adapters change only the number of programs. So what is listed here covers decoding, drafts and prefill, with
    CUDA graphs and without.
    """
    return list({variant.key: variant for variant in _served(model)}.values())


def _served(model: ServedModel) -> Iterator[KernelVariant]:
    config, dtype = model.config, model.dtype
    shape = ModelShape(
        name=str(dtype).removeprefix("torch."),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        has_qk_norm=config.has_qk_norm,
        vocab=config.vocab_size,
        dtype=dtype,
        page_tokens=model.page_tokens,
        norms=NormRules(config.rms_norm_eps, config.block.norm.value, config.scales.residual),
        has_input_norms=config.block.norms.before_attention is not None,
        has_post_norms=config.block.norms.after_attention is not None,
        has_wide_qk_norm=config.block.has_wide_qk_norm,
        activation=config.activation.value,
        other_intermediates=tuple(width for width in config.mlp_widths if width != config.intermediate_size),
        ropes=tuple(
            None if rope is None else (rope.rotated_features(config.head_dim), rope.is_interleaved)
            for rope in dict.fromkeys(config.ropes)
        ),
    )
    for name, launch in served_launches(shape):
        yield variant_of(f"{shape.name} {name}".rstrip(), launch)
    yield from served_attention_variants(config, dtype, model.kv_dtype or dtype, model.page_tokens)
    yield from served_lora_variants(config, dtype, model.max_lora_rank)
    yield from served_expert_variants(config, dtype)
    yield from served_sampler_variants(config.vocab_size, dtype)


class CompilingAhead:
    """Compiles the kernels that an engine may launch, and that Triton's cache lacks, in processes beside its start.

    Without it the kernels would be compiled one after another when they are first launched, some of them in the steps of
    the first requests. A kernel that cannot be compiled here is compiled when it is launched, and its error is seen then.
    """

    def __init__(self, model: ServedModel, capability: int) -> None:
        """Begins. `capability` is the compute capability of the GPU, such as 90."""
        variants = served_variants(model)
        missing = [number for number, variant in enumerate(variants) if not is_cached(variant, capability)]
        self._num_missing = len(missing)
        self._builds: Sequence[Future[None]] = ()
        self._pool: ProcessPoolExecutor | None = None
        if len(missing) > _FEW:
            num_processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
            self._pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
            self._builds = [self._pool.submit(_compile_served, model, number, capability) for number in missing]

    def wait(self) -> None:
        """Waits until all are compiled. Logs how many were, and how many could not be."""
        if self._pool is None:
            return
        errors = [error for error in (build.exception() for build in self._builds) if error is not None]
        self._pool.shutdown()
        self._pool = None
        if errors:
            _log.warning("kernels_not_compiled_ahead", extra={"kernels": len(errors), "reason": str(errors[0])[:500]})
        _log.info("kernels_compiled", extra={"kernels": self._num_missing - len(errors)})


@cache
def _served_once(model: ServedModel) -> Sequence[KernelVariant]:
    return served_variants(model)


def _compile_served(model: ServedModel, number: int, capability: int) -> None:
    """Compiles one of a model's variants. Runs in a process of its own, to which no kernel can be sent."""
    compile_variant(_served_once(model)[number], capability)


def main() -> None:
    """Compiles every variant for every architecture, and prints one line about each."""
    parser = argparse.ArgumentParser(description="Compile Triton kernels for several GPU architectures.")
    parser.add_argument("--model", type=Path, help="a folder with config.json; without it, examples are compiled")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--max-lora-rank", type=int, default=128)
    asked = parser.parse_args()
    variants = all_variants()
    if asked.model is not None:
        config = read_model_config(asked.model)
        variants = iter(served_variants(ServedModel(config, _DTYPES[asked.dtype], max_lora_rank=asked.max_lora_rank)))
    sys.stdout.write(HEADING + "\n")
    for built in compile_all(variants):
        sys.stdout.write(line_of(built) + "\n")


if __name__ == "__main__":
    main()
