"""Tests of the counters of a group: what a choice costs, and what it may see."""

from collections.abc import Hashable
from random import Random
from typing import ClassVar

import pytest

from graftwork.engine.scheduler.order.fair_group import FairGroup, GroupWalk, Rank, round_limit
from graftwork.engine.scheduler.order.request_state import RequestState
from tests.engine.scheduler.fair_traces import waiting_request


class Counted(float):
    """A number that counts the comparisons in which it takes part."""

    comparisons: ClassVar[int] = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__

    def __add__(self, other: float) -> "Counted":
        return Counted(float.__add__(self, other))

    __radd__ = __add__


class OneRequest:
    """A member with one waiting request of a given rank. Implements Source."""

    def __init__(self, key: Hashable, rank: float) -> None:
        self._left = [waiting_request(str(key), str(key), 1)]
        self._rank = (Counted(rank),)

    def best(self) -> Rank | None:
        return self._rank if self._left else None

    def take(self) -> tuple[RequestState, float]:
        return self._left.pop(), Counted(10.0)

    take_oldest = take


def group_of(number: int) -> FairGroup:
    group, random = FairGroup(), Random(number)
    for key in range(number):
        group.begin_waiting(key)
        group.charge(key, Counted(random.randint(1, 10**6)))
    return group


def comparisons_of_a_decision(number: int) -> int:
    """The comparisons of one choice, and of the charge and the end of the chosen member, in a group of this size."""
    group = group_of(number)
    Counted.comparisons = 0
    walk = GroupWalk(group, lambda key: OneRequest(key, 0.0), quantum=100.0, window=16)
    walk.best()
    state, cost = walk.take()
    key = int(state.request_id)
    group.charge(key, cost)
    group.stop_waiting(key)
    group.begin_waiting(key)
    return Counted.comparisons


def test_a_decision_costs_logarithmically_many_comparisons() -> None:
    """A choice among 4,096 members takes at most a small number of comparisons more than one among 64."""
    small, large = comparisons_of_a_decision(64), comparisons_of_a_decision(4096)

    assert large <= small + 10 * 6  # each of about ten searches halves the members six times more


@pytest.mark.parametrize(("lowest", "quantum", "limit"), [(0.0, 10.0, 10.0), (9.9, 10.0, 10.0), (10.0, 10.0, 20.0)])
def test_a_round_ends_at_the_next_multiple_of_the_quantum(lowest: float, quantum: float, limit: float) -> None:
    """A member at the limit waits for the next round; a member just below it is served."""
    assert round_limit(lowest, quantum) == limit


def test_only_members_below_the_limit_are_compared_by_rank() -> None:
    """The best rank wins below the limit, and waits for its round above it."""
    group = FairGroup()
    counters, ranks = {"a": 90.0, "b": 40.0, "c": 120.0}, {"a": 1.0, "b": 2.0, "c": 0.0}
    for key in counters:
        group.begin_waiting(key)
    for key, counter in counters.items():
        group.charge(key, counter)
    walk = GroupWalk(group, lambda key: OneRequest(key, ranks[str(key)]), quantum=100.0, window=16)
    taken = []
    while walk.best() is not None:
        taken.append(walk.take()[0].request_id)

    assert taken == ["a", "b", "c"]


def test_a_member_starts_at_the_smallest_waiting_counter_and_keeps_its_debt() -> None:
    """A new member gets no credit, a member that was served more keeps its counter, and an idle group its last level."""
    group = FairGroup()
    group.begin_waiting("first")
    group.charge("first", 50.0)
    group.begin_waiting("new")
    group.charge("debtor", 70.0)
    group.begin_waiting("debtor")
    counters = [group.counter(key) for key in ("first", "new", "debtor")]
    for key in ("new", "debtor", "first"):
        group.stop_waiting(key)
    group.begin_waiting("late")
    group.check_integrity()

    assert counters == [50.0, 50.0, 120.0]
    assert group.counter("late") == 50.0


def test_a_group_forgets_idle_members_without_debts() -> None:
    """Ten thousand members that came once leave no more than a few hundred entries."""
    group = FairGroup()
    for key in range(10_000):
        group.begin_waiting(key)
        group.charge(key, 5.0)
        group.stop_waiting(key)

    assert len(group) < 300
