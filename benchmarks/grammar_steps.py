"""What grammars cost a step, and what hostile ones cost their neighbours.

    python benchmarks/grammar_steps.py [--json OUT]

A random Llama (hidden 512, 8 layers) with a byte-level vocabulary of 32,000, trained here on Python's own sources.
"masks": 32 requests decode with a grammar each, and 32 without, in turn and often, because the machine's own speed
wanders; a step's time is that of the whole loop, and masks are filled while the forward pass runs. Nothing is drafted:
what drafts cost, and bring, is measured by speculation.py. "hostile": one free request decodes while another domain hands in one
hostile grammar after another; its time between tokens is set beside that without them.
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.requests import EngineRequest, GrammarKind, GrammarSource
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.messages import SubmitRequest
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import IsolationDomain, RequestId

VOCAB_SIZE = 32_000
BATCH = 32
ROUNDS = 5
MASK_ROUNDS = 15
STEPS = 12
EOS = 0

TOOL = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    },
    "minItems": 60,
}
PATTERNED = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]+$"}, "minItems": 200}
GRAMMARS = {"xgrammar": TOOL, "llguidance": PATTERNED}


class NoAdapters:
    def load(self, digest: str) -> AdapterWeights:
        raise NotFound(f"There is no adapter {digest}.")


def is_text(path: Path) -> bool:
    """Some sources are written in another encoding, to test just that."""
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def make_model(folder: Path) -> Path:
    """The model and its tokenizer."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for pattern in ("*.py", "*/*.py") for path in sorted(library.glob(pattern)) if is_text(path)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(
        [str(path) for path in sources], vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], show_progress=False
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True, slots=True)
class Step:
    """Milliseconds: on the wall, where a busy machine and waiting for masks count, and of the loop's own thread."""

    wall: float
    cpu: float


class Bench:
    """An engine's loop, stepped by hand and timed."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(model=folder, device="cpu", dtype="float32", threads=1, max_draft_tokens=0)
        keep_freed_memory()  # as every engine process does
        self.engine = build_engine(config, lambda _: NoAdapters())
        self.loop = self.engine.loop
        self._numbers = count()
        self.ended: list[RequestOutput] = []

    def submit(self, source: GrammarSource | None, tokens: int, domain: str = "") -> None:
        number = next(self._numbers)
        request = EngineRequest(
            RequestId(f"req_{number}"),
            tuple(range(100 + number % 50, 132 + number % 50)),
            SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True),
            IsolationDomain((domain or str(number)).encode()),
            grammar=source,
        )
        self.loop.take(SubmitRequest(request, lambda outputs: self.ended.extend(one for one in outputs if one.is_last)))

    def take_messages(self) -> None:
        while not self.loop.inbox.empty():
            self.loop.take(self.loop.inbox.get())

    def drain(self) -> None:
        while self.loop.stats().running_requests or self.loop.stats().waiting_requests:
            self.take_messages()
            if not self.loop.step() and self.loop.stats().waiting_requests:
                self.loop.take(self.loop.inbox.get())

    def step_times(self, between: Callable[[], None] = lambda: None, steps: int = STEPS) -> list[Step]:
        """Each decode step, with what is done between steps."""
        found = []
        for _ in range(steps):
            wall, cpu = time.perf_counter(), time.thread_time()
            between()
            self.take_messages()
            self.loop.step()
            found.append(Step((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
        return found


def measure_masks(bench: Bench) -> dict[str, Any]:
    sources = {name: GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for name, schema in GRAMMARS.items()}
    kinds: dict[str, GrammarSource | None] = {"free": None, **sources}
    times: dict[str, list[Step]] = {name: [] for name in kinds}
    for source in sources.values():
        bench.submit(source, 4)
    bench.drain()
    for _ in range(MASK_ROUNDS):
        for name, source in kinds.items():
            for _ in range(BATCH):
                bench.submit(source, STEPS + 10)
            bench.step_times(steps=6)  # prefill
            times[name].append(median_of(bench.step_times()))
            bench.drain()
    failed = [str(one.event) for one in bench.ended if isinstance(one.event, Exception)]
    ratios = {name: ratio(times[name], times["free"]) for name in sources}
    return {"steps": {name: list(map(asdict, own)) for name, own in times.items()}, "ratio": ratios, "failed": failed}


def median_of(steps: list[Step]) -> Step:
    return Step(statistics.median(step.wall for step in steps), statistics.median(step.cpu for step in steps))


def ratio(own: list[Step], other: list[Step]) -> dict[str, float]:
    """The median over the rounds, which were run in turn."""
    pairs = list(zip(own, other, strict=True))
    return {
        "wall": statistics.median(one.wall / two.wall for one, two in pairs),
        "cpu": statistics.median(one.cpu / two.cpu for one, two in pairs),
    }


def hostile_grammars() -> list[str]:
    """Each costs what it may before it is refused or served."""
    chain = "\n".join([*(f'r{n} ::= r{n + 1} r{n + 1} | "a"' for n in range(2000)), 'r2000 ::= "b"', "root ::= r0"])
    schemas: list[Any] = [
        {"enum": list(range(100_000))},
        {"type": "object", "properties": {f"p{number}": {} for number in range(1000)}},
        {"type": "string", "maxLength": 10_000},
        {"type": "array", "minItems": 1_000_000},
        {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
        {"$ref": "#"},
        {"oneOf": [{"required": [f"k{number}"]} for number in range(250)]},
        {"anyOf": [{"type": "object", "properties": {f"k{number}": {"type": "string"}}} for number in range(2000)]},
    ]
    nested = '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000
    return [chain, nested, *map(json.dumps, schemas)]


def measure_hostile(bench: Bench) -> dict[str, Any]:
    attempts = count()
    texts = hostile_grammars()

    def attack() -> None:
        """One more, once the one before is done with."""
        if bench.loop.stats().waiting_requests == 0:
            number = next(attempts)
            text = texts[number % len(texts)]
            kind = GrammarKind.EBNF if text.startswith("r") else GrammarKind.JSON_SCHEMA
            fresh = text + "\n" * (number // len(texts) + 1)  # another text is another grammar
            bench.submit(GrammarSource(kind, fresh), 8, domain="hostile")

    quiet: list[Step] = []
    attacked: list[Step] = []
    for _ in range(ROUNDS):
        for found, between in ((quiet, lambda: None), (attacked, attack)):
            bench.submit(None, 150)
            bench.step_times(steps=5)
            found.append(median_of(bench.step_times(between, steps=100)))
            bench.drain()
    return {
        "attempts": next(attempts),
        "quiet": list(map(asdict, quiet)),
        "attacked": list(map(asdict, attacked)),
        "ratio": ratio(attacked, quiet),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(make_model(Path(folder)))
        masks = measure_masks(bench)
        hostile = measure_hostile(bench)
        bench.engine.grammars.close_all()
    table = Table("measure", "wall", "cpu of the loop")
    for name, found in masks["ratio"].items():
        table.add_row(
            f"{BATCH} grammars of {name}, beside {BATCH} without", f"{found['wall']:.3f} x", f"{found['cpu']:.3f} x"
        )
    table.add_row(
        "a token under attack, beside quiet", f"{hostile['ratio']['wall']:.3f} x", f"{hostile['ratio']['cpu']:.3f} x"
    )
    Console().print(table)
    if options.json is not None:
        record = {
            "date": datetime.now(UTC).isoformat(),
            "machine": describe_machine(),
            "masks": masks,
            "hostile": hostile,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
