"""What a trace of agent sessions is like, beside what was published of real ones.

    python -m benchmarks.trace_figures [--sessions 400] [--factor 1] [--seed 0]

Published: TraceLab (arXiv 2606.30560; Claude Code and Codex, 4,265 sessions, means from its totals), and for the median
of steps and the share with sub-agents vLLM's AgentX traffic. Both are of coding agents.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.agent_traces import HUMAN, Session, Shape, Trace, TraceMaker


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What a trace is like, in tokens as they stand in it."""

    num_sessions: int
    mean_steps: float
    median_steps: float
    mean_calls: float
    mean_input: float
    mean_appended: float
    mean_output: float
    reused: float
    """The share of all input that stood in the same place in an earlier prompt of the session, or is a shared prompt."""
    with_sub_agents: float
    """Of the sessions that are not sub-agents themselves."""
    median_tool_s: float
    mean_tool_s: float
    p99_tool_s: float
    median_human_s: float

    @classmethod
    def of(cls, trace: Trace) -> "TraceFigures":
        """Steps and calls a session are counted without sub-agents, everything else with them."""
        sessions = trace.sessions
        steps = [step for session in sessions for step in session.steps]
        inputs = [length for session in sessions for length in trace.context_tokens(session.number)]
        calls = [call for step in steps for call in step.calls]
        tool_s = sorted(call.seconds for call in calls if call.tool != HUMAN) or [0.0]
        roots = [session for session in sessions if session.parent is None]
        appended = sum(step.appended_tokens for step in steps)
        return cls(
            num_sessions=len(sessions),
            mean_steps=statistics.mean(len(session.steps) for session in roots),
            median_steps=statistics.median(len(session.steps) for session in roots),
            mean_calls=statistics.mean(_num_calls(session) for session in roots),
            mean_input=statistics.mean(inputs),
            mean_appended=appended / len(steps),
            mean_output=statistics.mean(step.output_tokens for step in steps),
            reused=1.0 - appended / sum(inputs),
            with_sub_agents=statistics.mean(any(step.sub_agents for step in session.steps) for session in roots),
            median_tool_s=statistics.median(tool_s),
            mean_tool_s=statistics.mean(tool_s),
            p99_tool_s=tool_s[int(0.99 * len(tool_s))],
            median_human_s=statistics.median([call.seconds for call in calls if call.tool == HUMAN] or [0.0]),
        )


PUBLISHED: dict[str, float] = {
    "mean_steps": 84,
    "median_steps": 43,
    "mean_calls": 101,
    "mean_input": 154_000,
    "mean_appended": 6_500,
    "mean_output": 520,
    "reused": 0.96,
    "with_sub_agents": 0.44,
}
"""Of coding agents, by the name of the figure; token counts are to be divided by the trace's factor."""
_IN_TOKENS = ("mean_input", "mean_appended", "mean_output")


def table(figures: TraceFigures, shape: Shape, factor: float) -> str:
    """A trace's statistics, beside the published where there are any."""
    lines = [f"{shape}: {figures.num_sessions} sessions", f"  {'':<16} {'trace':>10} {'published':>10}"]
    for name in TraceFigures.__slots__:
        if name != "num_sessions":
            known = PUBLISHED.get(name) if shape is Shape.CODING else None
            known = known / factor if known is not None and name in _IN_TOKENS else known
            beside = f"{known:>10,.4g}" if known is not None else f"{'-':>10}"
            lines.append(f"  {name:<16} {getattr(figures, name):>10,.4g} {beside}")
    return "\n".join(lines)


def _num_calls(session: Session) -> int:
    """Tools and sub-agents; people are not called."""
    tools = sum(call.tool != HUMAN for step in session.steps for call in step.calls)
    return tools + sum(len(step.sub_agents) for step in session.steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for shape in Shape:
        trace = TraceMaker(options.seed, options.factor).make(shape, options.sessions)
        print(table(TraceFigures.of(trace), shape, options.factor))


if __name__ == "__main__":
    main()
