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
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graftwork.engine.attention.variants import attention_variants, served_attention_variants
from graftwork.engine.experts.triton.variants import expert_variants, served_expert_variants
from graftwork.engine.kernels.compile_ahead import (
    CAPABILITIES,
    HEADING,
    KernelVariant,
    compile_all,
    is_cached,
    line_of,
    variant_of,
)
from graftwork.engine.kernels.norm import NormRules
from graftwork.engine.kernels.variants import ModelShape, row_variants, served_launches
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.lora.triton.variants import lora_variants, served_lora_variants
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.quantization.scheme import round_to_nearest
from graftwork.engine.quantization.triton.variants import served_weight_variants, weight_variants
from graftwork.engine.sampling.device.variants import sampler_variants, served_sampler_variants
from graftwork.platform.worker_slots import python_command, watch_parent

_log = logging.getLogger(__name__)
_FEW = 8
"""So few kernels are compiled when they are first launched: processes take longer to start."""
_MOST_PROCESSES = 16
_TIMEOUT_S = 600.0
"""Compiling a model's kernels takes a few minutes of one core. After so long, those that are left are given up."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What decides which kernels an engine launches. With several ranks, `config` is what one of them computes."""

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: str = "auto"
    """How KV is stored in the pages, as in EngineConfig: `auto`, `int8` or `fp8`."""
    page_tokens: int = 16
    max_lora_rank: int = 128
    rounds_rows: bool = False
    """Whether layers with weights of float8 round their input too."""


def all_variants() -> Iterator[KernelVariant]:
    """Yields examples of all kernels: the shapes that each room lists."""
    yield from row_variants()
    yield from lora_variants()
    yield from attention_variants()
    yield from expert_variants()
    yield from weight_variants()
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
    inputs = () if config.streams is None else (config.streams.input_width,)
    widths = dict.fromkeys((*config.mlp_widths, *inputs))
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
        has_value_norm=config.block.has_value_norm,
        has_query_layers=bool(config.query_layers),
        has_rolling=config.recurrence is None,
        activation=config.activation.value,
        other_intermediates=tuple(width for width in widths if width != config.intermediate_size),
        other_norms=inputs,
        kv_dtype=model.kv_dtype,
        ropes=tuple(
            None if rope is None else (rope.rotated_features(config.head_dim), rope.is_interleaved)
            for rope in dict.fromkeys(config.ropes)
        ),
    )
    for name, launch in served_launches(shape):
        yield variant_of(f"{shape.name} {name}".rstrip(), launch)
    kv_dtype = kv_format(model.kv_dtype, dtype).code_dtype
    yield from served_attention_variants(config, dtype, kv_dtype, model.page_tokens)
    yield from served_lora_variants(config, dtype, model.max_lora_rank)
    yield from served_expert_variants(config, dtype, rounds_rows=model.rounds_rows)
    yield from served_weight_variants(config, dtype, rounds_rows=model.rounds_rows)
    yield from served_sampler_variants(config.vocab_size, dtype)


class CompilingAhead:
    """Compiles the kernels that an engine may launch, and that Triton's cache lacks, in processes beside its start.

    Without it the kernels would be compiled one after another when they are first launched, some of them in the steps of
    the first requests. A kernel that cannot be compiled here is compiled when it is launched, and its error is seen then.
    """

    def __init__(self, folder: Path, model: ServedModel, capability: int) -> None:
        """Begins. `folder` has the model's config.json; `capability` is the GPU's compute capability, such as 90."""
        self._processes: list[subprocess.Popen[str]] = []
        self._lifeline: int | None = None
        try:
            variants = [one for one in served_variants(model) if one.least_capability <= capability]
        except ValueError as error:  # some kernels do not serve these sizes, and torch stands in for them
            _log.warning("kernels_not_compiled_ahead", extra={"processes": 0, "reason": str(error)})
            return
        quantization = _rounded_to(model.config)
        self._num_missing = sum(not is_cached(variant, capability) for variant in variants)
        if self._num_missing <= _FEW:
            return
        count = min(os.cpu_count() or 1, _MOST_PROCESSES)
        command = [
            *python_command("graftwork.engine.build.compile_kernels"),
            *("--model", str(folder), "--dtype", str(model.dtype).removeprefix("torch."), "--arch", str(capability)),
            *("--max-lora-rank", str(model.max_lora_rank), "--page-tokens", str(model.page_tokens)),
            *(() if quantization is None else ("--quantization", quantization)),
            *(("--activation-dtype", "fp8") if model.rounds_rows else ()),
            *("--kv-dtype", model.kv_dtype),
            "--part",
        ]
        reader, self._lifeline = os.pipe()  # its end ends the processes, also if this one is killed
        for part in range(count):
            self._processes.append(
                subprocess.Popen(
                    [*command, f"{part}/{count}"],
                    stdin=reader,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        os.close(reader)

    def stop(self) -> None:
        """Lets the processes end without their work. Does nothing after `wait`."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def wait(self) -> None:
        """Waits until all are compiled. Logs how many there were, and why a process has failed."""
        failures = [failure for process in self._processes if (failure := _failure_of(process))]
        if failures:
            _log.warning("kernels_not_compiled_ahead", extra={"processes": len(failures), "reason": failures[0]})
        elif self._processes:
            _log.info("kernels_compiled", extra={"kernels": self._num_missing})
        self.stop()
        self._processes = []


def _rounded_to(model: ModelConfig) -> str | None:
    """Returns the setting `--quantization` of a model; None if its weights are those of its files."""
    found = model.quantization
    return None if found is None or not found.is_rounded else found.scheme.method.value


def _failure_of(process: subprocess.Popen[str]) -> str | None:
    """Waits for a process. Returns the end of what it wrote if it failed."""
    try:
        _, written = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"not done after {_TIMEOUT_S:.0f} s"
    return (written.strip()[-500:] or f"exit status {process.returncode}") if process.returncode else None


def main() -> None:
    """Compiles every variant for every architecture, and prints one line about each."""
    asked = _parser().parse_args()
    variants = list(all_variants())
    if asked.model is not None:
        dtype, config = _DTYPES[asked.dtype], read_model_config(asked.model)
        if asked.quantization is not None:
            config = replace(config, quantization=round_to_nearest(asked.quantization, config.quantization))
        served = ServedModel(
            config,
            dtype,
            kv_dtype=asked.kv_dtype,
            page_tokens=asked.page_tokens,
            max_lora_rank=asked.max_lora_rank,
            rounds_rows=asked.activation_dtype == "fp8",
        )
        variants = served_variants(served)
    if asked.part is not None:
        watch_parent(sys.stdin.fileno())
        part, count = map(int, asked.part.split("/"))
        variants = [one for one in variants[part::count] if not all(is_cached(one, arch) for arch in asked.arch)]
    sys.stdout.write(HEADING + "\n")
    for built in compile_all(variants, asked.arch):
        sys.stdout.write(line_of(built) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compile Triton kernels for several GPU architectures.")
    parser.add_argument("--model", type=Path, help="a folder with config.json; without it, examples are compiled")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="to what plain weights are rounded")
    parser.add_argument(
        "--activation-dtype", choices=("auto", "fp8"), default="auto", help="in what fp8 layers multiply"
    )
    parser.add_argument("--kv-dtype", choices=("auto", "int8", "fp8"), default="auto", help="how KV is stored")
    parser.add_argument("--max-lora-rank", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=16, help="the tokens of a page of KV")
    parser.add_argument("--arch", type=int, nargs="+", default=CAPABILITIES, help="compute capabilities, such as 90")
    parser.add_argument(
        "--part", metavar="I/N", help="only each Nth variant from the Ith on (from 0), if Triton's cache lacks it"
    )
    return parser


if __name__ == "__main__":
    main()
