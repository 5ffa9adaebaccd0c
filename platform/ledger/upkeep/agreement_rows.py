"""Contains the SQL statements over the reports of engines, and those that compare them with the ledger.

Never commits: the caller that opened the session does. `agreement.py` says what the verdicts mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, and_, case, delete, func, literal, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ledger.slot_files import COUNTS
from graftwork.platform.ledger.tables import EngineReportRow, UsageRow
from graftwork.platform.ledger.usage import UsageOutcome

_REPORTS = cast(Table, EngineReportRow.__table__)
Found = tuple[str, int, dict[str, int], dict[str, int], dict[str, int]]
"""A verdict, its requests, and what is billed, unbilled and reported by field."""
_UNBILLED = {"prompt_tokens": "unbilled_prompt_tokens", "completion_tokens": "unbilled_completion_tokens"}
_SAME = ("prompt_tokens", "completion_tokens", "kv_byte_seconds", "adapter_bytes", "engine_us")
"""Fields that must be the same in a request that is billed and has its reports whole; the others are at most so much."""
_BATCHES = ("batch\\_%", "msgbatch\\_%")
_OWN = "ready\\_%"
"""The ids of lines of batches, and of the requests by which a gateway tries whether its engine answers."""


async def add_reports(session: WriteSession, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds reports. Those that are there already stay as they are.

    The statement is the same for any number of rows, so it is built once. One with all values in it is built anew for each
    number, which costs ten times as much for a row.
    """
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    if rows:
        await session.execute(insert(_REPORTS).on_conflict_do_nothing(), list(rows))


async def drop_reports(session: WriteSession, before: float) -> None:
    """Deletes the reports of requests that ended before a time."""
    await session.execute(delete(EngineReportRow).where(EngineReportRow.at < before))


async def first_report_at(session: ReadSession) -> float | None:
    """Returns the time of the oldest report; None without any."""
    return await session.scalar(select(func.min(EngineReportRow.at)))


async def compare_rows(session: ReadSession, start: float, end: float) -> list[Found]:
    """Compares the ledger's rows of a time with all reports about their requests. Returns the sums by verdict."""
    rows = _compared(start, end)
    figures = [func.sum(rows.c[f"{kind}_{name}"]) for kind in ("billed", "unbilled", "reported") for name in COUNTS]
    summed = select(rows.c.verdict, func.count(), *figures).group_by(rows.c.verdict).order_by(rows.c.verdict)
    return [_found(verdict, requests, figures) for verdict, requests, *figures in await session.execute(summed)]


async def compare_orphans(session: ReadSession, start: float, end: float, settled_at: float) -> list[Found]:
    """Finds reports of a time about requests that the ledger does not have. Returns the sums by verdict."""
    orphans = _orphans(start, end, settled_at).subquery()
    figures = [func.sum(orphans.c[name]) for name in COUNTS]
    summed = select(orphans.c.verdict, func.count(orphans.c.request_id.distinct()), *figures)
    rows = await session.execute(summed.group_by(orphans.c.verdict).order_by(orphans.c.verdict))
    nothing = [0] * 2 * len(COUNTS)
    return [_found(verdict, requests, [*nothing, *found]) for verdict, requests, *found in rows]


async def find_examples(session: ReadSession, verdict: str, start: float, end: float, limit: int = 10) -> Sequence[str]:
    """Returns some requests with a verdict, in the order of their ids."""
    if verdict == "unbilled":
        orphans = _orphans(start, end, end).subquery()
        named = select(orphans.c.request_id).where(orphans.c.verdict == verdict).distinct()
        return (await session.scalars(named.order_by(orphans.c.request_id).limit(limit))).all()
    rows = _compared(start, end)
    named = select(rows.c.request_id).where(rows.c.verdict == verdict).order_by(rows.c.request_id)
    return (await session.scalars(named.limit(limit))).all()


def _compared(start: float, end: float) -> Any:
    """Selects each row of the ledger of a time, with the sums of its reports and a verdict."""
    of_time = select(UsageRow.request_id).where(UsageRow.at >= start, UsageRow.at < end)
    report = EngineReportRow
    reported = (
        select(
            report.request_id,
            func.count().label("runs"),
            func.count(report.choice.distinct()).label("choices"),
            func.min(case((report.is_whole, 1), else_=0)).label("is_whole"),
            *(func.sum(getattr(report, name)).label(name) for name in COUNTS),
        )
        .where(report.request_id.in_(of_time))
        .group_by(report.request_id)
        .subquery()
    )
    figures = {name: func.coalesce(reported.c[name], 0) for name in COUNTS}
    verdict = _verdict(reported.c, figures)
    return (
        select(
            UsageRow.request_id,
            verdict.label("verdict"),
            *(getattr(UsageRow, name).label(f"billed_{name}") for name in COUNTS),
            *(_unbilled(name).label(f"unbilled_{name}") for name in COUNTS),
            *(figure.label(f"reported_{name}") for name, figure in figures.items()),
        )
        .outerjoin(reported, reported.c.request_id == UsageRow.request_id)
        .where(UsageRow.at >= start, UsageRow.at < end)
        .subquery()
    )


def _verdict(reported: Any, figures: Mapping[str, ColumnElement[int]]) -> ColumnElement[str]:
    billed_all = UsageRow.prompt_tokens + UsageRow.completion_tokens + UsageRow.kv_byte_seconds + UsageRow.adapter_bytes
    is_more = or_(*(getattr(UsageRow, name) + _unbilled(name) > figure for name, figure in figures.items()))
    is_billed = UsageRow.outcome != UsageOutcome.SERVER_ERROR.value
    is_same = and_(
        *(
            or_(
                getattr(UsageRow, name) + _unbilled(name) == figures[name],
                *(() if name in _UNBILLED else (~is_billed,)),
            )
            for name in _SAME
        )
    )
    return case(
        (and_(reported.runs.is_(None), billed_all == 0), "nothing"),
        (reported.runs.is_(None), "unreported"),
        (is_more, "more"),
        (is_same, "agrees"),
        (reported.runs > reported.choices, "again"),
        (or_(reported.is_whole == 0, UsageRow.outcome == UsageOutcome.INTERRUPTED.value), "interrupted"),
        else_="less",
    )


def _unbilled(name: str) -> ColumnElement[int]:
    column = _UNBILLED.get(name)
    return literal(0) if column is None else getattr(UsageRow, column)


def _orphans(start: float, end: float, settled_at: float) -> Any:
    report = EngineReportRow
    has_row = select(UsageRow.request_id).where(UsageRow.request_id == report.request_id).exists()
    is_line = or_(*(report.request_id.like(pattern, escape="\\") for pattern in _BATCHES))
    is_own = report.request_id.like(_OWN, escape="\\")
    verdict = case((is_own, "own"), (report.at >= settled_at, "pending"), (is_line, "dropped"), else_="unbilled")
    columns = [report.request_id, verdict.label("verdict"), *(getattr(report, name) for name in COUNTS)]
    return select(*columns).where(report.at >= start, report.at < end, ~has_row)


def _found(verdict: str, requests: int, figures: Sequence[Any]) -> Found:
    size = len(COUNTS)
    billed, unbilled, reported = (
        dict(zip(COUNTS, map(int, figures[number * size : (number + 1) * size]), strict=True)) for number in range(3)
    )
    return verdict, requests, billed, unbilled, reported
