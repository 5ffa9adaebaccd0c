"""Knows which work of this process runs for which tenant and API key, and ends it when they lose their access.

Work is whatever a principal has started and that goes on without asking for its key again: an answer that is generated,
or a turn of a session. Owns the list of it. Never decides who has access: `tenancy.py` does.
Invariant: work is in the list from its start to its end, so that nothing that runs is overlooked.
"""

from collections.abc import Callable
from dataclasses import dataclass

from graftwork.platform.database import Database
from graftwork.platform.errors import NotPermitted
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.principals import Principal

EndWork = Callable[[NotPermitted], None]
"""A function that cancels one piece of work. It does not wait. The error is what the client of the work gets."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    tenant_id: TenantId
    key_id: KeyId
    end: EndWork


class RunningWork:
    """The work that runs in this process, of all tenants."""

    def __init__(self) -> None:
        self._running: set[_Work] = set()

    @property
    def key_ids(self) -> frozenset[KeyId]:
        """The ids of the API keys with which the running work was started."""
        return frozenset(work.key_id for work in self._running)

    def add(self, principal: Principal, end: EndWork) -> Callable[[], None]:
        """Adds work that `principal` has started. Returns a function to call when the work has ended."""
        work = _Work(principal.tenant_id, principal.key_id, end)
        self._running.add(work)
        return lambda: self._running.discard(work)

    def end_tenant(self, tenant_id: TenantId) -> int:
        """Cancels all work of a tenant. Does not wait for its end. Returns how many pieces of work it has cancelled."""
        return self._end([work for work in self._running if work.tenant_id == tenant_id])

    def end_key(self, key_id: KeyId) -> int:
        """Cancels all work that was started with an API key, as `end_tenant` does."""
        return self._end([work for work in self._running if work.key_id == key_id])

    def _end(self, lost: list[_Work]) -> int:
        for work in lost:
            work.end(_access_ended())
        return len(lost)


class AccessWatch:
    """Ends the work of this process that has lost its access by a change in another process."""

    def __init__(self, database: Database, work: RunningWork) -> None:
        self._database = database
        self._work = work

    async def check(self) -> int:
        """Asks the database which keys of running work are still usable, and cancels the other work.

        Call it every second. Returns how many pieces of work it has cancelled.
        """
        key_ids = self._work.key_ids
        if not key_ids:
            return 0
        async with self._database.read() as session:
            usable = await repository.find_usable_keys(session, key_ids)
        return sum(self._work.end_key(key_id) for key_id in key_ids - usable)


def _access_ended() -> NotPermitted:
    return NotPermitted(
        "The access of this API key has ended while the request ran: the key was revoked, or its tenant was suspended "
        "or deleted. Ask the operator.",
        code="access_ended",
    )
