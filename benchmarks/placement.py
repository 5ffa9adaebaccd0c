"""Which engine should get a request? Compares ways to place agents' requests on several engines, in simulated time.

    python -m benchmarks.placement [--engines 4] [--adapters 40] [--sessions 200] [--turns 12] [--seeds 3] [--json OUT]

Each session is an agent under one adapter: a system prompt that all sessions of the adapter share, then turns that each
append tool results, ask for some tokens, and wait for a tool. A session begins its next turn when its tool has answered,
so slow engines also slow their agents. An engine computes steps of at most `_STEP_TOKENS` tokens, decodes first, and
keeps what fits into its memory by recency. The policies are those of engine/fleet/placement.py, with the gateway's own
map of prefixes and with reports that are a quarter of a second old.

The rows: one engine, one engine with the memory of all, and all engines under each policy. Goals: the cached share is at
least 0.95 of that of one engine with the memory of all, and the throughput at least 3.5 times that of one engine.
"""

import argparse
import heapq
import json
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from benchmarks.machine import describe_machine
from rich.console import Console
from rich.table import Table

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.fleet.placement import Candidate, Demand, HashRing, LeastSeconds, PlacementPolicy, RoundRobin
from graftwork.engine.fleet.prefix_map import BlockKeys, PrefixMap
from graftwork.platform.ids import IsolationDomain

_STEP_TOKENS = 1024
_STEP_S, _TOKEN_S = 0.008, 0.0001
"""A step's seconds: fixed, and for each token. About an 8 B model on one GPU."""
_MAX_RUNNING = 64
_REPORT_S = 0.25
_ADAPTER_LOAD_S = 0.1
_PAGE = 16
_SELF = "self"


@dataclass(frozen=True, slots=True)
class Scene:
    """The load, and one engine's sizes."""

    engines: int = 4
    adapters: int = 40
    sessions: int = 200
    turns: int = 12
    system_tokens: int = 1500
    turn_tokens: int = 350
    answer_tokens: int = 120
    tool_s: float = 1.0
    """The mean seconds of a tool."""
    memory_tokens: int = 300_000
    """Tokens of KV that one engine keeps."""
    resident_adapters: int = 16
    step_tokens: int = _STEP_TOKENS
    """The most tokens of a step in which some requests decode; other steps have `_STEP_TOKENS`."""


@dataclass(slots=True)
class Request:
    """One turn under way."""

    session: "Session"
    keys: BlockKeys
    prompt_tokens: int
    answer_tokens: int
    sent_at: float
    uncached: int = 0
    made: int = 0


@dataclass(slots=True)
class Session:
    """One agent."""

    number: int
    adapter: int
    random: Random
    turns_left: int
    keys: BlockKeys
    num_tokens: int = 0
    engine: str | None = None

    def extend(self, num_tokens: int) -> None:
        """Adds tokens that no other session has."""
        start = 1_000_000 * (self.number + 1) + self.num_tokens
        self.keys.extend(range(start, start + num_tokens))
        self.num_tokens += num_tokens


@dataclass(slots=True)
class Tally:
    """What happened in a run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0


class Engine:
    """One simulated engine."""

    def __init__(self, name: str, scene: Scene, memory_tokens: int, resident_adapters: int) -> None:
        self.name = name
        self._scene = scene
        self.cache = PrefixMap()
        self.cache.set_room(_SELF, memory_tokens)
        self._memory_tokens = memory_tokens
        self._num_resident = resident_adapters
        self.resident: OrderedDict[int, float] = OrderedDict()
        """By adapter, when its load ends; the least recently used first."""
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.decoding: list[Request] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    def report(self) -> Candidate:
        """What the engine says of itself."""
        held = sum(one.prompt_tokens + one.made for one in (*self.prefilling, *self.decoding))
        queued = sum(one.uncached for one in self.prefilling) + sum(self._uncached(one) for one in self.waiting)
        free = max(self._memory_tokens - held, 0) // _PAGE
        return Candidate(
            self.name, 0, queued, free, self.num_requests, prefill_token_s=_TOKEN_S + _STEP_S / _STEP_TOKENS
        )

    def _uncached(self, request: Request) -> int:
        return max(request.prompt_tokens - self.cache.cached_tokens(_SELF, request.keys.keys), 1)

    def step(self, now: float, tally: Tally) -> tuple[float, list[Request]]:
        """Computes one step. Returns its seconds and the requests that it has ended."""
        self._admit(now, tally)
        tokens, ended, first = len(self.decoding), list[Request](), list[Request]()
        room = (self._scene.step_tokens if self.decoding else _STEP_TOKENS) - tokens
        while self.prefilling and room > 0:
            request = self.prefilling[0]
            part = min(room, request.uncached)
            request.uncached -= part
            room, tokens = room - part, tokens + part
            if request.uncached:
                break
            first.append(self.prefilling.popleft())
        seconds = _STEP_S + tokens * _TOKEN_S
        for request in (*self.decoding, *first):
            request.made += 1
            tally.answer_tokens += 1
            if request.made == request.answer_tokens:
                ended.append(request)
        for request in first:
            self.cache.note(_SELF, request.keys.keys)
            tally.first_token_s.append(now + seconds - request.sent_at)
        self.decoding = [one for one in (*self.decoding, *first) if one.made < one.answer_tokens]
        return seconds, ended

    def _admit(self, now: float, tally: Tally) -> None:
        for _ in range(len(self.waiting)):
            if len(self.prefilling) + len(self.decoding) >= _MAX_RUNNING:
                return
            request = self.waiting.popleft()
            adapter = request.session.adapter
            if not self._has(adapter, now):
                self.waiting.append(request)
                continue
            request.uncached = self._uncached(request)
            tally.prompt_tokens += request.prompt_tokens
            tally.cached_tokens += request.prompt_tokens - request.uncached
            self.prefilling.append(request)

    def _has(self, adapter: int, now: float) -> bool:
        """Whether an adapter can be used. If not, loads it, if the adapters that are in use or loaded leave room."""
        if adapter not in self.resident:
            used = {one.session.adapter for one in (*self.prefilling, *self.decoding)}
            idle = [one for one, ready_at in self.resident.items() if one not in used and ready_at <= now]
            if len(self.resident) >= self._num_resident:
                if not idle:
                    return False
                del self.resident[idle[0]]
            self.resident[adapter] = now + _ADAPTER_LOAD_S
        self.resident.move_to_end(adapter)
        return self.resident[adapter] <= now


class World:
    """Engines, sessions and one gateway, in simulated time."""

    def __init__(self, scene: Scene, engines: Sequence[Engine], policy: PlacementPolicy, seed: int) -> None:
        self._scene = scene
        self._engines = {engine.name: engine for engine in engines}
        self._policy = policy
        self._random = Random(seed)
        self._prefixes = PrefixMap()
        for engine in engines:
            self._prefixes.set_room(engine.name, scene.memory_tokens)
        self._reports = {engine.name: engine.report() for engine in engines}
        self._resident: dict[str, frozenset[int]] = dict.fromkeys(self._engines, frozenset())
        self._sent_tokens = dict.fromkeys(self._engines, 0)
        self._sent_requests = dict.fromkeys(self._engines, 0)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._stepping: set[str] = set()
        self._open = 0
        self.tally = Tally()

    def run(self) -> Tally:
        for number in range(self._scene.sessions):
            self._at(self._random.uniform(0, 2 * self._scene.tool_s), self._opener(number))
        self._at(_REPORT_S, self._report)
        self._open = self._scene.sessions
        while self._events and self._open:
            now, _, act = heapq.heappop(self._events)
            act(now)
            self.tally.ended_s = now
        return self.tally

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _opener(self, number: int) -> Callable[[float], None]:
        def begin(now: float) -> None:
            adapter = min(int(self._random.paretovariate(1.0)) - 1, self._scene.adapters - 1)
            if self._random.random() < 0.5:
                adapter = self._random.randrange(self._scene.adapters)
            keys = BlockKeys(IsolationDomain(b"tenant"), (AdapterUse(f"sha256:{adapter}"),))
            session = Session(number, adapter, Random(self._random.random()), self._scene.turns, keys)
            keys.extend(range(adapter * 10_000, adapter * 10_000 + self._scene.system_tokens))
            session.num_tokens = self._scene.system_tokens
            self._turn(session, now)

        return begin

    def _turn(self, session: Session, now: float) -> None:
        session.extend(int(session.random.uniform(0.5, 1.5) * self._scene.turn_tokens))
        answer = int(session.random.uniform(0.5, 1.5) * self._scene.answer_tokens)
        request = Request(session, session.keys, session.num_tokens, max(answer, 1), now)
        candidates = [self._candidate(name, request) for name in self._engines]
        demand = Demand(session.num_tokens, -(-session.num_tokens // _PAGE), _PAGE, True, b"%d" % session.number)
        chosen = self._policy.choose(demand, candidates)
        engine = self._engines[chosen.replica_id]
        session.engine = engine.name
        self._sent_tokens[engine.name] += max(session.num_tokens - chosen.cached_tokens, 1)
        self._sent_requests[engine.name] += 1
        self._prefixes.note(engine.name, session.keys.keys)
        engine.waiting.append(request)
        if engine.name not in self._stepping:
            self._stepping.add(engine.name)
            self._at(now, self._stepper(engine))

    def _candidate(self, name: str, request: Request) -> Candidate:
        report = self._reports[name]
        return Candidate(
            name,
            cached_tokens=self._prefixes.cached_tokens(name, request.keys.keys),
            queued_tokens=report.queued_tokens + self._sent_tokens[name],
            free_pages=report.free_pages,
            requests=report.requests + self._sent_requests[name],
            has_adapters=request.session.adapter in self._resident[name],
            prefill_token_s=report.prefill_token_s,
            has_session=request.session.engine == name,
        )

    def _report(self, now: float) -> None:
        for name, engine in self._engines.items():
            self._reports[name], self._resident[name] = engine.report(), frozenset(engine.resident)
            self._sent_tokens[name] = self._sent_requests[name] = 0
        self._at(now + _REPORT_S, self._report)

    def _stepper(self, engine: Engine) -> Callable[[float], None]:
        def step(now: float) -> None:
            if not engine.is_busy:
                self._stepping.discard(engine.name)
                return
            seconds, ended = engine.step(now, self.tally)
            for request in ended:
                self._at(now + seconds, self._ender(engine, request))
            self._at(now + seconds, step)

        return step

    def _ender(self, engine: Engine, request: Request) -> Callable[[float], None]:
        def end(now: float) -> None:
            session = request.session
            session.extend(request.made)
            engine.cache.note(_SELF, session.keys.keys)
            self._prefixes.note(engine.name, session.keys.keys)
            session.turns_left -= 1
            if session.turns_left:
                self._at(now + session.random.expovariate(1 / self._scene.tool_s), lambda at: self._turn(session, at))
            else:
                self._open -= 1

        return end


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed."""

    policy: str
    seed: int
    cached_share: float
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float


POLICIES: dict[str, Callable[[int], PlacementPolicy]] = {
    "least seconds": lambda seed: LeastSeconds(Random(seed)),
    "consistent hashing": lambda seed: HashRing(),
    "round robin": lambda seed: RoundRobin(),
}


def simulate(scene: Scene, seed: int, policy: str | None, memory_factor: int = 1) -> Figures:
    """Runs one scene; `policy` of None has one engine, with `memory_factor` times the memory."""
    num_engines = 1 if policy is None else scene.engines
    engines = [
        Engine(f"e{n}", scene, memory_factor * scene.memory_tokens, memory_factor * scene.resident_adapters)
        for n in range(num_engines)
    ]
    chosen = POLICIES[policy](seed) if policy is not None else RoundRobin()
    tally = World(scene, engines, chosen, seed).run()
    times = sorted(tally.first_token_s)
    names = {1: "one engine"}
    return Figures(
        policy or names.get(memory_factor, f"one engine, {memory_factor} x memory"),
        seed,
        tally.cached_tokens / tally.prompt_tokens,
        tally.answer_tokens / tally.ended_s,
        times[len(times) // 2],
        times[len(times) * 99 // 100],
    )


def compare(scene: Scene, seeds: int) -> list[Figures]:
    """Runs all rows with each seed."""
    found = []
    for seed in range(seeds):
        found += [simulate(scene, seed, None), simulate(scene, seed, None, scene.engines)]
        found += [simulate(scene, seed, policy) for policy in POLICIES]
    return found


def show(figures: Sequence[Figures], scene: Scene) -> None:
    """Prints means over the seeds, and the ratios that the goals are about."""
    rows = {name: [one for one in figures if one.policy == name] for name in dict.fromkeys(f.policy for f in figures)}
    one, large = (list(rows.values())[index] for index in (0, 1))
    table = Table("placement", "cached share", "of one large", "tokens/s", "of one", "TTFT p50", "p99")
    for name, own in rows.items():
        share = statistics.mean(figure.cached_share for figure in own)
        speed = statistics.mean(figure.tokens_per_s for figure in own)
        of_large = [a.cached_share / b.cached_share for a, b in zip(own, large, strict=True)]
        of_one = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, one, strict=True)]
        table.add_row(
            name,
            f"{share:.3f}",
            f"{statistics.mean(of_large):.3f} ({min(of_large):.3f}–{max(of_large):.3f})",
            f"{speed:.0f}",
            f"{statistics.mean(of_one):.2f} ({min(of_one):.2f}–{max(of_one):.2f})",
            f"{statistics.mean(figure.first_token_p50_s for figure in own):.2f} s",
            f"{statistics.mean(figure.first_token_p99_s for figure in own):.2f} s",
        )
    Console(width=120).print(f"{scene.engines} engines, {scene.adapters} adapters, {scene.sessions} sessions")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("engines", "adapters", "sessions", "turns"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Scene(), name))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run here")
    arguments = parser.parse_args()
    scene = Scene(arguments.engines, arguments.adapters, arguments.sessions, arguments.turns)
    figures = compare(scene, arguments.seeds)
    show(figures, scene)
    if arguments.json:
        runs = [asdict(one) for one in figures]
        arguments.json.write_text(
            json.dumps({"machine": describe_machine(), "scene": asdict(scene), "runs": runs}, indent=1)
        )


if __name__ == "__main__":
    main()
