"""Agent sessions made from a seed, with the shape of published ones, to drive caches, leases and schedulers.

Three shapes:

- coding: long contexts that grow by a little and are compacted now and then, many short tools, some sub-agents;
- support: one system prompt for everybody, short questions, people's gaps between them;
- research: one question that forks into several searches over the same beginning, and an answer from all of them.

The same seed gives the same trace. Token counts are divided by `factor`, for small models; times stay as they are.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.agent_habits import CODING, CODING_SUB_AGENT, RESEARCH, RESEARCH_BRANCH, SUPPORT, Habits

HUMAN = "human"
"""The name of the pause in which a person reads and writes."""


class Shape(StrEnum):
    CODING = "coding"
    SUPPORT = "support"
    RESEARCH = "research"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a session waits for after a step; calls of one step run side by side."""

    tool: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One request to the model: its prompt is all that stands before it."""

    appended_tokens: int
    """New at the end of the prompt."""
    output_tokens: int
    starts_over: bool = False
    """The context was compacted: of all before, only the shared prompt is left, and a summary is in what is new."""
    calls: tuple[ToolCall, ...] = ()
    sub_agents: tuple[int, ...] = ()
    """Sessions that begin after this step, and must end before the next."""


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a sub-agent comes from."""

    session: int
    step: int
    is_fork: bool
    """Whether it begins with everything that its parent had said by then; otherwise with its own shared prompt."""


@dataclass(frozen=True, slots=True)
class Session:
    """One agent from its start to its end."""

    number: int
    domain: str
    starts_at_s: float
    """From the start of the trace; of a sub-agent, when its parent began."""
    prompt: str
    """The name of the shared prompt that it begins with."""
    prompt_tokens: int
    steps: tuple[Step, ...]
    parent: Parent | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions by number."""

    shape: Shape
    sessions: tuple[Session, ...]

    def context_tokens(self, number: int) -> list[int]:
        """The length of each step's prompt."""
        session = self.sessions[number]
        tokens, lengths = self._tokens_at_start(session), []
        for step in session.steps:
            tokens = (session.prompt_tokens if step.starts_over else tokens) + step.appended_tokens
            lengths.append(tokens)
            tokens += step.output_tokens
        return lengths

    def prompts(self, number: int, vocabulary: int = 256) -> Iterator[list[int]]:
        """Each step's prompt as token ids; equal beginnings are equal, and all else is noise."""
        session = self.sessions[number]
        shared = _token_ids(session.prompt, session.prompt_tokens, vocabulary)
        ids = self._ids_at_start(session, vocabulary) if session.parent is not None else list(shared)
        for position, step in enumerate(session.steps):
            if step.starts_over:
                ids = list(shared)
            ids += _token_ids(f"{number}/{position}/input", step.appended_tokens, vocabulary)
            yield list(ids)
            ids += self.output(number, position, vocabulary)

    def output(self, number: int, position: int, vocabulary: int = 256) -> list[int]:
        """What the model answers in one step."""
        return _token_ids(
            f"{number}/{position}/output", self.sessions[number].steps[position].output_tokens, vocabulary
        )

    def _tokens_at_start(self, session: Session) -> int:
        parent = session.parent
        if parent is None or not parent.is_fork:
            return session.prompt_tokens
        output_tokens = self.sessions[parent.session].steps[parent.step].output_tokens
        return self.context_tokens(parent.session)[parent.step] + output_tokens

    def _ids_at_start(self, session: Session, vocabulary: int) -> list[int]:
        parent = session.parent
        if parent is None or not parent.is_fork:
            return _token_ids(session.prompt, session.prompt_tokens, vocabulary)
        prompts = list(self.prompts(parent.session, vocabulary))
        return prompts[parent.step] + self.output(parent.session, parent.step, vocabulary)


class TraceMaker:
    """Draws traces; every call of `make` draws other sessions."""

    def __init__(self, seed: int, factor: float = 1.0, num_domains: int = 8, sessions_per_hour: float = 120.0) -> None:
        """Parties are of unequal size: the first has about a third of all sessions (1/n, normalised)."""
        self._noise = random.Random(f"agent traces {seed}")
        self._factor = factor
        self._domains = [f"domain-{number}" for number in range(num_domains)]
        self._weights = [1.0 / (number + 1) for number in range(num_domains)]
        self._seconds_between = 3600.0 / sessions_per_hour
        self._sessions: list[Session] = []

    def make(self, shape: Shape, num_sessions: int) -> Trace:
        """A trace of `num_sessions` sessions that arrive at random times, besides their sub-agents."""
        self._sessions = []
        now = 0.0
        for _ in range(num_sessions):
            now += self._noise.expovariate(1.0 / self._seconds_between)
            domain = self._noise.choices(self._domains, self._weights)[0]
            if shape is Shape.CODING:
                self._coding(domain, now)
            elif shape is Shape.SUPPORT:
                self._add(domain, now, "support", SUPPORT, self._steps(SUPPORT))
            else:
                self._research(domain, now)
        return Trace(shape, tuple(self._sessions))

    def _coding(self, domain: str, now: float) -> None:
        """44 % of sessions hand parts of their work to sub-agents, each of which begins with nothing but its task."""
        number = self._add(domain, now, "coding", CODING, self._steps(CODING))
        if self._noise.random() < 0.44:
            for position in self._some_positions(number, 1 + self._few()):
                self._spawn(number, position, 1 + self._few(), CODING_SUB_AGENT, "coding-sub-agent", is_fork=False)

    def _research(self, domain: str, now: float) -> None:
        """After its first steps a session forks into four to twelve branches that share all it has read."""
        number = self._add(domain, now, "research", RESEARCH, self._steps(RESEARCH))
        position = len(self._sessions[number].steps) // 2
        self._spawn(number, position, self._noise.randint(4, 12), RESEARCH_BRANCH, "research", is_fork=True)

    def _add(
        self, domain: str, now: float, prompt: str, habits: Habits, steps: Iterable[Step], parent: Parent | None = None
    ) -> int:
        number = len(self._sessions)
        prompt_tokens = self._scaled(habits.prompt_tokens)
        self._sessions.append(Session(number, domain, now, prompt, prompt_tokens, tuple(steps), parent))
        return number

    def _spawn(self, number: int, position: int, count: int, habits: Habits, prompt: str, *, is_fork: bool) -> None:
        """Begin `count` sub-agents after a step, and let that step wait for them alone."""
        parent = self._sessions[number]
        where = Parent(number, position, is_fork)
        children = [
            self._add(parent.domain, parent.starts_at_s, prompt, habits, self._steps(habits), where)
            for _ in range(count)
        ]
        steps = list(parent.steps)
        steps[position] = replace(steps[position], calls=(), sub_agents=tuple(children))
        self._sessions[number] = replace(parent, steps=tuple(steps))

    def _steps(self, habits: Habits) -> Iterator[Step]:
        """The steps of one session, whose context starts over when it is full."""
        num_steps = habits.steps.count(self._noise)
        context = float(habits.prompt_tokens)
        appended, starts_over = habits.first_tokens.draw(self._noise), False
        for position in range(num_steps):
            is_last = position == num_steps - 1
            calls = () if is_last else self._calls(habits)
            output = habits.output.draw(self._noise)
            yield Step(self._scaled(appended), self._scaled(output), starts_over, calls)
            context += appended + output
            source = habits.asked if calls and calls[0].tool == HUMAN else habits.appended
            appended, starts_over = sum(source.draw(self._noise) for _ in calls), False
            if context + appended > habits.context_tokens:
                appended, starts_over = habits.summary.draw(self._noise) + appended, True
                context = float(habits.prompt_tokens)

    def _calls(self, habits: Habits) -> tuple[ToolCall, ...]:
        if self._noise.random() < habits.is_answer:
            return (ToolCall(HUMAN, habits.human.draw(self._noise)),)
        calls = [self._call(habits)]
        while self._noise.random() < habits.more_calls:
            calls.append(self._call(habits))
        return tuple(calls)

    def _call(self, habits: Habits) -> ToolCall:
        (tool,) = self._noise.choices(habits.tools, [tool.share for tool in habits.tools])
        return ToolCall(tool.name, tool.seconds.draw(self._noise))

    def _some_positions(self, number: int, count: int) -> list[int]:
        """Different steps of a session after which another follows."""
        usable = range(len(self._sessions[number].steps) - 1)
        return self._noise.sample(usable, min(count, len(usable)))

    def _few(self) -> int:
        return min(int(self._noise.expovariate(0.8)), 6)

    def _scaled(self, tokens: float) -> int:
        return max(round(tokens / self._factor), 1)


def _token_ids(label: str, count: int, vocabulary: int) -> list[int]:
    """Noise that belongs to a label."""
    return random.Random(label).choices(range(vocabulary), k=count)
