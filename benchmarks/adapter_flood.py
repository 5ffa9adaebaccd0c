"""How long do the coldest adapters wait, where three hundred share a pool for forty and a few are hot?

    python benchmarks/adapter_flood.py [--requests 1500] [--load 0.9] [--json OUT]

The demo model with 300 random adapters (ranks 1 to 24, made on each load), a device pool for about 40 of them and a
host tier for 120. Requests arrive by Poisson at a share of the rate that the engine reaches with everything resident,
their adapters by Zipf. The wait is from arrival to admission. Every request must end with tokens.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import PromptAdmitted, RequestFinished, RequestOutput
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.engine.messages import SubmitRequest
from graftwork.platform.ids import IsolationDomain, RequestId

MODEL = Path(__file__).parent.parent / "demo" / "model"
NUM_ADAPTERS, RANKS = 300, (1, 3, 8, 12, 16, 24)
PROMPT_TOKENS, OUTPUT_TOKENS = 48, 24
MEAN_RANK_PAGES = 14  # ranks in pages of eight, on average


class RandomAdapters:
    """An AdapterSource that makes adapter `n` from its number."""

    def __init__(self, shapes: dict[str, tuple[int, int]], num_layers: int) -> None:
        self._shapes, self._num_layers = shapes, num_layers
        self.loads = 0

    def load(self, digest: str) -> AdapterWeights:
        self.loads += 1
        number = int(digest.removeprefix("adapter-"))
        generator, rank = torch.Generator().manual_seed(number), RANKS[number % len(RANKS)]
        pairs = {
            (layer, target): LoraPair(
                torch.randn(rank, inner, generator=generator) / inner,
                torch.randn(outer, rank, generator=generator) / rank,
                2.0,
            )
            for layer in range(self._num_layers)
            for target, (outer, inner) in self._shapes.items()
        }
        return AdapterWeights(digest, pairs)


@dataclass
class Flood:
    """The requests of one run, with their waits in seconds by adapter number."""

    engine: Engine
    waits: dict[int, list[float]] = field(default_factory=dict)
    arrived: dict[RequestId, tuple[int, float]] = field(default_factory=dict)
    finished: int = 0

    def submit(self, number: int, prompt: list[int]) -> None:
        request_id = RequestId(f"req_{len(self.arrived)}")
        self.arrived[request_id] = number, time.perf_counter()
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
            domain=IsolationDomain(f"tenant-{number}".encode()),
            adapters=(AdapterUse(f"adapter-{number}"),),
        )
        self.engine.loop.take(SubmitRequest(request, self.hear))

    def hear(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            number, arrived_at = self.arrived[output.request_id]
            if isinstance(output.event, PromptAdmitted):
                self.waits.setdefault(number, []).append(time.perf_counter() - arrived_at)
            elif isinstance(output.event, RequestFinished):
                self.finished += 1
            elif isinstance(output.event, Exception):
                raise output.event

    def step(self) -> bool:
        while not self.engine.loop.inbox.empty():
            self.engine.loop.take(self.engine.loop.inbox.get())
        return self.engine.loop.step()


def open_engine(pool_adapters: int, host_adapters: int) -> tuple[Engine, RandomAdapters]:
    sources: list[RandomAdapters] = []

    def source_for(description: object) -> RandomAdapters:
        sources.append(RandomAdapters(description.target_shapes, description.num_layers))  # type: ignore[attr-defined]
        return sources[0]

    keep_freed_memory()  # as every engine process does
    engine = build_engine(
        EngineConfig(
            MODEL,
            lora_pool_bytes=pool_adapters * adapter_bytes(),
            lora_host_bytes=host_adapters * adapter_bytes(),
            max_waiting=100_000,
            max_running=32,
        ),
        source_for,
    )
    return engine, sources[0]


def adapter_bytes() -> int:
    """Of an adapter of mean rank in bf16."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    features = 2 * (hidden + hidden) + 2 * (hidden + kv_width) + 3 * (hidden + inner)
    return 2 * MEAN_RANK_PAGES * layers * features


def capacity(requests: list[tuple[int, list[int]]]) -> float:
    """Requests a second with everything resident and always enough to do."""
    engine, _ = open_engine(2 * NUM_ADAPTERS, 2 * NUM_ADAPTERS)
    flood = Flood(engine)
    for number in {number for number, _ in requests}:
        flood.submit(number, [2])
    while flood.finished < len(flood.arrived):
        flood.step()
    warm = flood.finished
    for number, prompt in requests[:300]:
        flood.submit(number, prompt)
    start = time.perf_counter()
    while flood.finished < len(flood.arrived):
        flood.step()
    return (flood.finished - warm) / (time.perf_counter() - start)


def run(requests: list[tuple[int, list[int]]], rate: float, generator: random.Random) -> tuple[Flood, RandomAdapters]:
    engine, source = open_engine(40, 120)
    flood = Flood(engine)
    due = time.perf_counter()
    for number, prompt in track(requests, "flood"):
        due += generator.expovariate(rate)
        while time.perf_counter() < due:
            flood.step()
        flood.submit(number, prompt)
    while flood.finished < len(requests):
        flood.step()
    return flood, source


def report(flood: Flood) -> list[dict[str, float | str]]:
    """Waits of the hottest tenth of the adapters, the middle, and the coldest half."""
    order = sorted(flood.waits, key=lambda number: -len(flood.waits[number]))
    tenth, half = len(order) // 10, len(order) // 2
    groups = {"hottest tenth": order[:tenth], "between": order[tenth:half], "coldest half": order[half:]}
    rows: list[dict[str, float | str]] = []
    for name, numbers in groups.items():
        waits = sorted(1e3 * wait for number in numbers for wait in flood.waits[number])
        rows.append(
            {
                "adapters": name,
                "count": len(numbers),
                "requests": len(waits),
                "p50 ms": round(statistics.median(waits), 1),
                "p99 ms": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 1),
                "max ms": round(waits[-1], 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--load", type=float, default=0.9, help="arrivals as a share of what the engine can do")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
    numbers = generator.choices(generator.sample(range(NUM_ADAPTERS), NUM_ADAPTERS), weights, k=options.requests)
    requests = [(number, [generator.randrange(2, 1000) for _ in range(PROMPT_TOKENS)]) for number in numbers]
    best = capacity(requests)
    flood, source = run(requests, options.load * best, generator)
    rows = report(flood)
    table = Table(*rows[0], title=f"{options.load:.0%} of {best:.0f} requests/s; {source.loads} loads")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        figures = {"capacity": best, "load": options.load, "loads": source.loads, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
