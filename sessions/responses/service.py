"""Creates, reads, cancels and deletes responses for the routes. A response is a turn of a session.

Owns the choice of the session: a response joins the session of its conversation, or of its previous response. If
another response has already continued the previous one, the new response gets a fork of that session. A response
without a conversation and without a previous response gets a new session.
Never uses HTTP types, and never writes a turn.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from graftwork.adapters.format.specs import Caller
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Conflict, InvalidRequest, NotFound
from graftwork.platform.ids import CheckpointId, SessionId, TurnId
from graftwork.platform.pagination import Page, PageRequest, page_of
from graftwork.platform.tenancy.principals import Principal, TenantScope
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionStatus, Turn, TurnStatus
from graftwork.sessions.responses.conversations import find_conversation
from graftwork.sessions.responses.handle import ResponseHandle
from graftwork.sessions.responses.input import check_outputs
from graftwork.sessions.responses.record import NewResponse, ResponseRecord, turn_of
from graftwork.sessions.responses.references import resolve_references
from graftwork.sessions.responses.store import ResponseStore
from graftwork.sessions.service import NewSession, SessionService
from graftwork.sessions.turns.running import TurnHandle
from graftwork.sessions.turns.settings import checked_settings, with_defaults

RETENTION_S = 30 * 86_400.0
"""How long a response is kept, in seconds: 30 days, as at OpenAI. A conversation keeps the response's items longer."""
_SWEPT_AT_ONCE = 100

Items = tuple[Item, ...]


class ResponseService:
    """Creates, reads, cancels and deletes responses, for all tenants. Each response runs as a turn of a session."""

    def __init__(
        self, database: Database, sessions: SessionService, clock: Clock, retention_s: float = RETENTION_S
    ) -> None:
        """`retention_s` is the time that a response is kept, in seconds."""
        self._sessions = sessions
        self._store = ResponseStore(database)
        self._clock = clock
        self._retention_s = retention_s

    async def sweep(self) -> int:
        """Deletes the responses that are older than their time to live, and returns the number of deleted responses.

        Also deletes the internal session of such a response, if no other response and no fork uses the session.
        """
        num_gone = 0
        while found := await self._store.find_older(self._clock.now() - self._retention_s, _SWEPT_AT_ONCE):
            for scope, response_id, session_id in found:
                await self._delete(scope, response_id, session_id)
            num_gone += len(found)
        return num_gone

    async def delete_older(self, scope: TenantScope, before: float) -> int:
        """Deletes a tenant's responses from before a time in Unix seconds, and its conversations that were last changed
        before it. Returns how many.
        """
        num_gone = 0
        while found := await self._store.find_older_of(scope, before, _SWEPT_AT_ONCE):
            for response_id, session_id in found:
                await self._delete(scope, response_id, session_id)
            num_gone += len(found)
        return num_gone + await self._sessions.sweeper.delete_unchanged(scope, SessionKind.CONVERSATION, before)

    async def create(self, principal: Principal, new: NewResponse) -> ResponseHandle:
        """Starts a response.

        If the response must not be stored, `ResponseHandle.release` deletes it at the end of the client's request.
        Can raise InvalidRequest, ValidationFailed, NotFound, Conflict, LimitExceeded or CapacityContended. After these errors, the
        database has no row of the response.
        """
        principal = principal.for_user(new.end_user)
        new = replace(new, settings=checked_settings(new.settings))
        self._sessions.launcher.early.check_turn(principal, new.settings.service_tier)  # before any row is stored
        items = await resolve_references(self._sessions.store, principal.scope(), new.items)
        turn = await self._start(principal, new, items)
        record = ResponseRecord(turn.turn_id, turn.session_id, new.echo, self._clock.now())
        if new.is_stored:
            try:
                await self._store.insert(principal.scope(), record)
            except BaseException:
                turn.cancel()
                raise
        return self._handle(principal, record, turn)

    async def count_input(self, principal: Principal, new: NewResponse) -> int:
        """Returns the number of tokens that the prompt of a response would have. Starts nothing, and stores nothing.

        Can raise InvalidRequest, ValidationFailed, NotFound or LimitExceeded.
        """
        principal = principal.for_user(new.end_user)
        items = await resolve_references(self._sessions.store, principal.scope(), new.items)
        model = await self._sessions.resolve(principal, new.model, Caller.of(principal.key_id, user=new.end_user))
        settings = checked_settings(with_defaults(new.settings, model.defaults, names_tools=new.names_tools))
        session: AgentSession | None = None
        if new.conversation_id is not None:
            session = await find_conversation(self._sessions, principal, new.conversation_id)
        elif new.previous_response_id is not None:
            record, checkpoint_id = await self._previous(principal, new.previous_response_id)
            session = await self._sessions.loader.load_any(principal.scope(), record.session_id)
            session = replace(session, head_id=checkpoint_id)
        return await self._sessions.launcher.count_tokens(principal, session, items, settings)

    async def find(self, principal: Principal, response_id: str) -> ResponseHandle:
        """Returns access to a stored response. Raises NotFound if the response does not exist."""
        record = await self._load(principal, response_id)
        return self._handle(principal, record, await self._sessions.find_turn(principal, record.turn_id))

    async def resume(self, principal: Principal, new: NewResponse, turn_id: TurnId) -> ResponseHandle:
        """Returns access to the response that an equal request has begun before, also if its gateway has died.

        Raises NotFound if the response was deleted.
        """
        turn = await self._sessions.find_turn(principal, turn_id)
        await self._sessions.loader.load_any(principal.scope(), turn.session_id)  # this fails an interrupted turn
        record = ResponseRecord(turn_id, turn.session_id, new.echo, (await turn.stored()).created_at)
        if new.is_stored and await self._store.find(principal.scope(), record.response_id) is None:
            await self._store.insert(principal.scope(), record)  # its gateway died between the turn and this
        return self._handle(principal, record, turn)

    async def failed_by_server(self, principal: Principal, response_id: str) -> bool:
        """Returns whether the response failed through the server's fault. Returns False if it still runs, or was deleted.

        The response may be one whose gateway stopped before it was stored.
        """
        turn = await self._sessions.reader.find(principal.scope(), turn_of(response_id))
        if turn is None:
            return False
        with suppress(NotFound):
            await self._sessions.loader.load_any(principal.scope(), turn.session_id)  # this fails an interrupted turn
            return (await turn.stored()).failed_by_server
        return False

    async def get(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Returns the JSON body of a stored response as it is now. Raises NotFound if the response does not exist."""
        handle = await self.find(principal, response_id)
        session = await self._sessions.loader.load_any(principal.scope(), handle.record.session_id)
        return await handle.body(session)

    async def cancel(self, principal: Principal, response_id: str) -> dict[str, Any]:
        """Cancels a response, waits until it has ended, and returns its JSON body.

        Does nothing to a response that has already ended. Raises NotFound if the response does not exist.
        """
        record = await self._load(principal, response_id)
        await self._sessions.cancel(principal, record.session_id, record.turn_id)
        return await self.get(principal, response_id)

    async def delete(self, principal: Principal, response_id: str) -> None:
        """Deletes a response. If the response still runs, cancels it first.

        The items of the response stay stored while a later response or a conversation uses them. Raises NotFound if the
        response does not exist.
        """
        record = await self._load(principal, response_id)
        await self._sessions.cancel(principal, record.session_id, record.turn_id)
        await self._delete(principal.scope(), response_id, record.session_id)

    async def input_items(self, principal: Principal, response_id: str, page: PageRequest) -> Page[Item]:
        """Reads one page of the input items that a client sent with the request for this response.

        Raises NotFound if the response does not exist.
        """
        turn = await self._turn(principal, await self._load(principal, response_id))
        return page_of(turn.input, page, lambda item: item.item_id)

    async def _start(self, principal: Principal, new: NewResponse, items: Items) -> TurnHandle:
        """Starts the turn of the response. `items` is its input, without references."""
        if new.conversation_id is not None:
            conversation = await find_conversation(self._sessions, principal, new.conversation_id)
            conversation.check_at_rest()
            return await self._launch(principal, conversation, new, items)
        if new.previous_response_id is not None:
            return await self._continue(principal, new, items, new.previous_response_id)
        chain = NewSession(new.model, new.settings, kind=SessionKind.RESPONSES, end_user=new.end_user)
        return await self._launch_on_own(principal, await self._sessions.create(principal, chain), new, items)

    async def _continue(self, principal: Principal, new: NewResponse, items: Items, previous_id: str) -> TurnHandle:
        """Starts the turn on the previous response's session.

        Uses a fork of that session if another response has continued it, or if the new response must not be stored.
        """
        record, checkpoint_id = await self._previous(principal, previous_id)
        session = await self._sessions.loader.load_any(principal.scope(), record.session_id)
        if new.is_stored and _ends_at(session, checkpoint_id):
            try:
                return await self._launch(principal, session, new, items)
            except Conflict:
                pass  # another response has continued the session meanwhile, so this response gets a fork
        forks = await self._sessions.fork(principal, session.session_id, checkpoint_id, kind=SessionKind.RESPONSES)
        return await self._launch_on_own(principal, forks[0], new, items)

    async def _launch_on_own(
        self, principal: Principal, session: AgentSession, new: NewResponse, items: Items
    ) -> TurnHandle:
        """Starts the turn on an internal session that has no other response.

        Deletes the session if the turn cannot start.
        """
        try:
            return await self._launch(principal, session, new, items)
        except BaseException:
            await self._sessions.store.remove_unused(principal.scope(), session.session_id)
            raise

    async def _launch(self, principal: Principal, session: AgentSession, new: NewResponse, items: Items) -> TurnHandle:
        check_outputs(items, [call.call_id for call in session.ledger])
        caller = Caller.of(principal.key_id, session_id=session.session_id)
        model = await self._sessions.resolve(principal, new.model, caller, pinned=session.model)
        settings = checked_settings(with_defaults(new.settings, model.defaults, names_tools=new.names_tools))
        return await self._sessions.launcher.launch(principal, replace(session, model=model), items, settings)

    async def _previous(self, principal: Principal, response_id: str) -> tuple[ResponseRecord, CheckpointId]:
        """Returns the response to continue, and its checkpoint. Raises InvalidRequest."""
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
        await self._sessions.loader.load_any(principal.scope(), record.session_id)  # this fails an interrupted turn
        return await (await self._sessions.find_turn(principal, record.turn_id)).stored()

    async def _load(self, principal: Principal, response_id: str) -> ResponseRecord:
        record = await self._store.find(principal.scope(), response_id)
        if record is None:
            raise NotFound(f"The response {response_id!r} does not exist.", code="response_not_found")
        return record

    def _handle(self, principal: Principal, record: ResponseRecord, turn: TurnHandle) -> ResponseHandle:
        delete: Callable[[], Awaitable[None]] = partial(
            self._delete, principal.scope(), record.response_id, record.session_id
        )
        return ResponseHandle(record, turn, delete)

    async def _delete(self, scope: TenantScope, response_id: str, session_id: SessionId) -> None:
        await self._store.delete(scope, response_id)
        await self._sessions.store.remove_unused(scope, session_id)


def _ends_at(session: AgentSession, checkpoint_id: CheckpointId) -> bool:
    """Returns whether the session is internal, runs no turn, and ends with the checkpoint `checkpoint_id`."""
    rests = session.status in (SessionStatus.IDLE, SessionStatus.AWAITING_TOOL)
    return session.kind is SessionKind.RESPONSES and rests and session.head_id == checkpoint_id


def _bad_previous(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, param="previous_response_id", code=code)
