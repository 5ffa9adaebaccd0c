"""Holds the usage of a request whose answer and usage record are stored together, by whoever answers.

    journal   nothing: until the answer is stored, nobody has got anything of it
    close     the request has ended; its quota reservation stays
    stored    the caller has stored the answer and `row` in one transaction: counts, and settles the reservation
    drop      nothing was stored: gives back what was reserved
    note      instead of all this: a turn has answered the request, and its usage record was kept with it

Owns this order. Never stores a record. So work that a crash ends, or that has to be done again, costs nothing, and the
work whose answer is stored is billed exactly once.
"""

from collections.abc import Awaitable, Callable

from graftwork.platform.batches.batch import BatchUsage
from graftwork.platform.ledger.journal import NO_ENTRY, DeliveryCounts
from graftwork.platform.ledger.usage import UsageEvent, UsageOutcome
from graftwork.sessions.generation.usage import RequestAccount, Usage


class HeldAccount:
    """The account of one request, from the time at which it is opened."""

    def __init__(self, batch_id: str | None = None) -> None:
        """`batch_id` is the batch that the request belongs to; None for none."""
        self.batch_id = batch_id
        self._account: RequestAccount | None = None
        self._ended: tuple[Usage, UsageOutcome] | None = None
        self.was_admitted = False
        """Whether the engine has begun with the request."""
        self.noted: BatchUsage | None = None
        """What a turn has used that answers the request; None if none does."""
        self._noted_row: UsageEvent | None = None
        self._then: Callable[[], Awaitable[None]] | None = None

    @property
    def usage(self) -> Usage | None:
        """What is billed with the answer; None for nothing."""
        return None if self._ended is None else self._ended[0]

    def take(self, account: RequestAccount) -> None:
        """Takes the account of the request, which is open now."""
        self._account = account

    def journal(self) -> DeliveryCounts:
        return NO_ENTRY

    async def close(self, usage: Usage | None, outcome: UsageOutcome) -> None:
        """Keeps what the request has used, if it has ended with an answer or by its own fault. Else drops it at once."""
        self.was_admitted = usage is not None
        if usage is not None and outcome in (UsageOutcome.COMPLETED, UsageOutcome.FAILED):
            self._ended = (usage, outcome)
        elif (account := self._account) is not None:
            self._account = None
            await account.settle(None, outcome)

    def row(self) -> UsageEvent | None:
        """Returns the usage record to store with the answer; None if there is nothing to bill."""
        if self._noted_row is not None:
            return self._noted_row
        if self._account is None or self._ended is None:
            return None
        return self._account.row(*self._ended)

    def note(self, used: BatchUsage, row: UsageEvent | None, then: Callable[[], Awaitable[None]]) -> None:
        """Notes what the turn has used that answers the request. `then` is called when the answer and `row` are stored."""
        self.noted, self._noted_row, self._then = used, row, then

    async def stored(self) -> None:
        """Counts the usage, and charges the quota for it. Call it after the record is stored."""
        if self._then is not None:
            await self._then()
        account, self._account = self._account, None
        if account is not None and self._ended is not None:
            account.count(*self._ended)
            await account.settle(*self._ended)

    async def drop(self) -> None:
        """Gives back what was reserved, if nothing was stored. Does nothing after `stored`."""
        account, self._account = self._account, None
        if account is not None:
            await account.settle(None, UsageOutcome.CANCELLED)
