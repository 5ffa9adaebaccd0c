"""Answers kept under an `Idempotency-Key`, so that a request sent twice is done once.

    begin ──► Attempt ──► complete(status, body)    the next request with the key and the body gets this answer
      │          └──────► abandon()                 it failed; the key is free again
      └─────► StoredReply                           it was done before

Keys belong to an owner (a tenant's id, or `admin`), so nobody meets another's. Answers are kept for a day.
Never keeps a secret: whoever answers with one, a new API key, must not complete with that body.
"""

from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest
from graftwork.platform.ids import new_id
from graftwork.platform.tenancy import repository

ANSWER_LIFE_S = 24 * 3600.0
ATTEMPT_LIFE_S = 600.0
"""After this an attempt that never answered is taken for dead, and the key for free."""

_MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Attempt:
    """The right to do the work of a key, once."""

    owner: str
    key: str
    claim: str


@dataclass(frozen=True, slots=True)
class StoredReply:
    """What was answered when the work was done."""

    status: int
    body: bytes


class IdempotencyStore:
    """The keys in use, in SQL, so that every gateway sees them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def begin(self, owner: str, key: str, request_digest: str) -> Attempt | StoredReply:
        """Claim the key, or learn what it answered. `request_digest` is hex SHA-256 over method, path and body.

        Raises Conflict when the key came with another request, or its first request is still running.
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
            "request_digest": request_digest,
            "created_at": now,
        }
        async with self._database.write() as session:
            await repository.drop_lapsed_idempotency_key(
                session, owner, key, answered_before=now - ANSWER_LIFE_S, begun_before=now - ATTEMPT_LIFE_S
            )
            if await repository.claim_idempotency_key(session, values):
                return attempt
            row = await repository.find_idempotency_key(session, owner, key)
            held = (row.request_digest, row.status, row.body)
        return _reply(request_digest, *held)

    async def complete(self, attempt: Attempt, status: int, body: bytes) -> None:
        """Keep the answer for whoever sends the request again."""
        async with self._database.write() as session:
            values = {"status": status, "body": body}
            await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values)

    async def abandon(self, attempt: Attempt) -> None:
        """Free the key: nothing was done."""
        async with self._database.write() as session:
            await repository.free_idempotency_key(session, attempt.owner, attempt.key, attempt.claim)

    async def sweep(self) -> int:
        """Forget every key that would be free if it were asked for again, and return how many there were."""
        now = self._clock.now()
        async with self._database.write() as session:
            return await repository.drop_lapsed_idempotency_keys(
                session, answered_before=now - ANSWER_LIFE_S, begun_before=now - ATTEMPT_LIFE_S
            )


def _reply(request_digest: str, held_digest: str, status: int | None, body: bytes | None) -> StoredReply:
    """The stored answer, if the request is the same and was answered."""
    if held_digest != request_digest:
        raise Conflict(
            "This Idempotency-Key was used for another request; use a new key for a new request.",
            code="idempotency_key_reused",
        )
    if status is None or body is None:
        raise Conflict(
            "The first request with this Idempotency-Key is still running; ask again shortly.",
            code="idempotency_key_in_use",
            retry_after_s=1.0,
        )
    return StoredReply(status, body)
