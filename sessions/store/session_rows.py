"""Reads and writes the rows of sessions and of their ledgers. A ledger lists a session's tool calls and their outputs.

Owns the SQL statements. Never opens a transaction and never checks a rule: the caller does both.
Every statement is limited to one tenant, except the count by status, and to the tenants of its organisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, cast

from sqlalchemy import Table, Update, bindparam, delete, false, func, insert, not_, or_, select, update

from graftwork.adapters.format.specs import AdapterVersion, ResolvedModel
from graftwork.platform.contents.rows import RowOpener, row_opener, row_sealer
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import CallId, CheckpointId, EndUserId, KeyId, SessionId, TenantId, TurnId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.quotas.limits import Level
from graftwork.platform.tenancy.limit_book import LimitOwner
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tenancy.quota_rows import tenants_of
from graftwork.platform.tenancy.tables import TenantRow
from graftwork.platform.tenancy.tenants import TenantStatus
from graftwork.sessions.core.session import AgentSession, LedgerCall, SessionKind, SessionSettings, SessionStatus
from graftwork.sessions.store.deletion_rows import is_over
from graftwork.sessions.store.tables import SessionRow, ToolCallRow

_SESSIONS = cast("Table", SessionRow.__table__)
_INSERT_SESSION = insert(_SESSIONS)
_OF_SESSION = (SessionRow.id == bindparam("of_id"), SessionRow.tenant_id == bindparam("of_tenant"))
_FIND_SESSION = select(SessionRow).where(*_OF_SESSION)
_FIND_AND_LOCK_SESSION = _FIND_SESSION.with_for_update()
_FIND_STATUS_OF_TENANT = (
    select(TenantRow.status).where(TenantRow.id == bindparam("of_id")).with_for_update(read=True, key_share=True)
)


async def insert_session(database: WriteSession, session: AgentSession) -> None:
    """Stores a new session, without its tool calls."""
    row = {
        "id": session.session_id,
        "tenant_id": session.tenant_id,
        "origin_id": session.origin_id,
        "forked_from": session.forked_from,
        "key_id": session.key_id,
        "end_user_id": session.end_user_id,
        "settings": _settings_to_json(session.settings),
        "created_at": session.created_at,
        **_changing_columns(session),
    }
    sealer = await row_sealer(database, session.tenant_id)
    await database.execute(_INSERT_SESSION, dict(sealer.sealed(SessionRow, row)))


async def update_session(database: WriteSession, session: AgentSession) -> None:
    """Stores a changed session, without its tool calls. The caller's transaction must have locked the session."""
    sealer = await row_sealer(database, session.tenant_id)
    changed = sealer.sealed(SessionRow, _changing_columns(session), session.session_id)
    key = {"of_id": session.session_id, "of_tenant": session.tenant_id}
    await database.execute(_updating(tuple(changed)), {**changed, **key})


@cache
def _updating(names: tuple[str, ...]) -> Update:
    """Returns the statement that changes these columns of a session. It is built once, for every turn runs it twice."""
    return update(_SESSIONS).where(*_OF_SESSION).values({name: bindparam(name) for name in names})


async def find_session(
    database: ReadSession, scope: TenantScope, session_id: str, *, lock: bool = False
) -> AgentSession | None:
    """Finds a session, with the tool calls at the end of its latest checkpoint. Returns None if no session has this id.

    If `lock` is True, no other transaction can change the session until this transaction ends.
    """
    row = await _find_row(database, scope, session_id, lock)
    if row is None:
        return None
    ledger = await find_ledger(database, scope, session_id, row.head_id) if row.head_id else ()
    return _session_from_row(row, ledger, await row_opener(database, scope))


async def find_state(
    database: ReadSession, scope: TenantScope, session_id: str, *, lock: bool = False
) -> AgentSession | None:
    """Finds a session without what its tenant has said: its settings, metadata and tool calls are missing.

    For deletions, which must not fail because content cannot be decrypted. Never store the result.
    """
    row = await _find_row(database, scope, session_id, lock)
    return None if row is None else _session_of(row, SessionSettings(), {}, ())


async def list_sessions(
    database: ReadSession, scope: TenantScope, page: PageRequest, now: float, retention_s: float
) -> Page[AgentSession]:
    """Reads one page of a tenant's sessions, ordered by creation time.

    Each session has the tool calls at the end of its latest checkpoint. Leaves out conversations, internal sessions of
    the Responses API, and sessions whose time to live has passed at `now` (Unix seconds). `retention_s` is the default
    time to live of closed sessions, in seconds.
    """
    ascending = page.order is Order.ASCENDING
    statement = select(SessionRow).where(
        SessionRow.tenant_id == scope,
        SessionRow.kind == SessionKind.SESSION.value,
        SessionRow.status != SessionStatus.EXPIRED.value,
        not_(func.coalesce(is_over(now, retention_s), false())),
    )
    if page.after is not None:
        statement = statement.where(SessionRow.id > page.after if ascending else SessionRow.id < page.after)
    statement = statement.order_by(SessionRow.id if ascending else SessionRow.id.desc()).limit(page.limit + 1)
    rows = (await database.scalars(statement)).all()
    heads = [row.head_id for row in rows if row.head_id is not None]
    ledgers = await _ledgers_by_session(database, scope, [row.id for row in rows], heads)
    opener = await row_opener(database, scope)
    return cut([_session_from_row(row, ledgers.get((row.id, row.head_id), ()), opener) for row in rows], page)


async def lock_tenant(database: WriteSession, scope: TenantScope) -> None:
    """Locks the row of a tenant until the transaction ends.

    A caller does this before it counts the tenant's sessions. Otherwise two requests could each create one more session
    than the limit allows.
    """
    await database.execute(select(TenantRow.id).where(TenantRow.id == scope).with_for_update(key_share=True))


async def is_deleted_tenant(database: WriteSession, scope: TenantScope) -> bool:
    """Returns whether the tenant was deleted. If not, it cannot be deleted before the transaction ends."""
    return await database.scalar(_FIND_STATUS_OF_TENANT, {"of_id": scope}) == TenantStatus.DELETED


async def count_open_sessions(database: ReadSession, owner: LimitOwner, now: float) -> int:
    """Counts the sessions of an owner of limits that are neither closed nor expired at `now` (Unix seconds).

    Those of an organisation are of its present tenants, and those of a key or an end user are what it has begun. Leaves
    out conversations, and internal sessions of the Responses API.
    """
    ended = [SessionStatus.CLOSED.value, SessionStatus.EXPIRED.value]
    statement = select(func.count()).where(
        SessionRow.kind == SessionKind.SESSION.value,
        SessionRow.status.not_in(ended),
        or_(SessionRow.ends_at.is_(None), SessionRow.ends_at > now),
        tenants_of(owner.owner_id, owner.tenant_id, SessionRow.tenant_id),
    )
    if owner.level is Level.KEY:
        statement = statement.where(SessionRow.key_id == owner.owner_id)
    elif owner.level is Level.USER:
        statement = statement.where(SessionRow.end_user_id == owner.owner_id)
    return await database.scalar(statement) or 0


async def count_by_status(database: ReadSession) -> dict[SessionStatus, int]:
    """Counts the sessions of all tenants by status. The query is fast, because it reads only an index.

    Leaves out conversations, internal sessions of the Responses API, and expired sessions.
    """
    statement = (
        select(SessionRow.status, func.count())
        .where(SessionRow.kind == SessionKind.SESSION.value, SessionRow.status != SessionStatus.EXPIRED.value)
        .group_by(SessionRow.status)
    )
    return {SessionStatus(status): count for status, count in (await database.execute(statement)).all()}


async def insert_ledger(
    database: WriteSession, scope: TenantScope, session_id: SessionId, calls: Sequence[LedgerCall]
) -> None:
    """Stores the tool calls of one checkpoint for a session, all without outputs.

    Replaces the calls that are stored for the same session and checkpoint.
    """
    if not calls:
        return
    await database.execute(
        delete(ToolCallRow).where(
            ToolCallRow.tenant_id == scope,
            ToolCallRow.session_id == session_id,
            ToolCallRow.checkpoint_id == calls[0].checkpoint_id,
        )
    )
    shared = {"tenant_id": scope, "session_id": session_id, "answered_at": None}
    sealer = await row_sealer(database, scope)
    await database.execute(insert(ToolCallRow), [sealer.sealed(ToolCallRow, asdict(call) | shared) for call in calls])


async def find_ledger(
    database: ReadSession, scope: TenantScope, session_id: str, checkpoint_id: str
) -> tuple[LedgerCall, ...]:
    """Finds the tool calls at the end of a checkpoint, with the outputs that clients sent to this session for them."""
    ledgers = await _ledgers_by_session(database, scope, [session_id], [checkpoint_id])
    return tuple(ledgers.get((session_id, checkpoint_id), ()))


async def find_answered_calls(
    database: ReadSession, scope: TenantScope, session_id: SessionId, call_ids: Sequence[CallId]
) -> list[LedgerCall]:
    """Finds the tool calls of a session that have these ids, at the latest checkpoint and at earlier ones.

    Calls without an output come first. The others follow in the order in which their outputs were stored.
    """
    statement = (
        select(ToolCallRow)
        .where(
            ToolCallRow.tenant_id == scope,
            ToolCallRow.session_id == session_id,
            ToolCallRow.call_id.in_(call_ids),
        )
        .order_by(ToolCallRow.answered_at.is_not(None), ToolCallRow.answered_at)
    )
    opener = await row_opener(database, scope)
    return [_call_from_row(row, opener) for row in await database.scalars(statement)]


async def save_output(
    database: WriteSession, scope: TenantScope, session_id: SessionId, call: LedgerCall, output: str, at: float
) -> None:
    """Stores the output of one tool call of a session. `at` is the present time in Unix seconds."""
    sealer, key = await row_sealer(database, scope), (session_id, call.checkpoint_id, call.position)
    values = sealer.sealed(ToolCallRow, {"output": output, "answered_at": at}, *key)
    await database.execute(_update_call(scope, session_id, call).values(**values))


async def note_turn_of_outputs(
    database: WriteSession, scope: TenantScope, session_id: SessionId, calls: Sequence[LedgerCall], turn_id: TurnId
) -> None:
    """Stores, for each of these tool calls, the id of the turn that uses the call's output."""
    for call in calls:
        await database.execute(_update_call(scope, session_id, call).values(turn_id=turn_id))


def _update_call(scope: TenantScope, session_id: SessionId, call: LedgerCall) -> Any:
    return update(ToolCallRow).where(
        ToolCallRow.tenant_id == scope,
        ToolCallRow.session_id == session_id,
        ToolCallRow.checkpoint_id == call.checkpoint_id,
        ToolCallRow.position == call.position,
    )


async def _ledgers_by_session(
    database: ReadSession, scope: TenantScope, session_ids: Sequence[str], checkpoint_ids: Sequence[str]
) -> dict[tuple[str, str | None], list[LedgerCall]]:
    statement = (
        select(ToolCallRow)
        .where(
            ToolCallRow.tenant_id == scope,
            ToolCallRow.session_id.in_(session_ids),
            ToolCallRow.checkpoint_id.in_(checkpoint_ids),
        )
        .order_by(ToolCallRow.position)
    )
    found: dict[tuple[str, str | None], list[LedgerCall]] = {}
    opener = await row_opener(database, scope)
    for row in await database.scalars(statement):
        found.setdefault((row.session_id, row.checkpoint_id), []).append(_call_from_row(row, opener))
    return found


def _changing_columns(session: AgentSession) -> dict[str, Any]:
    return {
        "kind": session.kind.value,
        "status": session.status.value,
        "model": _model_to_json(session.model),
        "labels": dict(session.metadata),
        "retention_s": session.retention_s,
        "ends_at": session.ends_at,
        "head_id": session.head_id,
        "epoch": session.epoch,
        "running_turn_id": session.running_turn_id,
        "lease_owner": session.lease_owner,
        "lease_expires_at": session.lease_expires_at,
        "cancel_requested": session.cancel_requested,
        "last_seq": session.last_seq,
        "last_cache": session.last_cache,
        "updated_at": session.updated_at,
        "closed_at": session.closed_at,
    }


async def _find_row(database: ReadSession, scope: TenantScope, session_id: str, lock: bool) -> SessionRow | None:
    statement = _FIND_AND_LOCK_SESSION if lock else _FIND_SESSION
    return await database.scalar(statement, {"of_id": session_id, "of_tenant": scope})


def _session_from_row(row: SessionRow, ledger: Sequence[LedgerCall], opener: RowOpener) -> AgentSession:
    settings = _settings_from_json(opener.opened(SessionRow, "settings", row.settings, row.id))
    return _session_of(row, settings, opener.opened(SessionRow, "labels", row.labels, row.id), ledger)


def _session_of(
    row: SessionRow, settings: SessionSettings, metadata: Mapping[str, str], ledger: Sequence[LedgerCall]
) -> AgentSession:
    return AgentSession(
        session_id=SessionId(row.id),
        tenant_id=TenantId(row.tenant_id),
        status=SessionStatus(row.status),
        model=_model_from_json(row.model),
        settings=settings,
        metadata=metadata,
        created_at=row.created_at,
        updated_at=row.updated_at,
        retention_s=row.retention_s,
        head_id=_checkpoint_id(row.head_id),
        origin_id=_checkpoint_id(row.origin_id),
        forked_from=None if row.forked_from is None else SessionId(row.forked_from),
        epoch=row.epoch,
        running_turn_id=None if row.running_turn_id is None else TurnId(row.running_turn_id),
        lease_owner=row.lease_owner,
        lease_expires_at=row.lease_expires_at,
        cancel_requested=row.cancel_requested,
        last_seq=row.last_seq,
        last_cache=row.last_cache,
        closed_at=row.closed_at,
        kind=SessionKind(row.kind),
        key_id=None if row.key_id is None else KeyId(row.key_id),
        end_user_id=None if row.end_user_id is None else EndUserId(row.end_user_id),
        ledger=tuple(ledger),
    )


def _call_from_row(row: ToolCallRow, opener: RowOpener) -> LedgerCall:
    key = (row.session_id, row.checkpoint_id, row.position)
    return LedgerCall(
        checkpoint_id=CheckpointId(row.checkpoint_id),
        position=row.position,
        call_id=CallId(row.call_id),
        name=opener.opened(ToolCallRow, "name", row.name, *key),
        arguments=opener.opened(ToolCallRow, "arguments", row.arguments, *key),
        output=opener.opened(ToolCallRow, "output", row.output, *key),
        turn_id=None if row.turn_id is None else TurnId(row.turn_id),
        deadline_at=row.deadline_at,
    )


def _checkpoint_id(stored: str | None) -> CheckpointId | None:
    return None if stored is None else CheckpointId(stored)


_UNSTORED = ("is_held", "deleted_at", "base", "provenance")
"""The fields of an adapter version that sessions do not store: they may change."""


def _model_to_json(model: ResolvedModel) -> dict[str, Any]:
    stored = asdict(model)
    del stored["defaults"]
    for field in _UNSTORED if stored["version"] is not None else ():
        del stored["version"][field]  # a gateway of an earlier release would not know it
    return stored


def _model_from_json(stored: Mapping[str, Any]) -> ResolvedModel:
    version = stored["version"]
    if version is not None:
        version = AdapterVersion(**(version | {"target_modules": tuple(version["target_modules"])}))
    return ResolvedModel(stored["requested"], version)


def _settings_to_json(settings: SessionSettings) -> dict[str, Any]:
    return asdict(settings)


def _settings_from_json(stored: Mapping[str, Any]) -> SessionSettings:
    return SessionSettings(**{**stored, "tools": tuple(stored["tools"])})
