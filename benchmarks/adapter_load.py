"""How long an adapter takes from its stored files to matrices, verified, beside what PEFT takes for the same folder.

    python benchmarks/adapter_load.py [--json OUT]

One adapter of rank 16 over 7 targets in 8 layers (hidden 512, kv 128, intermediate 1408), made by peft, in fp32 and in
bf16, from the page cache on one thread. "cpu" is the thread's own time, which a busy machine distorts less than the
time on the wall; "pool" goes on until a step can use it; "first" is a process that has not yet met an adapter of this layout. Before
anything is timed, every matrix is compared with what safetensors itself reads.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.inspection.adapter_files import AdapterFiles
from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME, LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.adapter_copies import DirectCopies
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.weights import TARGETS, AdapterWeights
from graftwork.engine.model.projections import GROUPS, ProjectionGroup

ROUNDS = 31
PEFT_ROUNDS = 9
HIDDEN, KV, INTERMEDIATE, LAYERS, RANK = 512, 128, 1408, 8, 16
DESCRIPTION = EngineDescription(
    model_name="bench",
    fingerprint="sha256:" + "0" * 64,
    vocab_size=256,
    context_tokens=2048,
    eos_token_ids=(),
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    biased_targets=(),
    target_shapes={
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (KV, HIDDEN),
        "v_proj": (KV, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    },
    max_lora_rank=64,
    page_tokens=16,
    device_pages=0,
)


def base_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=DESCRIPTION.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def make_adapter(folder: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = get_peft_model(base_model(), LoraConfig(r=RANK, lora_alpha=32, target_modules=list(TARGETS)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(dtype)
    model.save_pretrained(str(folder))


def check(loaded: AdapterWeights, folder: Path) -> None:
    """Raises AssertionError where a matrix differs in a single bit."""
    expected = load_file(folder / WEIGHTS_NAME)
    assert len(expected) == 2 * len(loaded.pairs) == 2 * LAYERS * len(TARGETS)
    for (layer, target), pair in loaded.pairs.items():
        parent = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        prefix = f"base_model.model.model.layers.{layer}.{parent}.{target}"
        assert torch.equal(pair.A, expected[f"{prefix}.lora_A.weight"])
        assert torch.equal(pair.B, expected[f"{prefix}.lora_B.weight"])


def median_ms(run: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """One round first that does not count."""
    run()
    times = []
    for _ in range(rounds):
        started = clock()
        run()
        times.append(clock() - started)
    return statistics.median(times) * 1e3


class Shapes:
    """The base, as far as a plain adapter asks for it."""

    def groups(self, layer: int) -> tuple[ProjectionGroup, ...]:
        return GROUPS

    def module(self, layer: int, target: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError("a plain adapter needs no weights of the base")

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        return DESCRIPTION.target_shapes[target]


def into_the_pool(source: ArtifactAdapterSource, digest: str, device: torch.Tensor) -> ResidentAdapter:
    """All that happens to an adapter between its files and a step of an engine that computes in bf16.

    `device` is memory of the device, in bytes, of which it takes what it needs.
    """
    adapter = build_resident(source.load(digest), Shapes(), torch.bfloat16)
    buffer = device[: adapter.num_bytes]
    DirectCopies().begin(adapter.digest, adapter.buffer, buffer)
    return adapter.over(buffer)


def measure(dtype: torch.dtype) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        folder, store = Path(root) / "adapter", LocalArtifacts(Path(root) / "artifacts")
        make_adapter(folder, dtype)
        config, weights = (folder / CONFIG_NAME).read_bytes(), (folder / WEIGHTS_NAME).read_bytes()
        _, digest = identify_adapter(config, weights, DESCRIPTION)
        with (folder / WEIGHTS_NAME).open("rb") as file:
            store.put(digest, AdapterFiles(config, file))
        source = ArtifactAdapterSource(LocalArtifacts(Path(root) / "artifacts"), DESCRIPTION)
        check(source.load(digest), folder)
        model = PeftModel.from_pretrained(base_model(), folder)
        device = torch.zeros(2**26, dtype=torch.uint8)
        return {
            "dtype": str(dtype).removeprefix("torch."),
            "file_bytes": len(weights),
            "load_ms": median_ms(lambda: source.load(digest), ROUNDS),
            "pool_ms": median_ms(lambda: into_the_pool(source, digest, device), ROUNDS),
            "load_cpu_ms": median_ms(lambda: source.load(digest), ROUNDS, time.thread_time),
            "first_load_ms": median_ms(
                lambda: ArtifactAdapterSource(LocalArtifacts(Path(root) / "artifacts"), DESCRIPTION).load(digest),
                ROUNDS,
            ),
            "peft_load_adapter_ms": median_ms(lambda: _load_with_peft(model, folder), PEFT_ROUNDS),
            "rounds": ROUNDS,
        }


def _load_with_peft(model: PeftModel, folder: Path) -> None:
    model.load_adapter(str(folder), adapter_name="again")
    model.delete_adapter("again")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="where to write the figures as well")
    out: Path | None = arguments.parse_args().json
    torch.set_num_threads(1)
    keep_freed_memory()  # as every engine does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between peft and transformers
        rows = [measure(dtype) for dtype in (torch.float32, torch.bfloat16)]
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; medians of {ROUNDS}")
    print("dtype     file MB   load ms   pool ms    cpu ms  first ms   PEFT ms")
    for row in rows:
        print(
            f"{row['dtype']:<9} {row['file_bytes'] / 1e6:>7.2f} {row['load_ms']:>9.2f} {row['pool_ms']:>9.2f} "
            f"{row['load_cpu_ms']:>9.2f} "
            f"{row['first_load_ms']:>9.2f} {row['peft_load_adapter_ms']:>9.1f}"
        )
    if out is not None:
        out.write_text(json.dumps({"load_average": os.getloadavg()[0], "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
