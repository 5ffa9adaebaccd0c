"""How a long prompt changes the inter-token times of requests that decode beside it, with and without a target.

    python benchmarks/inter_token.py [--prompt 30000] [--rows 16] [--target-ms 200] [--rounds 2] [--json OUT]

A small random Llama of two layers runs in this process on one thread of the CPU, by the real engine loop and the real
clock. `--rows` requests decode. Then a long prompt arrives, and the times between the tokens of each decoding request
are taken until the prompt's first token: from one delivery to the next, so they include everything that the loop does.
The settings take turns: `off` computes `max_batch_tokens` of the prompt in each step, `target` as many as the target
allows. Step times are learned from the engine's start on, not beforehand.

    holds if: 99th percentile of the inter-token times with the target <= 1.5 * target, in wall time

Other work on the machine stretches wall times, and the engine learns from them. The processor time of the loop's thread
is shown beside them.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe_machine
from our_engine import greedy_request
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.weights import AdapterSource
from graftwork.engine.messages import SubmitRequest

_VOCABULARY = 512
_LEAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt beside decoding requests. Times in milliseconds, `cpu` in processor time of the loop's thread."""

    setting: str
    num_steps: int
    alone_p50_ms: float
    wall_p50_ms: float
    wall_p99_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float
    wall_longest_ms: float
    prompt_s: float


class NoAdapters:
    """An AdapterSource without adapters."""

    def __init__(self, description: EngineDescription) -> None:
        """Every engine gets one."""

    def read(self, digest: str) -> None:
        raise KeyError(digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=30_000, help="tokens of the long prompt")
    parser.add_argument("--rows", type=int, default=16, help="requests that decode")
    parser.add_argument("--target-ms", type=float, default=200.0, help="the target of inter-token times")
    parser.add_argument("--rounds", type=int, default=2, help="prompts with each setting")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    keep_freed_memory()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.prompt + 4096)
        for _ in range(options.rounds):
            for setting, target_ms in (("off", 0.0), ("target", options.target_ms)):
                samples.append(measure(Path(folder), setting, target_ms, options.prompt, options.rows))
                show(samples[-1:], options.target_ms)
    show(samples, options.target_ms)
    if options.json:
        figures = {"machine": describe_machine(), "options": {**vars(options), "json": None}}
        options.json.write_text(json.dumps(figures | {"samples": [asdict(one) for one in samples]}, indent=1))
    worst = max(one.wall_p99_ms for one in samples if one.setting == "target")
    if worst > 1.5 * options.target_ms:
        raise SystemExit(f"does not hold: p99 {worst:.0f} ms is above 1.5 times {options.target_ms:.0f} ms")


def write_model(folder: Path, context: int) -> None:
    """Writes a random Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(model: Path, setting: str, target_ms: float, prompt: int, rows: int) -> Sample:
    """Runs one long prompt beside `rows` decoding requests, on a new engine."""
    config = EngineConfig(
        model=model, device="cpu", dtype="float32", threads=1, target_itl_ms=target_ms, host_kv_bytes=0
    )
    engine = build_engine(config, no_adapters)
    delivered: dict[str, int] = {}

    def sink(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, TokensGenerated):
                delivered[output.request_id] = delivered.get(output.request_id, 0) + len(output.event.token_ids)

    for number in range(rows):
        tokens = [number + 3, 5, 7]
        engine.loop.take(SubmitRequest(greedy_request(tokens, None, prompt, b"decodes"), sink))
    alone = steps_until(engine, lambda: min(delivered.values(), default=0) > _LEAST_STEPS)
    long = greedy_request([3 + number % 500 for number in range(prompt)], None, 2, b"long")
    engine.loop.take(SubmitRequest(long, sink))
    began = time.perf_counter()
    beside = steps_until(engine, lambda: long.request_id in delivered)
    prompt_s = time.perf_counter() - began
    wall, cpu = [sorted(1000 * one for one in column) for column in zip(*beside, strict=True)]
    alone_ms = sorted(1000 * one for one, _ in alone)
    return Sample(
        setting,
        len(beside),
        alone_ms[len(alone_ms) // 2],
        wall[len(wall) // 2],
        wall[int(0.99 * len(wall))],
        cpu[len(cpu) // 2],
        cpu[int(0.99 * len(cpu))],
        wall[-1],
        prompt_s,
    )


def steps_until(engine: Engine, is_over: Callable[[], bool]) -> list[tuple[float, float]]:
    """Steps the loop until `is_over`. Returns the wall and processor seconds of each step.

    Each decoding request gets a token in each step, so these are its inter-token times.
    """
    times = []
    while not is_over():
        wall, cpu = time.perf_counter(), time.thread_time()
        while not engine.loop.inbox.empty():
            engine.loop.take(engine.loop.inbox.get())
        engine.loop.step()
        times.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return times


def no_adapters(description: EngineDescription) -> AdapterSource:
    return NoAdapters(description)  # type: ignore[return-value]


def show(samples: list[Sample], target_ms: float) -> None:
    table = Table(title=f"inter-token times beside a long prompt, target {target_ms:.0f} ms")
    for heading in (
        "setting",
        "steps",
        "alone p50",
        "wall p50",
        "wall p99",
        "cpu p50",
        "cpu p99",
        "wall max",
        "prompt s",
    ):
        table.add_column(heading, justify="right")
    for one in samples:
        numbers = (
            one.alone_p50_ms,
            one.wall_p50_ms,
            one.wall_p99_ms,
            one.cpu_p50_ms,
            one.cpu_p99_ms,
            one.wall_longest_ms,
        )
        table.add_row(one.setting, str(one.num_steps), *(f"{number:.0f}" for number in numbers), f"{one.prompt_s:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
