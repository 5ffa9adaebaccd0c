"""Contains the SQL statements over the degraded modes. Never commits: the caller that opened the session does."""

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.modes.tables import ModesRow

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
