"""Stores the answers of requests that have an `Idempotency-Key`, so that a request that is sent twice is executed only
once.

    begin ──► Attempt ──► complete(status, body)    a later request with the same key and body gets this answer
      │          └──────► abandon()                 the request failed; the key is free again
      └─────► StoredReply                           the request was executed before

Each key belongs to an owner: a tenant's id, or `admin`. Two owners may use the same key for different requests. Answers
are kept for a day. Never stores a secret: a route that answers with a new API key must not pass that answer to
`complete`.
"""

from dataclasses import dataclass

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest
from graftwork.platform.ids import new_id
from graftwork.platform.tenancy import repository

ANSWER_LIFE_S = 24 * 3600.0
ATTEMPT_LIFE_S = 600.0
"""The seconds after which a request without an answer counts as failed. Then its key is free again."""

_MAX_KEY_CHARACTERS = 255


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


class IdempotencyStore:
    """Manages the idempotency keys of all tenants and of the administrator. The keys are in SQL, so all gateways share
    them.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

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
        """Stores the answer of an executed request. If the client sends the request again, `begin` returns this answer."""
        async with self._database.write() as session:
            values = {"status": status, "body": body}
            await repository.answer_idempotency_key(session, attempt.owner, attempt.key, attempt.claim, values)

    async def abandon(self, attempt: Attempt) -> None:
        """Frees the key of a request that failed. The client may send the request again under the same key."""
        async with self._database.write() as session:
            await repository.free_idempotency_key(session, attempt.owner, attempt.key, attempt.claim)

    async def sweep(self) -> int:
        """Deletes all idempotency keys whose stored answer, or whose attempt without an answer, is too old.

        Returns the number of deleted keys.
        """
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
