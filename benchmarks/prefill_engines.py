"""Do engines that only prefill pay? Compares fleets of the same size, in simulated time.

    python -m benchmarks.prefill_engines [--scene agents|documents] [--engines 4] [--sessions 200] [--seeds 3]
        [--gigabytes-per-s 1.25 --gigabytes-per-s 25] [--load 0.5 --load 0.7] [--json OUT]

The agents, the engines and the placement are those of benchmarks/placement.py. In a fleet with P prefill engines, a turn
with more than `_LEAST_TOKENS` uncached tokens is computed by one of them up to its first token. Its KV then goes to the
engine of its session, which decodes. A prefill engine keeps the prefixes that it has computed, and must have the answers
of a session as well, so what it lacks of the history comes from the session's engine over the same link.

`agents` are those of placement.py. `documents` are prompts of 6,000 tokens at the median with answers of 60, each of
another document, so nothing is cached, without adapters. They arrive at a rate that is given as a share of what engines
can compute that do both (`--load`). This is where engines that only prefill should pay most.

Each fleet whose engines do both is shown twice: with steps of 1,024 tokens, and with steps that are as short beside
decoding requests as `_TARGET_ITL_S` says, which is what `target_itl_ms` does to an engine. Engines that decode for others
have such short steps, too.

Shown: answer tokens a second, the time to the first token, the inter-token time, and the pause between the first token
and the second, which is where a hand-over shows.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random

from benchmarks.machine import describe_machine
from benchmarks.placement import (
    _PAGE,
    _SELF,
    _STEP_S,
    _STEP_TOKENS,
    _TOKEN_S,
    Engine,
    Request,
    Scene,
    Session,
    Tally,
    World,
)
from rich.console import Console
from rich.table import Table

from graftwork.engine.fleet.placement import Demand, LeastSeconds

_LEAST_TOKENS = 128
"""A turn with fewer uncached tokens is computed by the engine of its session."""
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""The KV of one token: keys and values of 32 layers with 8 heads of 128 in 16 bits."""
_TARGET_ITL_S = 0.025
"""The seconds of a step beside decoding requests, where they are kept short."""


@dataclass(slots=True)
class Times(Tally):
    """What happened, with the times between tokens."""

    inter_token_s: list[float] = field(default_factory=list)
    second_token_s: list[float] = field(default_factory=list)
    """From the first token of an answer to the second."""


@dataclass(slots=True)
class Turn(Request):
    """A turn, which may go from one engine to another."""

    on_ready: Callable[[float], None] | None = None
    """Is called when the prompt is computed, if another engine decodes."""
    first_at: float | None = None
    is_handed: bool = False
    """Whether its KV has come from another engine."""


class RoleEngine(Engine):
    """An engine that may be one half of a pair."""

    def _uncached(self, request: Request) -> int:
        return 1 if isinstance(request, Turn) and request.is_handed else super()._uncached(request)

    def step(self, now: float, tally: Tally) -> tuple[float, list[Request]]:
        assert isinstance(tally, Times)
        decoding, num_first = [*self.decoding], len(tally.first_token_s)
        seconds, ended = super().step(now, tally)
        tally.inter_token_s += [seconds] * len(decoding)
        for turn in decoding:
            assert isinstance(turn, Turn)
            if turn.first_at is not None:
                tally.second_token_s.append(now + seconds - turn.first_at)
                turn.first_at = None
        del tally.first_token_s[num_first:]
        before = {id(one) for one in decoding}
        for turn in {id(one): one for one in (*self.decoding, *ended) if id(one) not in before}.values():
            assert isinstance(turn, Turn)
            if turn.is_handed and turn.first_at is not None:
                tally.second_token_s.append(now + seconds - turn.first_at)
                turn.first_at = None
            else:
                tally.first_token_s.append(now + seconds - turn.sent_at)
                turn.first_at = now + seconds
        return seconds, ended


class TwoRoles(World):
    """A fleet whose first engines only prefill."""

    def __init__(self, scene: Scene, num_prefill: int, bytes_per_s: float, seed: int) -> None:
        engines = [
            RoleEngine(f"e{n}", scene, scene.memory_tokens, scene.resident_adapters) for n in range(scene.engines)
        ]
        super().__init__(scene, engines, LeastSeconds(Random(seed)), seed)
        self.tally: Times = Times()
        self._prefillers = [engine.name for engine in engines[:num_prefill]]
        self._decoders = [engine.name for engine in engines[num_prefill:]]
        self._token_s = _TOKEN_BYTES / bytes_per_s if bytes_per_s else 0.0

    def _turn(self, session: Session, now: float) -> None:
        session.extend(int(session.random.uniform(0.5, 1.5) * self._scene.turn_tokens))
        answer = max(int(session.random.uniform(0.5, 1.5) * self._scene.answer_tokens), 2)
        turn = Turn(session, session.keys, session.num_tokens, answer, now)
        home = self._choose(turn, self._decoders)
        session.engine = home
        uncached = session.num_tokens - self._engines[home].cache.cached_tokens(_SELF, session.keys.keys)
        if not self._prefillers or uncached <= _LEAST_TOKENS:
            self._send(turn, home, now)
            return
        name = self._choose(turn, self._prefillers)
        known = self._engines[name].cache.cached_tokens(_SELF, session.keys.keys)
        fetched = max(session.num_tokens - uncached - known, 0)  # what the session's engine has and this one lacks
        if fetched:
            self._engines[name].cache.note(_SELF, session.keys.keys[: (session.num_tokens - uncached) // 64])
        turn.answer_tokens, turn.on_ready = 1, self._hand_over(turn, answer, home, uncached)
        self._at(now + fetched * self._token_s, lambda at: self._send(turn, name, at))

    def _hand_over(self, turn: Turn, answer: int, home: str, tokens: int) -> Callable[[float], None]:
        def ready(now: float) -> None:
            self._prefixes.note(home, turn.keys.keys)
            self._engines[home].cache.note(_SELF, turn.keys.keys)
            handed = Turn(turn.session, turn.keys, turn.prompt_tokens + 1, answer - 1, turn.sent_at, is_handed=True)
            handed.first_at = now
            self._at(now + tokens * self._token_s, lambda at: self._send(handed, home, at))

        return ready

    def _ender(self, engine: Engine, request: Request) -> Callable[[float], None]:
        if isinstance(request, Turn) and request.on_ready is not None:
            return request.on_ready
        if isinstance(request, Turn) and request.is_handed:
            request.made += 1  # the first token, which the prefill engine has made
        return super()._ender(engine, request)

    def _choose(self, turn: Turn, names: Sequence[str]) -> str:
        pages = -(-turn.prompt_tokens // _PAGE)
        demand = Demand(turn.prompt_tokens, pages, _PAGE, True, b"%d" % turn.session.number)
        return self._policy.choose(demand, [self._candidate(name, turn) for name in names]).replica_id

    def _send(self, turn: Turn, name: str, now: float) -> None:
        engine = self._engines[name]
        self._sent_tokens[name] += engine._uncached(turn)
        self._sent_requests[name] += 1
        self._prefixes.note(name, turn.keys.keys)
        engine.waiting.append(turn)
        if name not in self._stepping:
            self._stepping.add(name)
            self._at(now, self._stepper(engine))


@dataclass(frozen=True, slots=True)
class Shape:
    """A fleet: how many of its engines only prefill, their link, and how long steps may be beside decoding requests."""

    prefill_engines: int = 0
    gigabytes_per_s: float = 0.0
    step_tokens: int = _STEP_TOKENS


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed."""

    scene: str
    load: float
    """The share of its capacity at which requests arrive; 0 if they wait for answers."""
    sessions: int
    shape: Shape
    seed: int
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    inter_token_p50_s: float
    inter_token_p99_s: float
    second_token_p50_s: float
    second_token_p99_s: float


def scene_of(name: str, engines: int, sessions: int, load: float) -> Scene:
    """Returns a scene. `load` is for documents alone."""
    if name == "agents":
        return Scene(engines=engines, sessions=sessions)
    documents = Scene(engines, 1, sessions, turns=1, system_tokens=0, turn_tokens=6000, answer_tokens=60)
    tokens = documents.turn_tokens + documents.answer_tokens
    rate = load * engines / (tokens * (_TOKEN_S + _STEP_S / _STEP_TOKENS))
    return replace(documents, tool_s=sessions / rate / 2)  # all arrive within twice that time


def shapes_of(scene: Scene, rates: Sequence[float]) -> list[Shape]:
    """Returns the fleets that are compared."""
    short = round((_TARGET_ITL_S - _STEP_S) / _TOKEN_S)
    halves = [Shape(prefill, rate, short) for prefill in range(1, scene.engines) for rate in rates]
    return [Shape(), Shape(step_tokens=short), *halves]


def simulate(name: str, scene: Scene, shape: Shape, load: float, seed: int) -> Figures:
    world = replace(scene, step_tokens=shape.step_tokens)
    tally = TwoRoles(world, shape.prefill_engines, shape.gigabytes_per_s * 1e9, seed).run()
    assert isinstance(tally, Times)
    quantiles = [
        sorted(times)[int(len(times) * share)]
        for times in (tally.first_token_s, tally.inter_token_s, tally.second_token_s)
        for share in (0.5, 0.99)
    ]
    return Figures(name, load, scene.sessions, shape, seed, tally.answer_tokens / tally.ended_s, *quantiles)


def show(figures: Sequence[Figures], title: str) -> None:
    """Prints means over the seeds, and of the speed its range."""
    columns = ("tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "second token p50", "p99")
    table = Table("prefill engines", "GB/s", "step", *columns)
    for shape in dict.fromkeys(one.shape for one in figures):
        own = [one for one in figures if one.shape == shape]
        names = [name for name in asdict(own[0]) if name.endswith("_s") and name != "tokens_per_s"]
        times = [statistics.mean(getattr(one, name) for one in own) for name in names]
        speeds = [one.tokens_per_s for one in own]
        speed = f"{statistics.mean(speeds):.0f} ({min(speeds):.0f}–{max(speeds):.0f})"
        rate = f"{shape.gigabytes_per_s:g}" if shape.prefill_engines else "–"
        cells = (str(shape.prefill_engines), rate, str(shape.step_tokens), speed)
        table.add_row(*cells, *(f"{1000 * seconds:.0f} ms" for seconds in times))
    console = Console(width=150)
    console.print(title)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", choices=("agents", "documents"), default="agents")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sessions", type=int, action="append", help="agents or documents; may be repeated")
    parser.add_argument("--gigabytes-per-s", type=float, action="append", help="of the link; may be repeated")
    parser.add_argument("--load", type=float, action="append", help="of documents; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run here")
    arguments = parser.parse_args()
    is_closed = arguments.scene == "agents"
    runs: list[Figures] = []
    for sessions in arguments.sessions or ([200, 400] if is_closed else [600]):
        for load in [0.0] if is_closed else arguments.load or [0.5, 0.7, 0.85]:
            scene = scene_of(arguments.scene, arguments.engines, sessions, load)
            shapes = shapes_of(scene, arguments.gigabytes_per_s or [1.25, 25.0])
            found = [
                simulate(arguments.scene, scene, shape, load, seed)
                for shape in shapes
                for seed in range(arguments.seeds)
            ]
            show(found, f"{scene.engines} engines, {sessions} {arguments.scene}" + (f" at {load:g}" if load else ""))
            runs += found
    if arguments.json:
        record = {"machine": describe_machine(), "runs": [asdict(one) for one in runs]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
