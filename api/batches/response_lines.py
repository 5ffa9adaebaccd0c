"""Answers the lines of batches that are requests to `/v1/responses`. Each is a turn, as at the route.

    the line's own key ──► begun before? ──no──► turn ──► the response's body
                                └─────yes──► the same turn ──┘

A turn is stored in its own transactions, before the batch stores the line's answer. Each line has an idempotency key: the
transaction that begins a turn records the turn there, and the one that ends it keeps its usage record there. Whoever
answers the line later finds both, and the runner stores the record with the line's answer. So a turn is made once where
that is possible, and is billed exactly if its line is answered by it. Never stores an answer: the runner does.
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
from graftwork.platform.errors import Conflict, GraftworkError, NotFound, Unavailable
from graftwork.platform.ids import SessionId, TurnId
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.tenancy.idempotency import Attempt, IdempotencyStore, LineOfBatch, StoredReply, TurnClaim
from graftwork.sessions.responses.handle import ResponseHandle
from graftwork.sessions.responses.record import NewResponse, turn_of

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
        row = await self._usage_row(work, turn_of(result["id"]))
        work.held.note(_usage_of(result), row, run.release)
        return result

    async def _usage_row(self, work: LineWork, turn_id: TurnId) -> UsageEvent | None:
        """Returns the usage record of the turn that has answered the line; None if it has used nothing.

        Raises Unavailable if the line is now that of another turn.
        """
        reply = await self._begin(work)
        if isinstance(reply, Attempt):
            await self._keys.abandon(reply)
        kept = json.loads(reply.body) if isinstance(reply, StoredReply) else {}
        if kept.get("turn") != turn_id:
            raise Unavailable("Another gateway has given up this response; it is made anew.")
        fields = kept.get("usage")
        return None if fields is None else UsageEvent.from_json(fields)

    async def _begin(self, work: LineWork) -> Attempt | StoredReply:
        """Returns what is known under the line's key, or the permission to begin with the line."""
        key = f"{_KEY_PREFIX}{work.held.batch_id}\n{work.number}"
        try:
            return await self._keys.begin(work.principal.tenant_id, key, hashlib.sha256(key.encode()).hexdigest())
        except Conflict as error:  # another gateway has begun with the line, and its lease has not ended
            raise Unavailable(error.message, retry_after_s=error.retry_after_s) from error

    async def _run_of(self, work: LineWork, order: NewResponse) -> tuple[ResponseHandle, StoredReply]:
        """Returns the line's response, and under which key it is found again. Starts it if nobody has."""
        principal, begun = work.principal, await self._begin(work)
        if isinstance(begun, StoredReply):
            try:
                return await self._responses.resume(principal, order, TurnId(json.loads(begun.body)["turn"])), begun
            except NotFound:
                await self._keys.forget(begun)
                raise Unavailable("The response of this request was deleted; it is made anew.") from None
        assert work.held.batch_id is not None
        claim = TurnClaim(begun, _body_of, LineOfBatch(work.held.batch_id, work.request_id, _body_with))
        try:
            with named_tools(order.tool_paths):
                run = await self._responses.create(replace(principal, turn_claim=claim), order)
        except BaseException:
            await self._keys.abandon(begun)
            raise
        reply = StoredReply(200, b"", begun)
        try:
            await run.admitted()
        except GraftworkError:  # the engine has refused the prompt, and the response is deleted
            with suppress(Unavailable):
                await self._keys.forget(reply)
            raise
        except BaseException:
            run.cancel()  # it may end all the same: so the line keeps it
            raise
        return run, reply


def _body_of(_: SessionId, turn_id: TurnId) -> bytes:
    return json.dumps({"turn": turn_id}).encode()


def _body_with(turn_id: TurnId, usage: UsageEvent) -> bytes:
    return json.dumps({"turn": turn_id, "usage": usage.to_json()}).encode()


def _usage_of(response: dict[str, Any]) -> BatchUsage:
    used = response["usage"]
    if used is None:
        return BatchUsage()
    cached, reasoning = (
        used["input_tokens_details"]["cached_tokens"],
        used["output_tokens_details"]["reasoning_tokens"],
    )
    return BatchUsage(used["input_tokens"], cached, used["output_tokens"], reasoning)
