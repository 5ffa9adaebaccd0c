"""What agents of several kinds do: how many steps, how many tokens, which tools and for how long.

The numbers of coding agents are set so that traces have the published means (benchmarks/trace_figures.py compares);
those of support and research, the tools and their times are estimates: heavy tails, from milliseconds to minutes.
"""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A heavy-tailed quantity; `sigma` is that of the natural logarithm."""

    median: float
    sigma: float
    most: float = math.inf

    @property
    def mean(self) -> float:
        """Without the bound."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, noise: random.Random) -> float:
        return min(noise.lognormvariate(math.log(self.median), self.sigma), self.most)

    def count(self, noise: random.Random) -> int:
        """A whole number, at least 1."""
        return max(round(self.draw(noise)), 1)


@dataclass(frozen=True, slots=True)
class Tool:
    """A kind of tool: how often it is called beside others, and how long it takes."""

    name: str
    share: float
    seconds: Lognormal


CODING_TOOLS = (
    Tool("read_file", 0.34, Lognormal(0.05, 0.8)),
    Tool("search", 0.18, Lognormal(0.3, 1.0)),
    Tool("edit_file", 0.20, Lognormal(0.1, 0.8)),
    Tool("shell", 0.20, Lognormal(2.0, 1.8, most=600)),
    Tool("run_tests", 0.06, Lognormal(25.0, 1.2, most=3600)),
    Tool("fetch", 0.02, Lognormal(1.5, 1.0)),
)
SUPPORT_TOOLS = (Tool("find_order", 0.7, Lognormal(0.3, 0.7)), Tool("refund", 0.3, Lognormal(1.0, 0.8)))
RESEARCH_TOOLS = (Tool("web_search", 0.4, Lognormal(1.2, 0.7)), Tool("fetch", 0.6, Lognormal(2.0, 1.2, most=120)))


@dataclass(frozen=True, slots=True)
class Habits:
    """What the agents of one kind do; all counts in tokens before `factor`."""

    tools: tuple[Tool, ...]
    steps: Lognormal
    prompt_tokens: int
    first_tokens: Lognormal
    """The task, at the beginning."""
    appended: Lognormal
    """What a tool's result adds."""
    asked: Lognormal
    """What a person adds."""
    output: Lognormal
    more_calls: float
    """The chance that a step which calls a tool calls one more, and so on."""
    is_answer: float
    """The chance that a step calls none, and a person goes on."""
    human: Lognormal
    context_tokens: int
    """Where a context is compacted."""
    summary: Lognormal


CODING = Habits(
    tools=CODING_TOOLS,
    steps=Lognormal(43, 1.157, most=2000),
    prompt_tokens=22_000,
    first_tokens=Lognormal(1_500, 1.2, most=60_000),
    appended=Lognormal(1_650, 1.5, most=60_000),
    asked=Lognormal(150, 1.3, most=20_000),
    output=Lognormal(270, 1.2, most=20_000),
    more_calls=0.24,
    is_answer=0.08,
    human=Lognormal(90, 1.8, most=12 * 3600),
    context_tokens=325_000,
    summary=Lognormal(30_000, 0.6, most=90_000),
)
CODING_SUB_AGENT = Habits(
    tools=CODING_TOOLS,
    steps=Lognormal(14, 0.7, most=120),
    prompt_tokens=9_000,
    first_tokens=Lognormal(800, 0.8),
    appended=Lognormal(2_400, 1.3, most=60_000),
    asked=Lognormal(150, 1.0),
    output=Lognormal(240, 1.0, most=8_000),
    more_calls=0.3,
    is_answer=0.0,
    human=Lognormal(1, 0.1),
    context_tokens=200_000,
    summary=Lognormal(20_000, 0.5),
)
SUPPORT = Habits(
    tools=SUPPORT_TOOLS,
    steps=Lognormal(6, 0.8, most=60),
    prompt_tokens=3_000,
    first_tokens=Lognormal(60, 0.7),
    appended=Lognormal(180, 0.6),
    asked=Lognormal(40, 0.8, most=800),
    output=Lognormal(140, 0.6),
    more_calls=0.05,
    is_answer=0.65,
    human=Lognormal(45, 1.2, most=3600),
    context_tokens=32_000,
    summary=Lognormal(500, 0.3),
)
RESEARCH = Habits(
    tools=RESEARCH_TOOLS,
    steps=Lognormal(4, 0.4, most=12),
    prompt_tokens=4_000,
    first_tokens=Lognormal(600, 0.9),
    appended=Lognormal(5_000, 0.7, most=30_000),
    asked=Lognormal(100, 0.8),
    output=Lognormal(500, 0.7),
    more_calls=0.4,
    is_answer=0.0,
    human=Lognormal(300, 1.0),
    context_tokens=200_000,
    summary=Lognormal(8_000, 0.4),
)
RESEARCH_BRANCH = Habits(
    tools=RESEARCH_TOOLS,
    steps=Lognormal(7, 0.5, most=30),
    prompt_tokens=4_000,
    first_tokens=Lognormal(120, 0.5),
    appended=Lognormal(4_000, 0.9, most=30_000),
    asked=Lognormal(100, 0.8),
    output=Lognormal(350, 0.7),
    more_calls=0.3,
    is_answer=0.0,
    human=Lognormal(300, 1.0),
    context_tokens=200_000,
    summary=Lognormal(8_000, 0.4),
)
