"""Tests of the choice between engines, against a search over all of them."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.fleet.placement import (
    DEFAULT_COSTS,
    Candidate,
    Demand,
    HashRing,
    LeastSeconds,
    RoundRobin,
    first_token_s,
)

NAMES = ("a", "b", "c", "d", "e")


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Demand, list[Candidate]]:
    """A request, and up to five engines, of which one at most has its session."""
    tokens = draw(st.integers(1, 5000))
    demand = Demand(tokens, -(-tokens // 16), 16, needs_adapter=draw(st.booleans()))
    names = NAMES[: draw(st.integers(1, 5))]
    bound = draw(st.sampled_from((*names, "gone")))
    candidates = [
        Candidate(
            name,
            cached_tokens=draw(st.integers(0, tokens)),
            queued_tokens=draw(st.integers(0, 8000)),
            free_pages=draw(st.integers(0, 400)),
            requests=draw(st.integers(0, 64)),
            has_adapters=draw(st.booleans()),
            prefill_token_s=draw(st.sampled_from((0.0001, 0.001, 0.01))),
            slowness=draw(st.sampled_from((1.0, 1.0, 5.0))),
            has_session=name == bound,
        )
        for name in names
    ]
    return demand, candidates


@given(fleets(), st.integers(0, 1000))
def test_the_choice_is_within_its_margins_of_the_fastest_engine(
    fleet: tuple[Demand, list[Candidate]], seed: int
) -> None:
    """No engine is faster by more than a tie, or, if the session's engine is kept, by more than the costs of a move."""
    demand, candidates = fleet

    chosen = LeastSeconds(Random(seed)).choose(demand, candidates)

    own_s, least_s = first_token_s(demand, chosen), min(first_token_s(demand, one) for one in candidates)
    if chosen.has_session:
        assert own_s <= max(
            least_s + DEFAULT_COSTS.move_s + DEFAULT_COSTS.move_share * own_s,
            least_s * (1 + DEFAULT_COSTS.tie_share) + DEFAULT_COSTS.tie_s,
        )
    else:
        assert own_s <= least_s * (1 + DEFAULT_COSTS.tie_share) + DEFAULT_COSTS.tie_s
        bound = [one for one in candidates if one.has_session]
        for kept in bound:  # it was given up only because it is slower by more than the move costs
            kept_s = first_token_s(demand, kept)
            assert kept_s > least_s + DEFAULT_COSTS.move_s + DEFAULT_COSTS.move_share * kept_s


@given(fleets(), st.integers(0, 4), st.sampled_from(("cached", "queued", "free", "adapters", "slow")))
def test_an_engine_that_gets_better_is_not_estimated_slower(
    fleet: tuple[Demand, list[Candidate]], index: int, what: str
) -> None:
    """More cached tokens, a shorter queue, more free pages, a resident adapter or more speed never raise the estimate."""
    demand, candidates = fleet
    before = candidates[index % len(candidates)]
    changes: dict[str, dict[str, Any]] = {
        "cached": {"cached_tokens": demand.prompt_tokens},
        "queued": {"queued_tokens": before.queued_tokens // 2},
        "free": {"free_pages": before.free_pages + 10},
        "adapters": {"has_adapters": True},
        "slow": {"slowness": 1.0},
    }

    assert first_token_s(demand, replace(before, **changes[what])) <= first_token_s(demand, before)


def test_the_session_stays_until_waiting_costs_more_than_restoring() -> None:
    """With 2000 cached tokens of a prompt of 2100, the session's engine is kept until its queue outweighs them."""
    demand = Demand(2100, 132)
    choose = LeastSeconds(Random(0)).choose

    def chosen_with_queue(queued_tokens: int) -> str:
        own = Candidate("own", cached_tokens=2000, queued_tokens=queued_tokens, free_pages=1000, has_session=True)
        return choose(demand, [own, Candidate("other", free_pages=1000)]).replica_id

    assert [chosen_with_queue(queued) for queued in (0, 1900, 2200, 2500)] == ["own", "own", "own", "other"]


def test_an_adapter_costs_what_the_engine_has_measured() -> None:
    """Without the adapter, an engine costs its own load time more, or the default one if it has loaded none."""
    demand, without = Demand(100, 7, needs_adapter=True), Candidate("own", free_pages=10, has_adapters=False)
    least_s = first_token_s(demand, replace(without, has_adapters=True))

    costs_s = [
        first_token_s(demand, replace(without, adapter_load_s=seconds)) - least_s for seconds in (None, 0.0, 2.5)
    ]

    assert costs_s == pytest.approx([DEFAULT_COSTS.adapter_load_s, 0.0, 2.5])


def test_equal_engines_share_by_their_requests() -> None:
    """Of two equally fast engines, the one with fewer requests is taken, also if a slow one has none."""
    crowded, free = Candidate("crowded", requests=9, free_pages=9), Candidate("free", requests=2, free_pages=9)
    slow = Candidate("slow", slowness=50.0, free_pages=9)

    chosen = {LeastSeconds(Random(seed)).choose(Demand(16, 1), [crowded, slow, free]).replica_id for seed in range(20)}

    assert chosen == {"free"}


@given(st.binary(min_size=1, max_size=8))
def test_a_lost_engine_moves_only_its_own_keys(key: bytes) -> None:
    """Under rendezvous hashing, a key keeps its engine when another one goes."""
    candidates = [Candidate(name) for name in NAMES]
    chosen = HashRing().choose(Demand(1, 1, key=key), candidates)
    for gone in candidates:
        if gone is not chosen:
            rest = [one for one in candidates if one is not gone]
            assert HashRing().choose(Demand(1, 1, key=key), rest) is chosen


def test_turns_go_round() -> None:
    """Round robin takes each engine once in as many requests."""
    policy, candidates = RoundRobin(), [Candidate(name) for name in NAMES]

    assert sorted(policy.choose(Demand(1, 1), candidates).replica_id for _ in NAMES) == sorted(NAMES)
