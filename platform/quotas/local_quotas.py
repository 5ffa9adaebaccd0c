"""Counts, in the memory of this process, how much of its limits each tenant has used.

The counts are exact if there is only one gateway, and are lost when the gateway ends. Owns, for each tenant, a log of
the requests of the last minute, and the requests that run now. A request runs until its reservation is ended, or until
nothing refers to its reservation any more. Invariant: between the check of a limit and the change of its count there is
no await, so no other request can come between them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

from graftwork.platform.clock import Clock
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.quotas.quota import WINDOW_S, MonthlyBudget, Quota, Standing, TokenLedger, limit_exceeded

_SLOT_RETRY_S = 1.0  # nobody knows when a running request ends; the OpenAI SDK waits longer each time from here


@dataclass(slots=True)
class _Entry:
    at: float
    tokens: int


class _TenantWindow:
    """The log of one tenant's last minute, oldest first, and the tokens that its running requests have reserved."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.window_tokens = 0
        self.held_by_id: dict[str, int] = {}
        self.answers_by_id: dict[str, int] = {}

    @property
    def held_tokens(self) -> int:
        return sum(self.held_by_id.values())

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
        return sum(self.answers_by_id.values())

    def add(self, entry_id: str, now: float, tokens: int, answers: int) -> None:
        self.entries[entry_id] = _Entry(now, tokens)
        self.window_tokens += tokens
        self.held_by_id[entry_id] = tokens
        self.answers_by_id[entry_id] = answers

    def finish(self, entry_id: str, actual_tokens: int | None) -> None:
        """Counts the request as no longer running, and sets its entry in the log to `actual_tokens`.

        If `actual_tokens` is None, the entry is removed. Later calls for the same entry have no effect.
        """
        if self.held_by_id.pop(entry_id, None) is None:
            return
        del self.answers_by_id[entry_id]
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
        assert self.answers_by_id.keys() == self.held_by_id.keys()
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
    window: _TenantWindow
    quota: Quota
    standing: Standing

    def rate_limit_headers(self) -> dict[str, str]:
        return self.standing.headers(self.quota)

    async def settle(self, actual_tokens: int) -> None:
        self.window.finish(self.entry_id, actual_tokens)

    async def refund(self) -> None:
        self.window.finish(self.entry_id, None)


class LocalQuotaKeeper:
    """Implements `QuotaKeeper` in the memory of one gateway."""

    def __init__(self, clock: Clock, ledger: TokenLedger) -> None:
        self._clock = clock
        self._budget = MonthlyBudget(ledger, clock)
        self._window_by_tenant: dict[TenantId, _TenantWindow] = {}
        self._reservations: WeakValueDictionary[str, LocalReservation] = WeakValueDictionary()

    async def reserve(
        self, tenant_id: TenantId, quota: Quota, estimated_tokens: int, answers: int = 1
    ) -> LocalReservation:
        now = self._clock.monotonic()
        window = self._window_by_tenant.setdefault(tenant_id, _TenantWindow())
        window.drop_old(now)
        waits = window.waits(quota, estimated_tokens, answers, now)
        if waits:
            limit, wait = max(waits.items(), key=_longest)
            raise limit_exceeded(quota, limit, wait, window.standing(now))
        reservation = self._add(window, quota, estimated_tokens, answers)
        await self._budget.check(tenant_id, quota, window.held_tokens, reservation)
        return reservation

    def note(self, tenant_id: TenantId, quota: Quota, tokens: int, answers: int) -> LocalReservation:
        """Counts a request that another keeper has admitted, whatever the limits are."""
        window = self._window_by_tenant.setdefault(tenant_id, _TenantWindow())
        window.drop_old(self._clock.monotonic())
        return self._add(window, quota, tokens, answers)

    def _add(self, window: _TenantWindow, quota: Quota, tokens: int, answers: int) -> LocalReservation:
        entry_id, now = new_id("rsv"), self._clock.monotonic()
        window.add(entry_id, now, tokens, answers)
        reservation = LocalReservation(entry_id, window, quota, window.standing(now))
        self._reservations[entry_id] = reservation
        return reservation

    async def keep_alive(self) -> None:
        """Ends the reservations that nobody refers to any more. Their estimated tokens stay counted."""
        for window in self._window_by_tenant.values():
            for entry_id, tokens in tuple(window.held_by_id.items()):
                if entry_id not in self._reservations:
                    window.finish(entry_id, tokens)

    async def close(self) -> None:
        """Does nothing, because this keeper has no connections."""

    def check_integrity(self) -> None:
        """Checks the counts of every tenant. Raises AssertionError if a total differs from the sum of its requests."""
        for window in self._window_by_tenant.values():
            window.check_integrity()


def _longest(wait: tuple[str, float | None]) -> float:
    return float("inf") if wait[1] is None else wait[1]
