"""Contains the SQL statements over the degraded modes and the switches of traces. Never commits: the caller that opened the session does."""

from collections.abc import Sequence

from sqlalchemy import delete, select

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.modes.tables import ModesRow, TraceSwitchRow

_ONLY_ROW = "all"


async def find_modes(session: ReadSession) -> ModesRow | None:
    """Returns the row of the modes, or None if none were ever set."""
    return await session.get(ModesRow, _ONLY_ROW)


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


async def list_trace_switches(session: ReadSession) -> Sequence[TraceSwitchRow]:
    """Returns all switches, the oldest first."""
    order = TraceSwitchRow.changed_at, TraceSwitchRow.target
    return (await session.execute(select(TraceSwitchRow).order_by(*order))).scalars().all()


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
