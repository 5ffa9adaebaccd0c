"""Stores the answers of requests that have an `Idempotency-Key`, so that a request that is sent twice is executed only
once.

    begin ──► Attempt ──► complete(status, body)    a later request with the same key and body gets this answer
      │          │  └──► TurnClaim.record_turn      the same, with the turn that the request started
      │          └─────► abandon()                  the request failed; the key is free again
      └─────► StoredReply                           the request was executed before
                 └─────► forget()                   its work failed through the server's fault; the key is free again

Each key belongs to an owner: a tenant's id, or `admin`. Two owners may use the same key for different requests. Answers
are kept for a day. Never stores a secret: a route that answers with a new API key must not pass that answer to
`complete`.

An attempt is valid for as long as its gateway is alive, see `gateways/lease.py`. `keep_alive` renews this lease, and
repeats what the database has not stored. Invariant: of all attempts with one key, at most one starts a turn, even if a
gateway that counted as dead goes on: the transaction that stores the turn also checks the attempt.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.contents.rows import row_opener, row_sealer
from graftwork.platform.database import Database, ReadSession, WriteSession
from graftwork.platform.errors import Conflict, InvalidRequest, NotPermitted, Unavailable
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ids import RequestId, SessionId, TenantId, TurnId, new_id
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.tables import IdempotencyRow

ANSWER_LIFE_S = 24 * 3600.0

_MAX_KEY_CHARACTERS = 255
_BEGUN_STATUS = 200
_FREEING_ROUNDS = 3
"""How often a lost attempt is deleted. A commit that a stall delayed may store it after the first time."""
_FREED_PER_ROUND = 500
_MAX_LOST = 10_000
_RENEWED_WITHIN_LEASES = 1 / 3

_log = logging.getLogger(__name__)


class ClaimLost(Conflict):
    """Raised if another request has taken over the idempotency key. The caller must not execute the request."""

    default_code = "idempotency_key_lost"

    def __init__(self) -> None:
        super().__init__(
            "This server did not answer for so long that another one took over the Idempotency-Key; send the request "
            "again to get its answer.",
            retry_after_s=1.0,
        )


@dataclass(frozen=True, slots=True)
class Attempt:
    """The permission to execute one request under an idempotency key. Only one attempt at a time has a key."""

    owner: str
    key: str
    claim: str


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The stored answer of a request that was executed before: its HTTP status and its body."""

    status: int
    body: bytes
    attempt: Attempt = field(compare=False)
    """The attempt that has executed the request."""


@dataclass(frozen=True, slots=True)
class TurnClaim:
    """An attempt at a request that starts a turn.

    `body_of` makes the body to store for the ids of a session and its turn. It must identify the turn.
    """

    attempt: Attempt
    body_of: Callable[[SessionId, TurnId], bytes]
    line: "LineOfBatch | None" = None
    """The line of a batch that the request is; None for a client's own request."""

    async def record_turn(self, session: WriteSession, session_id: SessionId, turn_id: TurnId) -> None:
        """Stores that the turn answers the request. Call this in the transaction that stores the turn.

        Raises ClaimLost if another request has the key now.
        """
        attempt = self.attempt
        plain = {"body": self.body_of(session_id, turn_id), "gateway": None}
        values = await _sealed(session, attempt, plain)
        if not await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values):
            raise ClaimLost

    async def keep_usage(self, session: WriteSession, turn_id: TurnId, usage: object) -> None:
        """Keeps the usage record of a line's turn with the key, for whoever stores the line's answer with this record.

        Call this in the transaction that ends the turn. Does nothing if another attempt has the key now: then nobody
        stores an answer of this turn.
        """
        assert self.line is not None, "a client's own request is billed with its turn"
        attempt = self.attempt
        values = await _sealed(session, attempt, {"body": self.line.body_with(turn_id, usage)})
        await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values)


@dataclass(frozen=True, slots=True)
class LineOfBatch:
    """A line of a batch whose request a turn answers. The turn is billed when the line's answer is stored, and only then."""

    batch_id: str
    request_id: RequestId
    """The id of the request at the engine and in the ledger."""
    body_with: Callable[[TurnId, Any], bytes]
    """Makes the body to store for the ids of the turn and its usage record."""


class IdempotencyStore:
    """Manages the idempotency keys of all tenants and of the administrator. The keys are in SQL, so all gateways share
    them.
    """

    def __init__(self, database: Database, clock: Clock, lease: GatewayLease) -> None:
        """`lease` is the lease of this gateway. This store renews it."""
        self._database = database
        self._clock = clock
        self._lease = lease
        self._unstored: dict[Attempt, dict[str, Any]] = {}
        """Attempts whose answers the database has not stored, with the row's values."""
        self._lost: dict[Attempt, int] = {}
        """Attempts that nobody pursues and that the database may hold, with the number of times to delete them."""

    async def open(self) -> None:
        """Frees the keys of this gateway's former process, if it was killed. Then renews the lease: see `keep_alive`."""
        try:
            async with self._database.write() as session:
                await self._lease.take_over(session)
        except Unavailable:
            _log.warning("former_gateway_lease_not_ended", exc_info=True)
        await self.keep_alive()

    async def begin(self, owner: str, key: str, request_digest: str) -> Attempt | StoredReply:
        """Reserves the key for this request and returns an Attempt. If the request was executed before, returns the
        stored answer.

        `request_digest` is the SHA-256 of method, path and body, in hex. Raises Conflict if the key was used for a
        different request, or if the first request with the key is still running. Raises InvalidRequest if the key is
        empty or too long.
        """
        if not 0 < len(key) <= _MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"An Idempotency-Key has 1 to {_MAX_KEY_CHARACTERS} characters.", param="Idempotency-Key"
            )
        now = self._clock.now()
        attempt = Attempt(owner, key, new_id("idm"))
        values = {
            "owner": owner,
            "key": key,
            "claim": attempt.claim,
            "gateway": self._lease.gateway_id,
            "request_digest": request_digest,
            "created_at": now,
        }
        try:
            async with self._database.write() as session:
                await repository.drop_lapsed_idempotency_key(session, owner, key, now - ANSWER_LIFE_S, self._lease)
                if await repository.claim_idempotency_key(session, values):
                    return attempt
                row = await repository.find_idempotency_key(session, owner, key)
                body = await _opened(session, row)
                held = (row.request_digest, Attempt(owner, key, row.claim), row.status, body)
        except BaseException:  # also when the caller is cancelled: the database may have stored the attempt
            self._note_lost(attempt)
            raise
        return _reply(request_digest, *held)

    async def complete(self, attempt: Attempt, status: int, body: bytes) -> None:
        """Stores the answer of an executed request. If the client sends the request again, `begin` returns this answer.

        If the database does not answer, `keep_alive` stores the answer later.
        """
        self._unstored[attempt] = {"status": status, "body": body, "gateway": None}
        try:
            await self._store(attempt)
        except Unavailable:
            _log.warning("idempotent_answer_waits", extra={"owner": attempt.owner}, exc_info=True)

    async def abandon(self, attempt: Attempt) -> None:
        """Frees the key of a request that failed. The client may send the request again under the same key.

        If the database does not answer, `keep_alive` frees the key later.
        """
        self._note_lost(attempt)
        try:
            async with self._database.write() as session:
                await repository.free_idempotency_key(session, attempt.owner, attempt.key, attempt.claim)
        except Unavailable:
            _log.warning("idempotency_key_waits", extra={"owner": attempt.owner}, exc_info=True)
        else:
            self._lost.pop(attempt, None)

    async def forget(self, reply: StoredReply) -> None:
        """Deletes a stored answer, because the work that it names failed through the server's fault."""
        attempt = reply.attempt
        async with self._database.write() as session:
            await repository.free_idempotency_key(
                session, attempt.owner, attempt.key, attempt.claim, also_answered=True
            )

    async def keep_alive(self) -> None:
        """Renews this gateway's lease. Then stores the answers, and frees the keys, that could not be stored or freed
        before.

        Call this several times in the length of a lease. If the database does not answer, logs a warning.
        """
        try:
            async with asyncio.timeout(self._lease.lease_s * _RENEWED_WITHIN_LEASES):
                async with self._database.write() as session:
                    await self._lease.renew(session)
                for attempt in tuple(self._unstored):
                    await self._store(attempt)
                await self._free_lost()
        except (Unavailable, TimeoutError):
            _log.warning("gateway_lease_not_renewed", exc_info=True)

    async def close(self) -> None:
        """Stores and frees what is left, and ends this gateway's lease."""
        await self.keep_alive()
        try:
            await self._lease.end(self._database)
        except Unavailable:
            _log.warning("gateway_lease_not_ended", exc_info=True)

    async def sweep(self) -> int:
        """Deletes all idempotency keys whose stored answer is too old, or whose attempt has no gateway any more.

        Returns the number of deleted keys.
        """
        async with self._database.write() as session:
            await self._lease.sweep(session)
            return await repository.drop_lapsed_idempotency_keys(
                session, self._clock.now() - ANSWER_LIFE_S, self._lease
            )

    async def _store(self, attempt: Attempt) -> None:
        plain = self._unstored.get(attempt)
        if plain is None:
            return  # another call has stored it meanwhile
        with suppress(NotPermitted):  # the tenant is deleted, and asks for no answer
            async with self._database.write() as session:
                values = await _sealed(session, attempt, plain)
                await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values)
        self._unstored.pop(attempt, None)

    async def _free_lost(self) -> None:
        lost = tuple(islice(self._lost, _FREED_PER_ROUND))
        if not lost:
            return
        async with self._database.write() as session:
            for attempt in lost:
                await repository.free_idempotency_key(session, attempt.owner, attempt.key, attempt.claim)
        for attempt in lost:
            rounds_left = self._lost.pop(attempt, 1) - 1
            if rounds_left:
                self._lost[attempt] = rounds_left

    def _note_lost(self, attempt: Attempt) -> None:
        self._lost[attempt] = _FREEING_ROUNDS
        if len(self._lost) > _MAX_LOST:
            self._lost.pop(next(iter(self._lost)))


async def _sealed(session: WriteSession, attempt: Attempt, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of an answered row as they are stored. Raises NotPermitted if the tenant is deleted."""
    tenant_id = _tenant_of(attempt.owner)
    if tenant_id is None:
        return values
    return (await row_sealer(session, tenant_id)).sealed(IdempotencyRow, values, attempt.owner, attempt.key)


async def _opened(session: ReadSession, row: IdempotencyRow) -> bytes | None:
    """Returns the stored body of an answer. Raises InternalFailure if it cannot be decrypted."""
    tenant_id = _tenant_of(row.owner)
    if tenant_id is None:
        return row.body
    opener = await row_opener(session, tenant_id)
    body: bytes | None = opener.opened(IdempotencyRow, "body", row.body, row.owner, row.key)
    return body


def _tenant_of(owner: str) -> TenantId | None:
    """Returns the tenant that owns a key. None for an operator: the answers of operators stay plain."""
    return TenantId(owner) if owner.startswith("ten_") else None


def _reply(
    request_digest: str, held_digest: str, attempt: Attempt, status: int | None, body: bytes | None
) -> StoredReply:
    """Returns the stored answer. Raises Conflict if the request differs or still runs."""
    if held_digest != request_digest:
        raise Conflict(
            "This Idempotency-Key was used for another request; use a new key for a new request.",
            code="idempotency_key_reused",
        )
    if body is None:
        raise Conflict(
            "The first request with this Idempotency-Key is still running; ask again shortly.",
            code="idempotency_key_in_use",
            retry_after_s=1.0,
        )
    return StoredReply(_BEGUN_STATUS if status is None else status, body, attempt)
