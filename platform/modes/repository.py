"""Contains the SQL statements over the degraded modes and the switches of traces. Never commits: the caller that opened the session does."""

from sqlalchemy import delete, select

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.modes.tables import ModesRow, TraceSwitchRow

_ONLY_ROW = "all"
_MODES = ModesRow.__table__
_ALL_MODES = select(
    _MODES.c.max_output_tokens, _MODES.c.suspend_drafts, _MODES.c.refuse_flex, _MODES.c.changed_at
).where(_MODES.c.id == _ONLY_ROW)
_SWITCHES = TraceSwitchRow.__table__
_ALL_SWITCHES = select(_SWITCHES.c.target, _SWITCHES.c.token_ids, _SWITCHES.c.changed_at).order_by(
    _SWITCHES.c.changed_at, _SWITCHES.c.target
)


async def find_modes(session: ReadSession) -> tuple[int | None, bool, bool, float] | None:
    """Returns the columns of the modes: `max_output_tokens`, `suspend_drafts`, `refuse_flex` and `changed_at`. None if
    none were ever set.

    Every gateway asks this twice a second, so the statement is built once and selects columns.
    """
    row = (await session.execute(_ALL_MODES)).one_or_none()
    return None if row is None else (row.max_output_tokens, row.suspend_drafts, row.refuse_flex, row.changed_at)


async def put_modes(
    session: WriteSession, *, max_output_tokens: int | None, suspend_drafts: bool, refuse_flex: bool, changed_at: float
) -> None:
    """Replaces all modes."""
    await session.merge(
        ModesRow(
            id=_ONLY_ROW,
            max_output_tokens=max_output_tokens,
            suspend_drafts=suspend_drafts,
            refuse_flex=refuse_flex,
            changed_at=changed_at,
        )
    )
    await session.flush()


async def list_trace_switches(session: ReadSession) -> list[tuple[str, bool, float]]:
    """Returns the target, the wish for token ids and the time of each switch, the oldest first.

    Every gateway asks this twice a second, so the statement is built once and selects columns.
    """
    return [(target, token_ids, at) for target, token_ids, at in (await session.execute(_ALL_SWITCHES)).all()]


async def put_trace_switch(session: WriteSession, target: str, *, token_ids: bool, changed_at: float) -> None:
    """Adds or replaces the switch of a tenant or a session."""
    await session.merge(TraceSwitchRow(target=target, token_ids=token_ids, changed_at=changed_at))
    await session.flush()


async def delete_trace_switch(session: WriteSession, target: str) -> bool:
    """Deletes a switch. Returns whether there was one."""
    deleted = await session.execute(
        delete(TraceSwitchRow).where(TraceSwitchRow.target == target).returning(TraceSwitchRow.target)
    )
    return deleted.scalar_one_or_none() is not None
