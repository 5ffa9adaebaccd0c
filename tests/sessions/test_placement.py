"""The choice of an engine."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.sessions.placement import EngineOffer, choose

offers = st.builds(
    EngineOffer,
    address=st.sampled_from(["a", "b", "c"]),
    cached_tokens=st.integers(0, 200),
    has_adapter=st.booleans(),
    waiting_requests=st.integers(0, 3),
    tokens_per_request=st.just(50),
)


def offer(address: str, cached_tokens: int, *, has_adapter: bool = True, waiting: int = 0) -> EngineOffer:
    return EngineOffer(address, cached_tokens, has_adapter, waiting, tokens_per_request=50)


def test_prefix_counts_until_the_queue_costs_more() -> None:
    """The engine that holds the prefix is chosen, unless waiting there costs more than computing elsewhere."""
    assert choose([offer("a", 0), offer("b", 90)], 100) == offer("b", 90)
    assert choose([offer("a", 0), offer("b", 90, waiting=2)], 100) == offer("a", 0)


def test_adapter_breaks_a_tie() -> None:
    """Of two that could begin at once, the one that has the adapter is chosen."""
    assert choose([offer("a", 10, has_adapter=False), offer("b", 10)], 100) == offer("b", 10)


def test_nobody_offers() -> None:
    """Without engines there is no choice."""
    assert choose([], 100) is None


@given(st.lists(offers, min_size=1, unique_by=lambda offer: offer.address), st.integers(1, 100))
def test_order_of_offers_does_not_matter(some: list[EngineOffer], prompt_tokens: int) -> None:
    """The same offers are answered by the same choice, whoever came first."""
    assert choose(some, prompt_tokens) == choose(some[::-1], prompt_tokens)
