"""Finds the principal (the authenticated sender) to whom an API key or a console ticket belongs, and signs browsers in.

Owns the digest of the admin key, and the order of the checks: admin key, limit of wrong keys, database. Tickets of people
who are operators are checked by `platform/people/operators.py`; those of people in tenants are tickets of their keys.
Never changes a tenant or a key. A wrong key counts for the client's address (see `keys.py`); a ticket whose time is over
does not.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self, TypeVar

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.ids import TenantId
from graftwork.platform.keys.console_tickets import (
    ADMIN_ID,
    TICKET_EXPIRED,
    ConsoleTicket,
    parse_ticket,
    ticket_of_admin,
)
from graftwork.platform.keys.keys import KeyKind, key_digest
from graftwork.platform.keys.wrong_keys import WrongKeyLimit
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.platform.tenancy.verified_keys import RecentKeys

Checked = TypeVar("Checked")


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """One sign-in of a browser."""

    principal: Principal | AdminPrincipal
    ticket: str = field(repr=False)
    """The text that the browser's cookie holds."""
    csrf_token: str = field(repr=False)
    until: float
    """The time at which the ticket ends, in unix seconds."""


class AdminKey:
    """The operator's key, of which only the digest is kept, and the tickets for it."""

    def __init__(self, admin_key: str, pepper: bytes, clock: Clock) -> None:
        self._digest = key_digest(admin_key)
        self._pepper = pepper
        self._clock = clock

    def is_right(self, token: str) -> bool:
        """Returns whether `token` is the admin key or a ticket for it. Raises NotAuthenticated for an ended ticket."""
        ticket = parse_ticket(token)
        if ticket is None or ticket.kind is not KeyKind.ADMIN:
            return hmac.compare_digest(key_digest(token), self._digest)
        ticket.check_time(self._clock.now())
        return ticket.is_of(self._digest, self._pepper)

    def ticket_for(self, token: str) -> ConsoleTicket:
        """Returns a first ticket for the admin key, or the renewed one for a ticket. `token` has been checked."""
        ticket, now = parse_ticket(token), self._clock.now()
        if ticket is None:
            return ticket_of_admin(self._digest, now, self._pepper)
        return ticket.renewed(now, self._digest, self._pepper)

    def csrf_token(self, ticket: ConsoleTicket) -> str:
        return ticket.csrf_token(self._pepper)


class OperatorTickets(Protocol):
    """Knows the people who are operators."""

    async def find(self, ticket: ConsoleTicket) -> AdminPrincipal | None:
        """Returns the operator of a ticket whose time was checked, or None."""
        ...

    async def renew(self, ticket: ConsoleTicket) -> ConsoleTicket | None:
        """Returns the renewed ticket of an operator, or None."""
        ...


def _always() -> bool:
    return True


class Authenticator:
    """Finds the principal (the authenticated sender) to whom an API key belongs.

    `address` is the IP address of the client. Clients that send many wrong keys from one address are slowed down (see
    `keys.py`). A `token` is an API key, or a ticket that the console got for one.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        admin_key: AdminKey,
        wrong_keys: WrongKeyLimit,
        recent_keys: RecentKeys,
        clock: Clock,
        operators: OperatorTickets | None = None,
    ) -> None:
        """Without `operators`, only the admin key is an operator's."""
        self._tenancy = tenancy
        self._operators = operators
        self._clock = clock
        self._admin_key = admin_key
        self._wrong_keys = wrong_keys
        self._recent_keys = recent_keys

    @classmethod
    def of_gateway(
        cls,
        tenancy: Tenancy,
        admin_key: AdminKey,
        clock: Clock,
        max_wrong_keys: int,
        operators: OperatorTickets | None = None,
    ) -> Self:
        """Makes the authenticator of one gateway. An address may send `max_wrong_keys` wrong keys at once."""
        return cls(tenancy, admin_key, WrongKeyLimit(clock, max_wrong_keys), RecentKeys(clock), clock, operators)

    def recent_tenant(self, token: str) -> TenantId | None:
        """Returns the tenant of a key that was right seconds ago, without a read. Use it to refuse, never to allow."""
        return self._recent_keys.tenant_of(token)

    async def authenticate(self, token: str, address: str) -> Principal:
        """Returns the principal (the authenticated sender) to whom a tenant's API key belongs.

        Raises NotAuthenticated if the key is wrong, revoked or expired, NotPermitted for the admin key, a suspended tenant
        or an address that the key does not allow, and LimitExceeded if the client's address has sent too many wrong keys.
        """
        found = await self.authenticate_any(token, address)
        if isinstance(found, AdminPrincipal):
            message = "An operator cannot act here; use a tenant's key, or act in a tenant."
            raise NotPermitted(message, code="wrong_key_kind")
        return found

    async def authenticate_any(self, token: str, address: str) -> Principal | AdminPrincipal:
        """Returns the principal of a tenant's key or of an operator. Raises the errors of `authenticate`."""
        if self._admin_key.is_right(token):
            return AdminPrincipal()
        await self._wrong_keys.check(address, token)
        try:
            operator = await self._person(token)
            principal = operator or await self._tenancy.authenticate(token, address)
        except NotAuthenticated as error:
            if error.code != TICKET_EXPIRED:
                self._wrong_keys.note_wrong(address, token)
                self._recent_keys.note_wrong(token)
            raise
        self._wrong_keys.note_right(token)
        if isinstance(principal, Principal):
            self._recent_keys.note_right(token, principal.tenant_id)
        return principal

    async def check_other(self, token: str, address: str, check: Callable[[str], Awaitable[Checked]]) -> Checked:
        """Returns what `check` finds for a token that others have made, such as an ID token.

        A token that it refuses with NotAuthenticated counts as a wrong key. Raises what `check` raises, and LimitExceeded
        if the client's address has sent too many wrong keys.
        """
        await self._wrong_keys.check(address, token)
        try:
            return await check(token)
        except NotAuthenticated:
            self._wrong_keys.note_wrong(address, token)
            raise

    async def _person(self, token: str) -> AdminPrincipal | None:
        """Returns the person of an operator's ticket; None for any other text. Raises NotAuthenticated as `authenticate`."""
        ticket = _ticket_of_operator(token)
        if ticket is None or self._operators is None:
            return None
        ticket.check_time(self._clock.now())
        found = await self._operators.find(ticket)
        if found is None:
            raise _sign_in_ended()
        return found

    def recheck(self, principal: Principal | AdminPrincipal, token: str, address: str) -> Callable[[], bool] | None:
        """Returns a function that tells at any later time whether `token`, which has authenticated `principal`, still
        gives it the same rights. It reads no database, and says no where that is needed to know.

        Returns None for a ticket: authenticate its requests one by one.
        """
        if parse_ticket(token) is not None:
            return None
        if isinstance(principal, AdminPrincipal):
            return _always  # the admin key is that of the process
        return partial(self._tenancy.still_admits, principal, key_digest(token), address)

    async def authenticate_admin(self, token: str, address: str) -> AdminPrincipal:
        """Returns the operator whose key or ticket `token` is.

        Raises NotAuthenticated if the key is wrong, NotPermitted if it is a tenant's key, and LimitExceeded if the
        client's address has sent too many wrong keys.
        """
        try:
            found = await self.authenticate_any(token, address)
        except NotAuthenticated as error:
            if error.code != NotAuthenticated.default_code:
                raise
            raise NotAuthenticated("This admin key is not valid; check that it was copied whole.") from error
        if isinstance(found, Principal):
            raise NotPermitted("A tenant's key cannot be used here; use the admin key.", code="wrong_key_kind")
        return found

    async def open_session(self, principal: Principal | AdminPrincipal, token: str) -> ConsoleSession:
        """Returns a new session of the console for a key, or the renewed session for a ticket.

        `principal` is whom `token` has authenticated. Raises NotAuthenticated if the key was rotated meanwhile.
        """
        person = _ticket_of_operator(token)
        if person is not None and self._operators is not None:
            renewed = await self._operators.renew(person)
            if renewed is None:
                raise _sign_in_ended()
            ticket = renewed
        elif isinstance(principal, AdminPrincipal):
            ticket = self._admin_key.ticket_for(token)
        else:
            ticket = await self._tenancy.ticket_for(token)
        return ConsoleSession(principal, ticket.text, self._admin_key.csrf_token(ticket), float(ticket.until))

    def present_session(self, principal: Principal | AdminPrincipal, token: str) -> ConsoleSession:
        """Returns the session of a ticket that has been authenticated. Raises NotAuthenticated for a key."""
        ticket = parse_ticket(token)
        if ticket is None:
            raise NotAuthenticated("Sign in to the console first.", code="missing_console_session")
        return ConsoleSession(principal, token, self._admin_key.csrf_token(ticket), float(ticket.until))

    def is_csrf_token(self, token: str, ticket: str) -> bool:
        """Returns whether `token` is the one that state-changing requests with this ticket must carry."""
        parsed = parse_ticket(ticket)
        return parsed is not None and hmac.compare_digest(
            token.encode("utf-8", "surrogateescape"), self._admin_key.csrf_token(parsed).encode()
        )


def _ticket_of_operator(token: str) -> ConsoleTicket | None:
    """Returns the parts of a ticket of a person who is an operator; None for any other text. Checks nothing."""
    ticket = parse_ticket(token)
    is_person = ticket is not None and ticket.kind is KeyKind.ADMIN and ticket.public_id != ADMIN_ID
    return ticket if is_person else None


def _sign_in_ended() -> NotAuthenticated:
    return NotAuthenticated(
        "Your sign-in has ended: your role was taken back, or you are suspended.", code="access_ended"
    )
