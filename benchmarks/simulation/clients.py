"""Who sends requests to a simulated engine: streams of independent requests, closed loops, and agent programs.

Owns what is sent and when. Never looks at the scheduler: a client sees only the outputs of its own requests.
The same seed gives the same requests under every policy; those of closed loops depend on when answers come.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Protocol

from benchmarks.agent_habits import Lognormal
from benchmarks.simulation.engine import SimulatedEngine
from benchmarks.simulation.meter import Meter

from graftwork.engine.core.events import RequestFinished, RequestOutput, TokensGenerated
from graftwork.engine.core.requests import EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant as the engine sees it."""

    name: str
    weight: float = 1.0
    tier: ServiceTier = ServiceTier.DEFAULT

    @property
    def domain(self) -> IsolationDomain:
        return IsolationDomain(self.name.encode())


@dataclass(frozen=True, slots=True)
class Requests:
    """What the requests of one client are like; all counts in tokens."""

    prompt: Lognormal
    """What no other request begins with."""
    output: Lognormal
    prefixes: tuple[str, ...] = ()
    """Names of beginnings, of which each request has one at random; none means no shared beginning."""
    prefix_tokens: int = 0

    def mean_service(self, input_price: float, output_price: float) -> float:
        """Returns the price of a request of mean size, without its shared beginning."""
        return input_price * self.prompt.mean + output_price * self.output.mean


@dataclass(slots=True)
class World:
    """What clients live in."""

    engine: SimulatedEngine
    meter: Meter
    ends_at: float
    """When clients stop sending."""

    @property
    def now(self) -> float:
        return self.engine.timeline.now

    def send(
        self, tenant: Tenant, prompt: tuple[int, ...], output_tokens: int, use: SessionUse | None, answered: "Answered"
    ) -> None:
        """Submits a request. `answered` is called with all its tokens when it has ended, or None if it was refused."""
        request = EngineRequest(
            request_id=self.engine.new_id(),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            domain=tenant.domain,
            tier=tenant.tier,
            weight=tenant.weight,
            session=use,
        )
        tokens: list[int] = []
        self.meter.arrived(request, self.now)

        def listen(output: RequestOutput) -> None:
            self.meter.note(output, self.now)
            match output.event:
                case TokensGenerated(token_ids):
                    tokens.extend(token_ids)
                case RequestFinished():
                    answered((*prompt, *tokens))
                case GraftworkError():
                    answered(None)

        self.engine.submit(request, listen)


Answered = Callable[[tuple[int, ...] | None], None]


class Client(Protocol):
    """One source of requests."""

    tenant: Tenant

    def start(self, world: World) -> None:
        """Plans the first request. The client goes on by itself until the world ends."""
        ...


def token_ids(name: str, count: int) -> tuple[int, ...]:
    """Returns `count` token ids that begin at a place which depends on the name alone."""
    start = Random(name).randrange(1 << 31)
    return tuple(range(start, start + count))


def _prompt(requests: Requests, noise: Random, name: str) -> tuple[int, ...]:
    own = token_ids(name, requests.prompt.count(noise))
    if not requests.prefixes:
        return own
    return token_ids(noise.choice(requests.prefixes), requests.prefix_tokens) + own


@dataclass
class PoissonClient:
    """Sends requests at random times, whether earlier ones are answered or not."""

    tenant: Tenant
    requests: Requests
    per_s: float
    seed: int = 0

    def start(self, world: World) -> None:
        noise = Random(f"poisson {self.tenant.name} {self.seed}")
        at, number = noise.expovariate(self.per_s), 0
        while at < world.ends_at:
            name = f"{self.tenant.name}/{self.seed}/{number}"
            prompt, output = _prompt(self.requests, noise, name), self.requests.output.count(noise)
            world.engine.timeline.after(at, partial(world.send, self.tenant, prompt, output, None, _ignore))
            at, number = at + noise.expovariate(self.per_s), number + 1


def _ignore(tokens: tuple[int, ...] | None) -> None:
    """A client of an open stream does not care."""


@dataclass
class LoopingClient:
    """Keeps a number of requests outstanding: it sends one whenever another ends."""

    tenant: Tenant
    requests: Requests
    outstanding: int
    seed: int = 0

    def start(self, world: World) -> None:
        noise = Random(f"loop {self.tenant.name} {self.seed}")
        number = 0

        def send(tokens: tuple[int, ...] | None = None) -> None:
            nonlocal number
            if world.now >= world.ends_at:
                return
            number += 1
            prompt = _prompt(self.requests, noise, f"{self.tenant.name}/{self.seed}/{number}")
            world.send(self.tenant, prompt, self.requests.output.count(noise), None, again)

        def again(tokens: tuple[int, ...] | None) -> None:
            world.engine.timeline.after(0.0, send)

        for _ in range(self.outstanding):
            world.engine.timeline.after(0.0, send)


@dataclass(frozen=True, slots=True)
class Program:
    """What agent programs are like; all counts in tokens. Each turn's prompt is everything before it, and a little more."""

    turns: Lognormal
    prompt_tokens: int
    """The shared beginning of all programs of one tenant."""
    first: Lognormal
    appended: Lognormal
    """What a tool's answer adds."""
    output: Lognormal
    tool_s: Lognormal
    context_tokens: int
    """A program ends when its context is as long as this."""


CODING_PROGRAM = Program(
    turns=Lognormal(43, 0.6, most=200),
    prompt_tokens=22_000,
    first=Lognormal(45_000, 0.5, most=180_000),
    appended=Lognormal(1_100, 1.2, most=30_000),
    output=Lognormal(444, 0.9, most=8_000),
    tool_s=Lognormal(2.0, 1.4, most=120),
    context_tokens=400_000,
)
"""43 turns, 142,000 tokens in and 444 out at the median, as vLLM's AgentX traffic (quoted in vllm#57103)."""
SMALL_PROGRAM = replace(
    CODING_PROGRAM,
    turns=Lognormal(12, 0.5, most=40),
    prompt_tokens=6_000,
    first=Lognormal(300, 0.5),
    appended=Lognormal(250, 0.8, most=3_000),
    output=Lognormal(120, 0.6, most=600),
    tool_s=Lognormal(1.0, 1.0, most=30),
    context_tokens=40_000,
)
"""An agent for a few minutes over a shared prompt of 6,000 tokens."""


@dataclass
class AgentClient:
    """Runs a number of agent programs at a time; when one ends, another begins.

    The first programs begin somewhere in the middle, as in a system that has run for hours.
    """

    tenant: Tenant
    program: Program
    programs: int
    seed: int = 0

    def start(self, world: World) -> None:
        noise = Random(f"agents {self.tenant.name} {self.seed}")
        for number in range(self.programs):
            _ProgramRun(self, world, Random(noise.random()), f"{number}", skip_turns=noise.random()).begin()


class _ProgramRun:
    """One agent program after another, in one place."""

    def __init__(self, client: AgentClient, world: World, noise: Random, name: str, skip_turns: float) -> None:
        self._client = client
        self._world = world
        self._noise = noise
        self._name = f"{client.tenant.name}/{client.seed}/{name}"
        self._skip = skip_turns
        self._generation = 0
        self._key = SessionKey("")
        self._tokens: tuple[int, ...] = ()
        self._history_tokens = 0
        self._turns_left = 0
        self._began_at = 0.0

    def begin(self) -> None:
        """Starts the next program, and skips the first turns of the very first one."""
        program, noise = self._client.program, self._noise
        self._generation += 1
        self._key = SessionKey(f"{self._name}/{self._generation}")
        shared = token_ids(f"{self._client.tenant.name} agents", program.prompt_tokens)
        self._tokens = shared + token_ids(f"{self._key} task", program.first.count(noise))
        turns = program.turns.count(noise)
        skipped, self._skip = int(turns * self._skip), 0.0
        for _ in range(skipped):
            self._append(program.output.count(noise) + program.appended.count(noise))
        self._history_tokens, self._turns_left = 0, turns - skipped
        self._world.engine.timeline.after(program.tool_s.draw(noise), self._turn)

    def _append(self, count: int) -> None:
        self._tokens += token_ids(f"{self._key} {len(self._tokens)}", count)

    def _turn(self) -> None:
        if self._world.now >= self._world.ends_at:
            return
        use = SessionUse(self._key, self._history_tokens)
        output_tokens = self._client.program.output.count(self._noise)
        self._began_at = self._world.now
        self._world.send(self._client.tenant, self._tokens, output_tokens, use, self._answered)

    def _answered(self, tokens: tuple[int, ...] | None) -> None:
        program, timeline = self._client.program, self._world.engine.timeline
        seconds = program.tool_s.draw(self._noise)
        if tokens is None:
            timeline.after(seconds, self._turn)
            return
        self._world.meter.turn_ended(self._client.tenant.name, self._world.now - self._began_at)
        self._tokens, self._history_tokens = tokens, len(tokens)
        self._turns_left -= 1
        if self._turns_left <= 0 or len(tokens) >= program.context_tokens:
            self._command(SessionVerb.CLOSE)
            timeline.after(0.0, self.begin)
            return
        self._command(SessionVerb.HOLD, ToolWait("tool"))
        self._append(program.appended.count(self._noise))
        timeline.after(seconds, self._turn)

    def _command(self, verb: SessionVerb, *waits: ToolWait) -> None:
        history = self._tokens[: self._history_tokens]
        domain = self._client.tenant.domain
        self._world.engine.session_cache.run(SessionCommand(verb, self._key, domain, (), history, waits=waits))
