"""Shares service fairly among the members of a group by counters, and lets a choice deviate from strict turns by a bound.

    FairGroup   the counters of the members; those with waiting requests are kept sorted
    GroupWalk   simulates the next admissions from a group, without changing it

A member's counter is the cost of its service so far, divided by its weight. Only members whose counter is below the
limit of the round may be served; among these the best rank goes first. The limit is a multiple of the quantum. When no
member is below it, the next round begins. So two members that both wait all the time differ by at most the quantum,
and the cost of what was admitted already. A quantum of 0 means strict turns.

A member that begins to wait starts at the smallest counter of the waiting members, or of the member that stopped
waiting last: it earns nothing by being idle. Each choice costs O(log n) comparisons for n members, and O(1) reads of
ranks.

Source: Deficit Longest Prefix Match, Cao et al. 2025 (arXiv 2501.14312). A member's deficit there is the limit minus
its counter here, multiplied by its weight.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from graftwork.engine.scheduler.order.request_state import RequestState

Rank = tuple[float, ...]
"""A sort key: the smallest is served first."""
_MIN_MEMBERS = 64
"""Idle members are forgotten only if a group has more members than this."""


@dataclass(slots=True, eq=False)
class Member:
    """One member of a group."""

    key: Hashable
    number: int
    """Breaks ties: the member that was first seen first goes first."""
    counter: float = 0.0
    is_waiting: bool = False


class FairGroup:
    """Counts the service of each member. A member is named by a hashable key."""

    def __init__(self) -> None:
        self._members: dict[Hashable, Member] = {}
        self.waiting: list[tuple[float, int, Member]] = []
        """The members with waiting requests, in the order of their counters."""
        self._left_last: Member | None = None
        self._num_seen = 0
        self._forget_above = _MIN_MEMBERS

    def __len__(self) -> int:
        return len(self._members)

    def counter(self, key: Hashable) -> float:
        """Returns the service of a member, in units of cost divided by weight; for a new member, where it would start."""
        member = self._members.get(key)
        return self.floor() if member is None else member.counter

    def floor(self) -> float:
        """Returns the counter at which a new member would start."""
        if self.waiting:
            return self.waiting[0][0]
        return self._left_last.counter if self._left_last is not None else 0.0

    def counters(self) -> dict[Hashable, float]:
        """Returns where each member stands: its counter, or the floor if an idle member would start there."""
        floor = self.floor()
        return {key: max(member.counter, floor) for key, member in self._members.items()}

    def begin_waiting(self, key: Hashable) -> None:
        """Records that a member has a waiting request. Does nothing if it had one before."""
        member = self.member(key)
        if member.is_waiting:
            return
        member.counter = max(member.counter, self.floor())
        member.is_waiting = True
        insort(self.waiting, (member.counter, member.number, member))

    def stop_waiting(self, key: Hashable) -> None:
        """Records that a member has no waiting request any more."""
        member = self._members[key]
        del self.waiting[bisect_left(self.waiting, (member.counter, member.number))]
        member.is_waiting = False
        self._left_last = member
        if len(self._members) > self._forget_above:
            self._forget_idle()

    def charge(self, key: Hashable, cost: float) -> None:
        """Adds `cost` (already divided by the weight) to the counter of a member."""
        member = self.member(key)
        if member.is_waiting:
            del self.waiting[bisect_left(self.waiting, (member.counter, member.number))]
            member.counter += cost
            insort(self.waiting, (member.counter, member.number, member))
        else:
            member.counter += cost

    def member(self, key: Hashable) -> Member:
        """Returns the member with this key, which is created if it is new."""
        member = self._members.get(key)
        if member is None:
            member = self._members[key] = Member(key, self._num_seen, self.floor())
            self._num_seen += 1
        return member

    def _forget_idle(self) -> None:
        """Forgets idle members whose counters are not above the floor: they would start there anyway."""
        floor = self.floor()
        for key in [key for key, one in self._members.items() if not one.is_waiting and one.counter <= floor]:
            del self._members[key]
        self._forget_above = max(_MIN_MEMBERS, 2 * len(self._members))

    def check_integrity(self) -> None:
        """Checks that exactly the waiting members are in the sorted list, each with its counter."""
        assert self.waiting == sorted(self.waiting, key=lambda entry: entry[:2])
        assert {member.key for *_, member in self.waiting} == {
            key for key, member in self._members.items() if member.is_waiting
        }
        assert all(counter == member.counter for counter, _, member in self.waiting)


class Source(Protocol):
    """The waiting requests of one member, during a walk."""

    def best(self) -> Rank | None:
        """Returns the rank of the request that `take` would return; None if none is left."""
        ...

    def take(self) -> tuple[RequestState, float]:
        """Returns the next request, and the cost (divided by the weight) that its admission would add."""
        ...

    def take_oldest(self) -> tuple[RequestState, float]:
        """As `take`, but the oldest request that is left, whatever its rank."""
        ...


@dataclass(slots=True, eq=False)
class Turn:
    """A member during a walk, with what the walk has charged it tentatively."""

    member: Member
    counter: float
    source: Source


class GroupWalk:
    """Chooses the requests of a group one after the other, as if each were admitted and charged at once."""

    def __init__(
        self, group: FairGroup, open_source: Callable[[Hashable], Source], quantum: float, window: int
    ) -> None:
        """`open_source` returns the requests of a member. At most `window` members, those with the smallest counters,
        are compared by rank, besides those that the walk has served before.
        """
        self._group = group
        self._open_source = open_source
        self._quantum = quantum
        self._window = window
        self._next = 0
        self._turns: dict[Hashable, Turn] = {}
        self._ready: list[tuple[Rank, float, int, Turn]] = []
        self._parked: list[tuple[float, int, Turn]] = []
        self._limit = -math.inf

    def best(self) -> Rank | None:
        """Returns the rank of the request that `take` would return; None if none is left."""
        while True:
            self._fill()
            while self._ready:
                rank, counter, _, turn = self._ready[0]
                if counter == turn.counter and rank == turn.source.best():
                    return rank
                heappop(self._ready)  # `take_from` has changed the member since
                self._file(turn)
            if not self._begin_round():
                return None

    def take(self) -> tuple[RequestState, float]:
        """Returns the next request, and the cost that its admission would add. `best` must have returned a rank."""
        turn = heappop(self._ready)[-1]
        state, cost = turn.source.take()
        turn.counter += cost
        self._file(turn)
        return state, cost

    def take_from(self, key: Hashable) -> tuple[RequestState, float]:
        """Returns the oldest request of one member, whatever its counter and its rank."""
        turn = self._turn(self._group.member(key))
        state, cost = turn.source.take_oldest()
        turn.counter += cost
        return state, cost

    def _turn(self, member: Member) -> Turn:
        turn = self._turns.get(member.key)
        if turn is None:
            turn = self._turns[member.key] = Turn(member, member.counter, self._open_source(member.key))
        return turn

    def _file(self, turn: Turn) -> None:
        """Puts a member where it belongs now: among those that may be served, or among those that wait for a round."""
        rank = turn.source.best()
        if rank is None:
            return
        if turn.counter < self._limit:
            heappush(self._ready, (rank, turn.counter, turn.member.number, turn))
        else:
            heappush(self._parked, (turn.counter, turn.member.number, turn))

    def _fill(self) -> None:
        waiting = self._group.waiting
        while len(self._ready) < self._window and self._next < len(waiting) and waiting[self._next][0] < self._limit:
            self._file(self._turn(waiting[self._next][2]))
            self._next += 1

    def _begin_round(self) -> bool:
        """Raises the limit above the smallest counter, and readmits the members below it. Returns False if none waits."""
        waiting = self._group.waiting
        lowest = [self._parked[0][0]] if self._parked else []
        lowest += [waiting[self._next][0]] if self._next < len(waiting) else []
        if not lowest:
            return False
        self._limit = round_limit(min(lowest), self._quantum)
        while self._parked and self._parked[0][0] < self._limit:
            self._file(heappop(self._parked)[-1])
        return True


def round_limit(lowest: float, quantum: float) -> float:
    """Returns the limit of the round in which a member with the counter `lowest` is served: the next multiple of
    `quantum`; with a quantum of 0, the next number.
    """
    above = math.nextafter(lowest, math.inf)
    return above if quantum == 0 else max(above, (math.floor(lowest / quantum) + 1) * quantum)
