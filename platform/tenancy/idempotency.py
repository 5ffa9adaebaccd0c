"""Stores answers under an `Idempotency-Key`, so that a request that is sent twice is done only once.

    begin ──► Attempt ──► complete(status, body)    the next request with the key and the body gets this answer
      │          └──────► abandon()                 it failed; the key is free again
      └─────► StoredReply                           it was done before

Each key belongs to an owner: a tenant's id, or `admin`. Owners never see each other's keys. Answers are kept for a day.
Never keeps a secret: a route that answers with a new API key must not pass that body to `complete`.
"""

from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest
from graftwork.platform.ids import new_id
from graftwork.platform.tenancy import repository

ANSWER_LIFE_S = 24 * 3600.0
ATTEMPT_LIFE_S = 600.0
"""Seconds after which an attempt without an answer counts as failed. Then the key is free again."""

_MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Attempt:
    """The right to run the request of one key."""

    owner: str
    key: str
    claim: str


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The answer that was stored when the work was done."""

    status: int
    body: bytes


class IdempotencyStore:
    """Owns all keys in use. The keys are in SQL, so every gateway sees them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def begin(self, owner: str, key: str, request_digest: str) -> Attempt | StoredReply:
        """Reserves a free key for this request, or returns the stored answer.

        `request_digest` is the SHA-256 over method, path and body, in hex.

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
        """Stores the answer. A caller that sends the request again gets this answer."""
        async with self._database.write() as session:
            values = {"status": status, "body": body}
            await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values)

    async def abandon(self, attempt: Attempt) -> None:
        """Frees the key, because the work was not done."""
        async with self._database.write() as session:
            await repository.free_idempotency_key(session, attempt.owner, attempt.key, attempt.claim)

    async def sweep(self) -> int:
        """Deletes every key that is free again, and returns how many were deleted."""
        now = self._clock.now()
        async with self._database.write() as session:
            return await repository.drop_lapsed_idempotency_keys(
                session, answered_before=now - ANSWER_LIFE_S, begun_before=now - ATTEMPT_LIFE_S
            )


def _reply(request_digest: str, held_digest: str, status: int | None, body: bytes | None) -> StoredReply:
    """Returns the stored answer. Raises Conflict if the request differs or still runs."""
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
