"""Tests of the traces of agents: seeds, prompts, and the published figures."""

from itertools import pairwise

import pytest
from benchmarks.agent_traces import HUMAN, Shape, Trace, TraceMaker
from benchmarks.trace_figures import PUBLISHED, TraceFigures, table

FACTOR = 400.0


def small_trace(shape: Shape, num_sessions: int = 12) -> Trace:
    return TraceMaker(seed=3, factor=FACTOR).make(shape, num_sessions)


@pytest.mark.parametrize("shape", Shape)
def test_a_seed_fixes_the_trace(shape: Shape) -> None:
    """Two makers with one seed draw the same sessions, and one with another seed draws others."""
    assert small_trace(shape) == small_trace(shape)
    assert TraceMaker(seed=4, factor=FACTOR).make(shape, 12) != small_trace(shape)


@pytest.mark.parametrize("shape", Shape)
def test_prompts_are_as_long_as_the_trace_says(shape: Shape) -> None:
    """The token ids of each step are as many as its context has tokens."""
    trace = small_trace(shape)

    for session in trace.sessions[:20]:
        assert [len(prompt) for prompt in trace.prompts(session.number)] == trace.context_tokens(session.number)


@pytest.mark.parametrize("shape", Shape)
def test_a_prompt_goes_on_where_the_last_step_ended(shape: Shape) -> None:
    """A prompt starts with the last prompt and output, or with the shared prompt alone where it starts over."""
    trace = small_trace(shape)

    for session in trace.sessions[:20]:
        prompts = list(trace.prompts(session.number))
        for position, (before, after) in enumerate(pairwise(prompts)):
            whole = before + trace.output(session.number, position)
            starts_over = session.steps[position + 1].starts_over
            kept = whole[: session.prompt_tokens] if starts_over else whole
            assert after[: len(kept)] == kept
            assert starts_over == (after[: len(whole)] != whole)


def test_branches_begin_with_all_that_their_parent_had_said() -> None:
    """Every sub-agent of a research session shares its parent's context to the step that it forks from."""
    trace = small_trace(Shape.RESEARCH, 3)
    branches = [session for session in trace.sessions if session.parent is not None]
    assert len(branches) >= 12

    for branch in branches:
        assert branch.parent is not None
        parent, position = branch.parent.session, branch.parent.step
        beginning = list(trace.prompts(parent))[position] + trace.output(parent, position)
        assert next(trace.prompts(branch.number))[: len(beginning)] == beginning
        assert branch.number in trace.sessions[parent].steps[position].sub_agents


@pytest.mark.parametrize("shape", Shape)
def test_every_step_but_the_last_waits_for_something(shape: Shape) -> None:
    """Every step but the last waits for tools, a person or sub-agents, for more than zero seconds."""
    trace = small_trace(shape)

    for session in trace.sessions:
        for step in session.steps[:-1]:
            assert step.calls or step.sub_agents
            assert all(call.seconds > 0 for call in step.calls)
        assert not session.steps[-1].calls or session.steps[-1].sub_agents


def test_support_sessions_share_one_prompt_and_wait_for_people() -> None:
    """All support prompts start with the same tokens, and most of their pauses are a person's."""
    trace = small_trace(Shape.SUPPORT, 30)
    beginnings = {tuple(next(trace.prompts(session.number))[: session.prompt_tokens]) for session in trace.sessions}
    calls = [call.tool for session in trace.sessions for step in session.steps for call in step.calls]

    assert len(beginnings) == 1
    assert len({session.domain for session in trace.sessions}) > 1
    assert calls.count(HUMAN) > len(calls) / 2


def test_coding_agents_have_the_published_shape() -> None:
    """The trace meets every published figure within 15 %, and the table prints both."""
    figures = TraceFigures.of(TraceMaker(seed=0).make(Shape.CODING, 600))

    found = {name: getattr(figures, name) for name in PUBLISHED}

    assert found == pytest.approx(PUBLISHED, rel=0.15)
    assert all(name in table(figures, Shape.CODING, 1.0) for name in PUBLISHED)
    assert figures.p99_tool_s > 100 * figures.median_tool_s


def test_a_factor_divides_tokens_and_leaves_times() -> None:
    """A factor of a hundred divides the tokens and keeps tools and times."""
    large, small = (TraceMaker(seed=1, factor=factor).make(Shape.CODING, 5) for factor in (1.0, 100.0))

    for session, scaled in zip(large.sessions, small.sessions, strict=True):
        for step, small_step in zip(session.steps, scaled.steps, strict=True):
            assert small_step.appended_tokens == pytest.approx(step.appended_tokens / 100, abs=1.01)
            assert small_step.calls == step.calls
