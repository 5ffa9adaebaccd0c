"""Agents that live through a trace: turns, tools that take their time, sub-agents, and an end.

Says to the KV cache between turns what the gateway says: HOLD when a turn ends, PREFETCH when the last tool begins to
answer, CLOSE at the end, as far as the policy does so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.agent_traces import HUMAN, Session, Step, Trace
from benchmarks.simulation.policies import Policy
from benchmarks.simulation.reserve_watch import ReserveWatch
from benchmarks.simulation.serving import Server, Turn
from benchmarks.simulation.timeline import Timeline

from graftwork.engine.core.prefix_keys import PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.ids import IsolationDomain

UPLOAD_S = 0.1
"""From the first byte of a tool's answer to the turn that it starts."""
LINGER_S = 300.0
"""From a session's last answer until its client, or the gateway, closes it."""
SUB_AGENT = "sub-agent"
"""The name of the tool that a session waits for while its sub-agents work."""


@dataclass(slots=True, eq=False)
class Agent:
    """One session under way."""

    session: Session
    prompts: Iterator[list[int]]
    on_end: Callable[[], None]
    position: int = -1
    """Of the step that is served, or was served last."""
    history: tuple[int, ...] = ()
    history_tokens: int = 0
    sub_agents: int = 0
    """That have not ended."""

    @property
    def step(self) -> Step:
        return self.session.steps[self.position]

    @property
    def domain(self) -> IsolationDomain:
        return IsolationDomain(self.session.domain.encode())

    @property
    def key(self) -> SessionKey:
        return SessionKey(f"session-{self.session.number}")


@dataclass(slots=True)
class Budget:
    """Turns that may still begin; once there are none, sessions end where they are."""

    turns: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What agents live in."""

    server: Server
    session_cache: SessionCache
    scopes: CacheScopes
    timeline: Timeline
    watch: ReserveWatch


class Agents:
    """Plays sessions of one trace against a server."""

    def __init__(self, trace: Trace, policy: Policy, surroundings: Surroundings, budget: Budget) -> None:
        self._trace = trace
        self._policy = policy
        self._server = surroundings.server
        self._session_cache = surroundings.session_cache
        self._scopes = surroundings.scopes
        self._timeline = surroundings.timeline
        self._watch = surroundings.watch
        self.budget = budget
        self.num_live = 0

    def start(self, number: int, on_end: Callable[[], None]) -> None:
        """Begin a session of the trace."""
        self.num_live += 1
        self._next_turn(Agent(self._trace.sessions[number], self._trace.prompts(number), on_end))

    def _next_turn(self, agent: Agent) -> None:
        if not self.budget.turns:
            self._end(agent)
            return
        self.budget.turns -= 1
        agent.position += 1
        prompt = next(agent.prompts)
        output = self._trace.output(agent.session.number, agent.position)
        whole = (*prompt, *output)
        scope = PrefixScope(self._scopes.scope(agent.domain, ()))
        use = SessionUse(agent.key, agent.history_tokens)
        agent.history, agent.history_tokens = whole, len(whole)
        path = TokenPath(scope, whole, agent.domain)
        self._server.submit(Turn(path, len(prompt), use, lambda: self._ended(agent), self._timeline.now))

    def _ended(self, agent: Agent) -> None:
        """A turn has its whole answer: wait for what it has called."""
        step = agent.step
        self._hold(agent, step)
        if agent.position == len(agent.session.steps) - 1:
            self._end(agent, LINGER_S)
            return
        if step.sub_agents:
            agent.sub_agents = len(step.sub_agents)
            for number in step.sub_agents:
                self.start(number, lambda: self._sub_agent_ended(agent))
            return
        self._wait(agent, max((call.seconds for call in step.calls), default=0.0), is_human=_is_human(step))

    def _sub_agent_ended(self, agent: Agent) -> None:
        agent.sub_agents -= 1
        if not agent.sub_agents:
            self._wait(agent, UPLOAD_S, is_human=False)

    def _wait(self, agent: Agent, seconds: float, *, is_human: bool) -> None:
        """Go on in `seconds`; the last answer of a tool begins to arrive a little before that, a person's does not."""
        if self._policy.prefetches and not is_human:
            self._timeline.after(seconds - UPLOAD_S, lambda: self._tend(agent, SessionVerb.PREFETCH))
        self._timeline.after(seconds, lambda: self._next_turn(agent))

    def _hold(self, agent: Agent, step: Step) -> None:
        if not self._policy.holds:
            return
        tools = [SUB_AGENT] if step.sub_agents else [call.tool for call in step.calls] or [HUMAN]  # it may be the end
        waits = tuple(ToolWait(tool) for tool in tools if tool != HUMAN or self._policy.leases_every_pause)
        self._tend(agent, SessionVerb.HOLD, waits)

    def _end(self, agent: Agent, linger_s: float = 0.0) -> None:
        agent.on_end()
        self._timeline.after(linger_s, lambda: self._close(agent))

    def _close(self, agent: Agent) -> None:
        self._tend(agent, SessionVerb.CLOSE)
        self.num_live -= 1

    def _tend(self, agent: Agent, verb: SessionVerb, waits: tuple[ToolWait, ...] = ()) -> None:
        with self._watch.others_than(agent.domain):
            self._session_cache.run(SessionCommand(verb, agent.key, agent.domain, (), agent.history, waits=waits))


def _is_human(step: Step) -> bool:
    return any(call.tool == HUMAN for call in step.calls)
