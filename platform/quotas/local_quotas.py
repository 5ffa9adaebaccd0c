"""Counts, in the memory of this process, how much of its limits each owner of limits has used.

The counts are exact if there is only one gateway, and are lost when the gateway ends. Owns, for each owner (see
`limits.py`), a log of the requests of the last minute, and the requests that run now. A request runs until its
reservation is ended, or until nothing refers to its reservation any more. Invariant: between the check of the limits of
all owners and the change of their counts there is no await, so no other request can come between them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

from graftwork.platform.clock import Clock
from graftwork.platform.ids import new_id
from graftwork.platform.quotas.budget import MonthlyBudget, Reserved, ReservedCost, SpendLedger
from graftwork.platform.quotas.limits import Limits, OwnerLimits
from graftwork.platform.quotas.quota import WINDOW_S, Quota, Standing

_SLOT_RETRY_S = 1.0  # nobody knows when a running request ends; the OpenAI SDK waits longer each time from here


@dataclass(slots=True)
class _Entry:
    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What a running request has reserved."""

    tokens: int
    answers: int
    nanos: int


class _Window:
    """The log of one owner's last minute, oldest first, and what its running requests have reserved."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.window_tokens = 0
        self.held_by_id: dict[str, _Held] = {}

    @property
    def reserved(self) -> Reserved:
        held = self.held_by_id.values()
        return Reserved(sum(one.tokens for one in held), sum(one.nanos for one in held))

    @property
    def is_empty(self) -> bool:
        return not self.entries and not self.held_by_id

    def drop_old(self, now: float) -> None:
        """Drops the entries that are older than a minute."""
        while self.entries:
            entry_id, entry = next(iter(self.entries.items()))
            if entry.at + WINDOW_S > now:
                return
            del self.entries[entry_id]
            self.window_tokens -= entry.tokens

    @property
    def running_answers(self) -> int:
        return sum(one.answers for one in self.held_by_id.values())

    def add(self, entry_id: str, now: float, held: _Held) -> None:
        self.entries[entry_id] = _Entry(now, held.tokens)
        self.window_tokens += held.tokens
        self.held_by_id[entry_id] = held

    def finish(self, entry_id: str, actual_tokens: int | None) -> None:
        """Counts the request as no longer running, and sets its entry in the log to `actual_tokens`.

        If `actual_tokens` is None, the entry is removed. Later calls for the same entry have no effect.
        """
        if self.held_by_id.pop(entry_id, None) is None:
            return
        entry = self.entries.get(entry_id)
        if entry is None:
            return
        self.window_tokens += (actual_tokens or 0) - entry.tokens
        entry.tokens = actual_tokens or 0
        if actual_tokens is None:
            del self.entries[entry_id]

    def standing(self, now: float) -> Standing:
        newest = next(reversed(self.entries.values()), None)
        empty_in_s = newest.at + WINDOW_S - now if newest else 0.0
        return Standing(len(self.entries), self.window_tokens, empty_in_s)

    def check_integrity(self) -> None:
        """Checks that the running sum equals the sum of the entries, and that the log is in order."""
        entries = list(self.entries.values())
        assert self.window_tokens == sum(entry.tokens for entry in entries)
        assert all(earlier.at <= later.at for earlier, later in pairwise(entries))

    def waits(self, quota: Quota, tokens: int, answers: int, now: float) -> dict[str, float | None]:
        """Returns the limits that refuse one more request, each with the seconds until the request fits.

        None instead of seconds means that it never fits.
        """
        waits: dict[str, float | None] = {}
        if quota.requests_per_minute is not None and len(self.entries) >= quota.requests_per_minute:
            waits["requests_per_minute"] = self._until_count(quota.requests_per_minute - 1, now)
        if quota.tokens_per_minute is not None and self.window_tokens + tokens > quota.tokens_per_minute:
            waits["tokens_per_minute"] = self._until_tokens(quota.tokens_per_minute - tokens, now)
        most = quota.max_concurrent_requests
        if most is not None and self.running_answers + answers > most:
            waits["max_concurrent_requests"] = _SLOT_RETRY_S if answers <= most else None
        return waits

    def _until_count(self, count: int, now: float) -> float | None:
        """Returns the seconds until at most `count` entries are left; None if `count` is negative."""
        if count < 0:
            return None
        last_to_leave = list(self.entries.values())[len(self.entries) - count - 1]
        return last_to_leave.at + WINDOW_S - now

    def _until_tokens(self, tokens: int, now: float) -> float | None:
        """Returns the seconds until the entries have at most `tokens` tokens in all; None if `tokens` is negative."""
        if tokens < 0:
            return None
        left_tokens = self.window_tokens
        for entry in self.entries.values():
            left_tokens -= entry.tokens
            if left_tokens <= tokens:
                return entry.at + WINDOW_S - now
        raise AssertionError("an empty window holds no tokens")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LocalReservation:
    """One request's reservation in `LocalQuotaKeeper`. Implements `Reservation`."""

    entry_id: str
    windows: tuple[_Window, ...]
    """One for each owner."""
    limits: Limits
    standings: tuple[Standing, ...]

    def rate_limit_headers(self) -> dict[str, str]:
        return self.limits.headers(self.standings)

    async def settle(self, actual_tokens: int) -> None:
        for window in self.windows:
            window.finish(self.entry_id, actual_tokens)

    async def refund(self) -> None:
        for window in self.windows:
            window.finish(self.entry_id, None)


class LocalQuotaKeeper:
    """Implements `QuotaKeeper` in the memory of one gateway."""

    def __init__(self, clock: Clock, ledger: SpendLedger) -> None:
        self._clock = clock
        self._budget = MonthlyBudget(ledger, clock)
        self._window_by_owner: dict[str, _Window] = {}
        self._reservations: WeakValueDictionary[str, LocalReservation] = WeakValueDictionary()

    async def reserve(
        self, limits: Limits, estimated_tokens: int, answers: int = 1, cost: ReservedCost | None = None
    ) -> LocalReservation:
        now = self._clock.monotonic()
        windows = self._windows(limits, now)
        waits = [
            (owner, limit, wait)
            for owner, window in zip(limits.owners, windows, strict=True)
            for limit, wait in window.waits(owner.quota, estimated_tokens, answers, now).items()
        ]
        if waits:
            owner, limit, wait = max(waits, key=_longest)
            raise limits.exceeded(owner, limit, wait, [window.standing(now) for window in windows])
        reservation = self.note(limits, estimated_tokens, answers, cost)
        await self._budget.check(limits, cost, [window.reserved for window in windows], reservation)
        return reservation

    def note(self, limits: Limits, tokens: int, answers: int, cost: ReservedCost | None) -> LocalReservation:
        """Counts a request that another keeper has admitted, whatever the limits are."""
        entry_id, now = new_id("rsv"), self._clock.monotonic()
        windows = self._windows(limits, now)
        held = _Held(tokens, answers, 0 if cost is None else cost.nanos)
        for window in windows:
            window.add(entry_id, now, held)
        standings = tuple(window.standing(now) for window in windows)
        reservation = LocalReservation(entry_id, windows, limits, standings)
        self._reservations[entry_id] = reservation
        return reservation

    def _windows(self, limits: Limits, now: float) -> tuple[_Window, ...]:
        windows = tuple(self._window_by_owner.setdefault(owner.owner_id, _Window()) for owner in limits.owners)
        for window in windows:
            window.drop_old(now)
        return windows

    async def keep_alive(self) -> None:
        """Ends the reservations that nobody refers to any more. Their estimated tokens stay counted. Forgets owners that
        nothing is counted for.
        """
        now = self._clock.monotonic()
        for owner_id, window in tuple(self._window_by_owner.items()):
            for entry_id, held in tuple(window.held_by_id.items()):
                if entry_id not in self._reservations:
                    window.finish(entry_id, held.tokens)
            window.drop_old(now)
            if window.is_empty:
                del self._window_by_owner[owner_id]

    @property
    def num_owners(self) -> int:
        """The number of owners with a count."""
        return len(self._window_by_owner)

    async def close(self) -> None:
        """Does nothing, because this keeper has no connections."""

    def check_integrity(self) -> None:
        """Checks the counts of every owner. Raises AssertionError if a total differs from the sum of its requests."""
        for window in self._window_by_owner.values():
            window.check_integrity()


def _longest(refusal: tuple[OwnerLimits, str, float | None]) -> float:
    return float("inf") if refusal[2] is None else refusal[2]
