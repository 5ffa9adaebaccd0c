"""How fast one core advances the state of a recurrent layer: the compiled loop beside torch, for prompts and decoding.

    python benchmarks/recurrent_layers.py [--rounds 5] [--json OUT]

The layer has the shape of Granite 4.0 H Tiny: 48 heads of 64 features, a state of 128 numbers for each feature, 1.6 MB in
all. A figure is the time of all that a recurrent layer computes between in_proj and out_proj, as the engine computes it:
a prompt of one request, or one token of each of several requests. The two ways take turns; the time is processor time of
this thread, which other programs on a busy machine disturb less, and the fastest round counts. Beside it stands the time
of the layer's two projections in bf16, which every layer has to compute anyway.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.part_weights import RecurrentWeights
from graftwork.engine.model.recurrence import RecurrenceConfig
from graftwork.engine.recurrence.layers import RecurrentLayers
from graftwork.engine.recurrence.scan import Scan, compiled_scan, torch_scan
from graftwork.engine.recurrence.state_pages import StatePages
from graftwork.platform.ids import RequestId

HIDDEN, PAGE_TOKENS, MOST_REQUESTS = 1536, 512, 8
SHAPE = RecurrenceConfig(
    layers=(0,), num_heads=48, head_dim=64, num_groups=1, state_size=128, conv_tokens=4, has_conv_bias=True
)
MODEL = ModelConfig(
    vocab_size=2,
    hidden_size=HIDDEN,
    intermediate_size=16,
    num_layers=2,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-5,
    ropes=(None, None),
    biased_targets=(),
    has_qk_norm=False,
    windows=(None, None),
    tie_word_embeddings=True,
    context_tokens=PAGE_TOKENS,
    eos_token_ids=(),
    dtype="bfloat16",
    recurrence=SHAPE,
)
STEPS = {"prompt of 512": [512], "prompt of 64": [64], "one token": [1], "one token of 8": [1] * MOST_REQUESTS}


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for one layer in one step."""

    step: str
    compiled_ms: float
    torch_ms: float
    projections_ms: float


def build_layers(scan: Scan) -> RecurrentLayers:
    """Returns one recurrent layer with random weights, over pages for the most requests."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    memory = DeviceMemory(MOST_REQUESTS, bytes_per_page(MODEL, PAGE_TOKENS, torch.bfloat16), torch.device("cpu"))
    cache = KvCache(MODEL, memory, PAGE_TOKENS, torch.bfloat16)
    weights = RecurrentWeights(
        random(4, SHAPE.conv_width),
        random(SHAPE.conv_width),
        random(48),
        -random(48).exp(),
        random(48, 1),
        random(3072),
    )
    return RecurrentLayers(MODEL, [weights], StatePages(SHAPE, memory, cache), PAGE_TOKENS, scan)


def step_of(lengths: list[int]) -> AttentionBatch:
    """Returns a step of requests that begin, with so many tokens each."""
    pieces = [
        RequestSlice(RequestId(str(number)), (0,) * length, 0, (PageId(number),), (), (), place=number)
        for number, length in enumerate(lengths)
    ]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    placed = tuple(PlacedSlice(start, piece) for start, piece in zip(starts, pieces, strict=True))
    return AttentionBatch(placed, torch.zeros(sum(lengths), dtype=torch.int64))


def fastest(acts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the milliseconds of the fastest call of each act. The acts take turns."""
    for act in acts.values():
        act()
    found = dict.fromkeys(acts, float("inf"))
    for _ in range(rounds):
        for name, act in acts.items():
            started = time.thread_time()
            act()
            found[name] = min(found[name], 1000 * (time.thread_time() - started))
    return found


def mix(layers: RecurrentLayers, batch: AttentionBatch, projected: torch.Tensor) -> torch.Tensor:
    """Computes one step of the layer."""
    return layers.plan(batch).mix(0, projected)


def project(linears: tuple[Linear, Linear], x: torch.Tensor, mixed: torch.Tensor) -> None:
    """Computes the layer's two projections."""
    for linear, rows in zip(linears, (x, mixed), strict=True):
        linear(rows)


@torch.inference_mode()
def measure(rounds: int) -> list[Timing]:
    """Measures all kinds of steps."""
    by_scan = {"compiled": build_layers(compiled_scan), "torch": build_layers(torch_scan)}
    into, out = Linear(torch.randn(SHAPE.input_width, HIDDEN).bfloat16()), Linear(torch.randn(HIDDEN, 3072).bfloat16())
    into.pack()
    out.pack()
    timings = []
    for name, lengths in STEPS.items():
        batch, rows = step_of(lengths), sum(lengths)
        projected, x = torch.randn(rows, SHAPE.input_width).bfloat16(), torch.randn(rows, HIDDEN).bfloat16()
        wide = torch.randn(rows, 3072).bfloat16()

        acts: dict[str, Callable[[], object]] = {
            way: partial(mix, layers, batch, projected) for way, layers in by_scan.items()
        }
        acts["projections"] = partial(project, (into, out), x, wide)
        found = fastest(acts, rounds)
        timings.append(Timing(name, found["compiled"], found["torch"], found["projections"]))
    return timings


def main() -> None:
    """Prints a table, and writes the figures as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timings = measure(arguments.rounds)
    table = Table("step", "compiled ms", "torch ms", "projections ms")
    for one in timings:
        table.add_row(one.step, f"{one.compiled_ms:.2f}", f"{one.torch_ms:.2f}", f"{one.projections_ms:.2f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in timings], indent=2) + "\n")


if __name__ == "__main__":
    main()
