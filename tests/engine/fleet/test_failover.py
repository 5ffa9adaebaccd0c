"""Tests of the budget of moves, and of scores that two engines report."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.events import PromptEmbedded, PromptScored, TokenLogprobs
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.fleet.failover import MovableRequest, MoveBudget
from graftwork.platform.ids import IsolationDomain, RequestId


def movable(prompt: int = 10) -> MovableRequest:
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=1)
    return MovableRequest(
        EngineRequest(RequestId("req"), tuple(range(prompt)), sampling, IsolationDomain(b"t")), now=0.0
    )


@given(st.integers(1, 200), st.integers(0, 8))
def test_moves_are_bounded_by_requests(num_requests: int, spare: int) -> None:
    """All running requests can move once; however often engines are lost, there are no more moves than that, and those saved up."""
    budget = MoveBudget(spare)
    running = [movable() for _ in range(num_requests)]
    for _ in running:
        budget.begin()

    moved = 0
    for _ in range(3):
        for request in running:
            if budget.allows(request):
                request.move()
                moved += 1

    assert moved == min(num_requests + spare, 2 * num_requests)
    assert all(request.num_moves <= 2 for request in running)


@given(st.lists(st.integers(1, 4), max_size=6), st.lists(st.integers(1, 4), max_size=6))
def test_scores_of_the_prompt_come_once(before: list[int], after: list[int]) -> None:
    """However the two engines divide the prompt's scores, the caller gets each once, in order."""
    scores = [TokenLogprobs(-float(place)) for place in range(40)]
    request, found = movable(41), list[TokenLogprobs]()

    def report(sizes: list[int]) -> int:
        start = 0
        for size in sizes:
            shown = request.take(PromptScored(tuple(scores[start : start + size])))
            if isinstance(shown, PromptScored):
                found.extend(shown.logprobs)
            start += size
        return start

    first = report(before)
    request.move()
    second = report(after)

    assert found == scores[: max(first, second)]


def test_an_embedding_comes_once() -> None:
    """If an engine is lost between the embedding and the end, the caller does not get the next engine's embedding too."""
    request = movable()

    first = request.take(PromptEmbedded(b"first"))
    request.move()
    second = request.take(PromptEmbedded(b"second"))

    assert (first, second) == (PromptEmbedded(b"first"), None)
