"""Finds the people who act as operators, by their tickets.

Each request of such a person reads the person's row: there are few of them, and a role that is taken back, or a
suspension, holds at the next request on every gateway.
"""

from functools import partial

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.keys.console_tickets import ConsoleTicket
from graftwork.platform.people.person import person_id_of
from graftwork.platform.people.repository import find_operator
from graftwork.platform.people.roles import Role
from graftwork.platform.tenancy.principals import AdminPrincipal


class Operators:
    """The people with an operator's role. `pepper` seals their tickets."""

    def __init__(self, database: Database, clock: Clock, pepper: bytes) -> None:
        self._database = database
        self._clock = clock
        self._pepper = pepper

    async def find(self, ticket: ConsoleTicket) -> AdminPrincipal | None:
        """Returns the operator of a ticket whose time was checked. None if the role is gone or the seal is wrong."""
        person_id = person_id_of(ticket.public_id)
        role, key_hash = await self._read(ticket)
        if not ticket.is_of(key_hash, self._pepper):
            return None
        return AdminPrincipal(person_id, person_id, may_change=role is Role.OPERATOR)

    async def renew(self, ticket: ConsoleTicket) -> ConsoleTicket | None:
        """Returns the renewed ticket of an operator; None as `find`."""
        _, key_hash = await self._read(ticket)
        if key_hash is None or not ticket.is_of(key_hash, self._pepper):
            return None
        return ticket.renewed(self._clock.now(), key_hash, self._pepper)

    async def _read(self, ticket: ConsoleTicket) -> tuple[Role | None, bytes | None]:
        find = partial(find_operator, person_id=person_id_of(ticket.public_id))
        return await self._database.read_few(find) or (None, None)
