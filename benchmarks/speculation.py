"""Tokens per step and time by drafter, on the demo model: agent sessions, chat, JSON; batch 1, 8 and 32.

    python benchmarks/speculation.py [--sets agent,chat,json] [--batches 1,8,32] [--rounds 7]
        [--drafters lookup,model,both,head,head-both] [--draft-model demo/draft] [--draft-head demo/head] [--json OUT]

Engines stand side by side in one process, alike but for their drafters, and one of them drafts nothing. They serve the
same talks in turn: in every round talks that none has seen, each round begins with another engine. A round is as many
sessions at once as the batch has places, each with its turns one after the other, and it is timed whole: admission,
prefill, decoding, drafting, over what the prefix cache holds of the sessions' earlier turns. The ratio is that of two
times of one round; its median, least and greatest are told. What all answer must be equal, token for token, or the
benchmark fails.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import describe_machine
from rich.console import Console
from rich.table import Table
from speculation_sets import DEMO_MODEL, SETS, Talk, TalkTurn, as_request, talks

from graftwork.engine.build.devices import keep_freed_memory
from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineStats
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.messages import SubmitRequest
from graftwork.platform.errors import NotFound
from graftwork.platform.ids import RequestId

DRAFT_MODEL, DRAFT_HEAD = DEMO_MODEL.parent / "draft", DEMO_MODEL.parent / "head"
WARM_UP_ROUNDS = 1
TALKS_PER_ROUND = 8
"""At least; and one for every place in the batch."""


class NoAdapters:
    """The sets are the base model's."""

    def load(self, digest: str) -> AdapterWeights:
        raise NotFound(f"There is no adapter {digest}.")


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One engine's round."""

    wall_s: float
    processor_s: float
    steps: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    model_drafted_tokens: int
    """Those of `drafted_tokens` that the draft model or the draft head has guessed."""
    model_accepted_tokens: int


OFF = "off"
DRAFTERS = ("lookup", "model", "both", "head", "head-both")
"""`both` is the draft model beside the lookups, `head-both` the draft head beside them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set at one batch size, with one choice of drafters and without drafts."""

    set_name: str
    batch: int
    drafter: str
    with_drafts: list[RoundTime]
    without: list[RoundTime]

    @property
    def ratios(self) -> list[float]:
        """Time without drafts over time with them, by round: above 1, drafts are faster."""
        return [off.wall_s / on.wall_s for on, off in zip(self.with_drafts, self.without, strict=True)]

    @property
    def processor_ratios(self) -> list[float]:
        """The same in processor time, which other programs on a busy machine disturb less."""
        return [off.processor_s / on.processor_s for on, off in zip(self.with_drafts, self.without, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence makes in a step that makes any for it; 1 without drafts."""
        generated = sum(one.generated_tokens for one in self.with_drafts)
        return generated / (generated - sum(one.accepted_tokens for one in self.with_drafts))

    @property
    def acceptance(self) -> float:
        drafted = sum(one.drafted_tokens for one in self.with_drafts)
        return sum(one.accepted_tokens for one in self.with_drafts) / drafted if drafted else 0.0

    def figures(self) -> dict[str, Any]:
        spread = {"median": statistics.median, "least": min, "greatest": max}
        return {
            "set": self.set_name,
            "batch": self.batch,
            "drafter": self.drafter,
            "tokens_per_step": round(self.tokens_per_step, 3),
            "acceptance": round(self.acceptance, 3),
            "wall_ratio": {name: round(of(self.ratios), 3) for name, of in spread.items()},
            "processor_ratio": {name: round(of(self.processor_ratios), 3) for name, of in spread.items()},
            "with_drafts": [asdict(one) for one in self.with_drafts],
            "without": [asdict(one) for one in self.without],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated: agent, chat, json")
    parser.add_argument("--batches", default="1,8,32", help="comma-separated: sessions at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drafts", type=int, default=EngineConfig(DEMO_MODEL).max_draft_tokens, help="at most, a step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="comma-separated")
    parser.add_argument("--draft-model", type=Path, default=DRAFT_MODEL)
    parser.add_argument("--draft-head", type=Path, default=DRAFT_HEAD)
    options = parser.parse_args()
    before = describe_machine()
    comparisons: list[Comparison] = []
    folders = options.draft_model, options.draft_head
    drafters = {name: settings_of(name, options.drafts, *folders) for name in options.drafters.split(",")}
    for name in options.sets.split(","):
        for batch in map(int, options.batches.split(",")):
            comparisons += (found := compare(name, batch, options.rounds, drafters))
            show(found, title=len(found) == len(comparisons))
            if options.json:
                write(options.json, options.drafts, before, comparisons)
    return 0


def write(path: Path, max_draft_tokens: int, before: dict[str, Any], comparisons: list[Comparison]) -> None:
    """All that is measured so far, with the machine and its load before and after."""
    report = {
        "benchmark": "speculation",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": before | {"load_average_after": describe_machine()["load_average"]},
        "max_draft_tokens": max_draft_tokens,
        "figures": [one.figures() for one in comparisons],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def settings_of(drafter: str, max_draft_tokens: int, draft_model: Path, draft_head: Path) -> dict[str, Any]:
    """The engine settings of one choice of drafters."""
    if drafter not in (OFF, *DRAFTERS):
        raise SystemExit(f"There is no choice {drafter} of drafters: give some of {', '.join(DRAFTERS)}.")
    if drafter == OFF:
        return {"max_draft_tokens": 0}
    return {
        "max_draft_tokens": max_draft_tokens,
        "draft_from_texts": drafter not in ("model", "head"),
        "draft_model": draft_model if drafter in ("model", "both") else None,
        "draft_head": draft_head if drafter in ("head", "head-both") else None,
    }


def open_engine(batch: int, settings: dict[str, Any]) -> Engine:
    config = EngineConfig(model=DEMO_MODEL, device="cpu", max_running=batch, **settings)
    keep_freed_memory()  # as every engine process does
    return build_engine(config, lambda _: NoAdapters())


def compare(name: str, batch: int, num_rounds: int, drafters: dict[str, dict[str, Any]]) -> list[Comparison]:
    """Raises SystemExit where drafts changed an answer."""
    wanted = {OFF: {"max_draft_tokens": 0}} | drafters
    engines = {drafter: open_engine(batch, settings) for drafter, settings in wanted.items()}
    times: dict[str, list[RoundTime]] = {drafter: [] for drafter in engines}
    for number in range(num_rounds + WARM_UP_ROUNDS):
        own_talks = talks(name, max(batch, TALKS_PER_ROUND), seed=number)
        answers = {}
        order = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
        for drafter in order:
            took, answers[drafter] = serve(engines[drafter], Room(name, own_talks, batch, number))
            times[drafter].append(took)
        for drafter in drafters:
            if answers[drafter] != answers[OFF]:
                raise SystemExit(f"{name} at batch {batch}: {drafter} changed an answer in round {number}.")
    kept = {drafter: found[WARM_UP_ROUNDS:] for drafter, found in times.items()}
    return [Comparison(name, batch, drafter, kept[drafter], kept[OFF]) for drafter in drafters]


def serve(engine: Engine, room: "Room") -> tuple[RoundTime, dict[tuple[int, int], list[int]]]:
    """Serve a round and time it; also what was answered, turn by turn."""
    before = engine.loop.stats()
    wall, processor = time.perf_counter(), time.thread_time()
    room.serve(engine)
    wall, processor = time.perf_counter() - wall, time.thread_time() - processor
    after = engine.loop.stats()
    took = RoundTime(
        wall_s=wall,
        processor_s=processor,
        steps=after.steps - before.steps,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        drafted_tokens=after.drafted_tokens - before.drafted_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        model_drafted_tokens=model_drafted(after) - model_drafted(before),
        model_accepted_tokens=after.model_accepted_drafts - before.model_accepted_drafts,
    )
    return took, room.answers


def model_drafted(stats: EngineStats) -> int:
    return stats.model_accepted_drafts + stats.model_rejected_drafts


class Room:
    """As many talks at once as there are places; who has ended makes way for the next."""

    def __init__(self, name: str, own_talks: list[Talk], batch: int, seed: int) -> None:
        self.answers: dict[tuple[int, int], list[int]] = {}
        """By talk and turns left in it."""
        self._name = name
        self._batch = batch
        self._waiting = deque((seed * len(own_talks) + number, deque(talk)) for number, talk in enumerate(own_talks))
        self._answering: dict[RequestId, tuple[list[int], Callable[[], None]]] = {}
        self._submit: Callable[[EngineRequest], None]

    def serve(self, engine: Engine) -> None:
        """Until every talk has ended."""
        self._submit = lambda request: engine.loop.take(SubmitRequest(request, self._hear))
        for _ in range(self._batch):
            self._next_talk()
        while self._answering:
            engine.loop.step()

    def _next_talk(self) -> None:
        if self._waiting:
            self._next_turn(*self._waiting.popleft())

    def _next_turn(self, number: int, turns: deque[TalkTurn]) -> None:
        if not turns:
            self._next_talk()
            return
        request = as_request(self._name, turns.popleft(), number)
        answer = self.answers[number, len(turns)] = []
        self._answering[request.request_id] = (answer, lambda: self._next_turn(number, turns))
        self._submit(request)

    def _hear(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answer, go_on = self._answering[output.request_id]
            if isinstance(output.event, TokensGenerated):
                answer += output.event.token_ids
            elif output.is_last:
                del self._answering[output.request_id]
                go_on()


def show(comparisons: list[Comparison], *, title: bool) -> None:
    """One line each."""
    table = Table(
        "set", "batch", "drafter", "tokens a step", "accepted", "time without / with", "in processor time", box=None
    )
    table.show_header = title
    for one in comparisons:
        walls, processors = sorted(one.ratios), sorted(one.processor_ratios)
        table.add_row(
            f"{one.set_name:<6}",
            f"{one.batch:>5}",
            f"{one.drafter:<7}",
            f"{one.tokens_per_step:>13.2f}",
            f"{one.acceptance:>8.0%}",
            f"{statistics.median(walls):.2f} ({walls[0]:.2f} to {walls[-1]:.2f})",
            f"{statistics.median(processors):.2f} ({processors[0]:.2f} to {processors[-1]:.2f})",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
