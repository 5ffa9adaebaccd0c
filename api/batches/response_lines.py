"""Answers the lines of batches that are requests to `/v1/responses`. Each is a turn, as at the route.

    the line's own key ──► begun before? ──no──► turn ──► the response's body
                                └─────yes──► the same turn ──┘

A turn is stored and billed in its own transaction, before the batch stores the line's answer. So that a crash between
the two bills nothing twice, each line has an idempotency key, which the transaction that begins a turn records: whoever
answers the line later finds the turn. A turn of a batch that breaks off costs nothing (see RequestAccount).
Never stores an answer: the runner does.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from graftwork.api.batches.line_work import Json, LineWork, refuse_field
from graftwork.api.deps.resources import SessionResources
from graftwork.api.formats.responses import named_tools
from graftwork.api.http.validation import checked_body
from graftwork.api.inference.request import served_tier
from graftwork.api.schemas.responses import ResponseRequest
from graftwork.platform.batches.batch import BatchUsage
from graftwork.platform.errors import Conflict, NotFound, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.tenancy.idempotency import IdempotencyStore, StoredReply, TurnClaim
from graftwork.sessions.responses.handle import ResponseHandle
from graftwork.sessions.responses.record import NewResponse

_KEY_PREFIX = "batch\n"
"""Begins the keys of lines. No client's key begins so, because a header has one line."""


class ResponseLines:
    """Answers requests to `/v1/responses` that are lines of batches."""

    def __init__(self, sessions: SessionResources, keys: IdempotencyStore) -> None:
        self._responses = sessions.responses
        self._keys = keys

    async def answer(self, work: LineWork) -> Json:
        """Returns the response of a line. Raises the errors of the route, and Unavailable if it is to be tried again."""
        body = checked_body(ResponseRequest, work.body)
        refuse_field("stream", body.stream, "A request of a batch has no stream")
        refuse_field("background", body.background, "A batch runs in the background as a whole")
        order = body.order(served_tier(work.principal, body.service_tier))
        refuse_field(
            "conversation", order.conversation_id, "Requests of a batch run in any order, so they are no turns of one"
        )
        run, reply = await self._run_of(work, order)
        try:
            result = await run.result()
        except BaseException:
            run.cancel()
            raise
        work.held.was_admitted = True
        if result["status"] == "cancelled" or await self._responses.failed_by_server(work.principal, result["id"]):
            await self._keys.forget(reply)
            await run.discard()
            error = result.get("error") or {}
            message = error.get("message") or "The response was cancelled before its end."
            raise Unavailable(message, code=error.get("code") or "response_cancelled")
        work.held.note(_usage_of(result), run.release)
        return result

    async def _run_of(self, work: LineWork, order: NewResponse) -> tuple[ResponseHandle, StoredReply]:
        """Returns the line's response, and under which key it is found again. Starts it if nobody has."""
        principal, key = work.principal, f"{_KEY_PREFIX}{work.held.batch_id}\n{work.number}"
        try:
            begun = await self._keys.begin(principal.tenant_id, key, hashlib.sha256(key.encode()).hexdigest())
        except Conflict as error:  # another gateway has begun with the line, and its lease has not ended
            raise Unavailable(error.message, retry_after_s=error.retry_after_s) from error
        if isinstance(begun, StoredReply):
            try:
                return await self._responses.resume(principal, order, TurnId(json.loads(begun.body))), begun
            except NotFound:
                await self._keys.forget(begun)
                raise Unavailable("The response of this request was deleted; it is made anew.") from None
        claim = TurnClaim(begun, _body_of, work.held.batch_id)
        try:
            with named_tools(order.tool_paths):
                run = await self._responses.create(replace(principal, turn_claim=claim), order)
        except BaseException:
            await self._keys.abandon(begun)
            raise
        reply = StoredReply(200, b"", begun)
        try:
            await run.admitted()
        except BaseException:
            run.cancel()
            with suppress(Unavailable):
                await self._keys.forget(reply)
            raise
        return run, reply


def _body_of(_: SessionId, turn_id: TurnId) -> bytes:
    return json.dumps(turn_id).encode()


def _usage_of(response: dict[str, Any]) -> BatchUsage:
    used = response["usage"]
    if used is None:
        return BatchUsage()
    cached, reasoning = (
        used["input_tokens_details"]["cached_tokens"],
        used["output_tokens_details"]["reasoning_tokens"],
    )
    return BatchUsage(used["input_tokens"], cached, used["output_tokens"], reasoning)
