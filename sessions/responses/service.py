"""Responses as the routes use them: made, read, cancelled, deleted.

Owns where a response runs: on the session that its predecessor left, on a fork of it where somebody else went on from
there, on its conversation, or on a session of its own. Everything that happens then is a session's turn.
Never knows HTTP.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest, NotFound
from graftwork.platform.ids import CheckpointId
from graftwork.platform.pagination import Page, PageRequest, page_of
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionStatus, Turn, TurnStatus
from graftwork.sessions.responses.conversations import find_conversation
from graftwork.sessions.responses.handle import ResponseRun
from graftwork.sessions.responses.input import check_outputs
from graftwork.sessions.responses.record import ResponseOrder, ResponseRecord
from graftwork.sessions.responses.store import ResponseStore
from graftwork.sessions.service import NewSession, SessionService
from graftwork.sessions.turns.handle import RunningTurn
from graftwork.sessions.turns.settings import checked_settings

RETENTION_S = 30 * 86_400.0
"""How long a response is kept, as at OpenAI. What was said in a conversation stays with that."""
_SWEPT_AT_ONCE = 100


class ResponseService:
    """Responses of all tenants, on one process's sessions."""

    def __init__(
        self, database: Database, sessions: SessionService, clock: Clock, retention_s: float = RETENTION_S
    ) -> None:
        """`retention_s`: seconds that a response is kept."""
        self._sessions = sessions
        self._store = ResponseStore(database)
        self._clock = clock
        self._retention_s = retention_s

    async def sweep(self) -> int:
        """Forget the responses whose time is over, with what only they stand on, and return how many there were."""
        num_gone = 0
        while found := await self._store.find_older(self._clock.now() - self._retention_s, _SWEPT_AT_ONCE):
            for scope, record in found:
                await self._forget(scope, record)
            num_gone += len(found)
        return num_gone

    async def create(self, principal: Principal, order: ResponseOrder) -> ResponseRun:
        """Start a response. Raises InvalidRequest, ValidationFailed, NotFound, Conflict, LimitExceeded.

        Then nothing is left of it. What is not stored has no row of its own, and is taken away by `let_go`.
        """
        order = replace(order, settings=checked_settings(order.settings))
        turn = await self._start(principal, order)
        record = ResponseRecord(turn.turn_id, turn.session_id, order.echo, self._clock.now())
        if order.is_stored:
            try:
                await self._store.insert(principal.scope(), record)
            except BaseException:
                turn.cancel()
                raise
        return self._run(principal, record, turn)

    async def find(self, principal: Principal, response_id: str) -> ResponseRun:
        """A stored response. Raises NotFound."""
        record = await self._load(principal, response_id)
        return self._run(principal, record, await self._sessions.find_turn(principal, record.turn_id))

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """A stored response as it is now. Raises NotFound."""
        run = await self.find(principal, response_id)
        return await run.body(await self._sessions.get_any(principal, run.record.session_id))

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """End a response that runs as cancelled; one that has ended stays as it is. Raises NotFound."""
        record = await self._load(principal, response_id)
        await self._sessions.cancel(principal, record.session_id, record.turn_id)
        return await self.get(principal, response_id)

    async def delete(self, principal: Principal, response_id: str) -> None:
        """Forget a response. What was said stays where later responses, or its conversation, stand on it."""
        record = await self._load(principal, response_id)
        await self._sessions.cancel(principal, record.session_id, record.turn_id)
        await self._forget(principal.scope(), record)

    async def input_items(self, principal: Principal, response_id: str, page: PageRequest) -> Page[Item]:
        """One page of what the response was asked with. Raises NotFound."""
        turn = await self._turn(principal, await self._load(principal, response_id))
        return page_of(turn.input, page, lambda item: item.item_id)

    async def _start(self, principal: Principal, order: ResponseOrder) -> RunningTurn:
        if order.conversation_id is not None:
            conversation = await find_conversation(self._sessions, principal, order.conversation_id)
            conversation.check_at_rest()
            return await self._launch(principal, conversation, order)
        if order.previous_response_id is not None:
            return await self._continue(principal, order, order.previous_response_id)
        new = NewSession(order.model, order.settings, kind=SessionKind.RESPONSES)
        return await self._launch_on_own(principal, await self._sessions.create(principal, new), order)

    async def _continue(self, principal: Principal, order: ResponseOrder, previous_id: str) -> RunningTurn:
        """Where the previous response ended, if that is still a head and may be moved; else on a fork of it."""
        record, checkpoint_id = await self._previous(principal, previous_id)
        session = await self._sessions.get_any(principal, record.session_id)
        if order.is_stored and _ends_at(session, checkpoint_id):
            try:
                return await self._launch(principal, session, order)
            except Conflict:
                pass  # somebody else went on from here meanwhile: they have the session, this one a fork
        forks = await self._sessions.fork(principal, session.session_id, checkpoint_id, kind=SessionKind.RESPONSES)
        return await self._launch_on_own(principal, forks[0], order)

    async def _launch_on_own(self, principal: Principal, session: AgentSession, order: ResponseOrder) -> RunningTurn:
        """On a session that was made for this response, and goes with it if it cannot start."""
        try:
            return await self._launch(principal, session, order)
        except BaseException:
            await self._sessions.remove_unused(principal.scope(), session.session_id)
            raise

    async def _launch(self, principal: Principal, session: AgentSession, order: ResponseOrder) -> RunningTurn:
        check_outputs(order.items, [call.call_id for call in session.ledger])
        model = await self._sessions.resolve(principal, order.model)
        return await self._sessions.launch(principal, replace(session, model=model), order.items, order.settings)

    async def _previous(self, principal: Principal, response_id: str) -> tuple[ResponseRecord, CheckpointId]:
        """A response to go on from. Raises InvalidRequest."""
        record = await self._store.find(principal.scope(), response_id)
        if record is None:
            raise _bad_previous(f"The previous response {response_id!r} does not exist.", "previous_response_not_found")
        turn = await self._turn(principal, record)
        if turn.status is TurnStatus.RUNNING:
            raise _bad_previous(
                f"The previous response {response_id} is still running: wait for its end.", "response_running"
            )
        if turn.checkpoint_id is None:
            raise _bad_previous(
                f"The previous response {response_id} ended as {turn.status.value}: go on from the one before it.",
                "response_without_answer",
            )
        return record, turn.checkpoint_id

    async def _turn(self, principal: Principal, record: ResponseRecord) -> Turn:
        await self._sessions.get_any(principal, record.session_id)  # which ends a turn that nobody runs any more
        return await (await self._sessions.find_turn(principal, record.turn_id)).stored()

    async def _load(self, principal: Principal, response_id: str) -> ResponseRecord:
        record = await self._store.find(principal.scope(), response_id)
        if record is None:
            raise NotFound(f"The response {response_id!r} does not exist.", code="response_not_found")
        return record

    def _run(self, principal: Principal, record: ResponseRecord, turn: RunningTurn) -> ResponseRun:
        forget: Callable[[], Awaitable[None]] = partial(self._forget, principal.scope(), record)
        return ResponseRun(record, turn, forget)

    async def _forget(self, scope: TenantScope, record: ResponseRecord) -> None:
        await self._store.delete(scope, record.response_id)
        await self._sessions.remove_unused(scope, record.session_id)


def _ends_at(session: AgentSession, checkpoint_id: CheckpointId) -> bool:
    """Whether a chain of responses stands, at rest, where the next one goes on."""
    rests = session.status in (SessionStatus.IDLE, SessionStatus.AWAITING_TOOL)
    return session.kind is SessionKind.RESPONSES and rests and session.head_id == checkpoint_id


def _bad_previous(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, param="previous_response_id", code=code)
