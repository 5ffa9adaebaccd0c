"""Contains the SQL statements that add up the usage ledger for reports and invoices.

    from ──┬──── hours ────┬──── days ────┬──── hours ────┬── to        read from `usage_sums`
           └ rows          └──────────────┘               └ rows        rows of hours that are not whole
    and rows everywhere that are not in the sums yet (`usage_unrolled`)

One statement reads all parts, so a row that moves to the sums meanwhile counts once. Until the sums are complete, and for
groups that they do not have, all rows are read.
Never commits: the caller that opened the session does.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, and_, exists, func, literal, select, union_all

from graftwork.platform.database import ReadSession
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.ledger.rollup_rows import (
    DAY,
    DAY_S,
    HALF,
    HOUR,
    HOUR_S,
    HOURLY,
    SPLIT,
    SUMMED,
    find_state,
)
from graftwork.platform.ledger.tables import UnrolledUsageRow, UsageRow, UsageSumRow
from graftwork.platform.ledger.usage import UsageGroup, UsageSummary, Work
from graftwork.platform.prices.rates import Cost, Quantities
from graftwork.platform.prices.tables import PriceListRow

_GROUP_COLUMNS = {
    UsageGroup.DAY: "day",
    UsageGroup.ADAPTER: "adapter",
    UsageGroup.SESSION: "session_id",
    UsageGroup.KEY: "key_id",
    UsageGroup.TENANT: "tenant_id",
    UsageGroup.TIER: "service_tier",
    UsageGroup.PRICE: "price_id",
    UsageGroup.ORGANISATION: "organisation_id",
    UsageGroup.USER: "end_user_id",
    UsageGroup.BATCH: "batch_id",
    UsageGroup.MODEL: "model",
}
_DIMENSIONS = {
    UsageGroup.DAY: ("day",),
    UsageGroup.ADAPTER: ("adapter",),
    UsageGroup.KEY: ("key",),
    UsageGroup.TENANT: ("day",),
    UsageGroup.TIER: ("tier",),
    UsageGroup.PRICE: ("day",),
    UsageGroup.ORGANISATION: ("organisation",),
    UsageGroup.USER: ("user",),
    UsageGroup.BATCH: ("batch",),
    UsageGroup.MODEL: ("base_model", "adapter_model"),
}
"""The dimensions of the sums that have a group. Any dimension has tenants and price lists."""
_OWN_NAMES = {UsageGroup.TENANT: "tenant_id", UsageGroup.PRICE: "price_id"}
"""The column of the sums that has the group's name; `name` for the others."""
_HALVES = tuple(f"{name}_{part}" for name in SPLIT for part in ("high", "low"))
_IS_QUEUED = and_(UnrolledUsageRow.tenant_id == UsageRow.tenant_id, UnrolledUsageRow.request_id == UsageRow.request_id)
_END = 2**40
"""A whole hour behind all times, in the place of an end without limit."""


async def sum_usage(
    session: ReadSession, tenant_id: TenantId | None, start: float, end: float, group_by: UsageGroup
) -> list[UsageSummary]:
    """Adds up the usage of each group of requests that were recorded in the time [start, end).

    Raises InvalidRequest if that needs rows that were pruned.
    """
    state = await find_state(session)
    report = _Report(tenant_id, group_by, start, end)
    if state is not None:
        _check_kept(state.pruned_before, report)
    if state is None or not state.is_complete or group_by is UsageGroup.SESSION:
        return await _sums(session, [report.rows(start, end)])
    return await _sums(session, list(report.parts()))


async def sum_sessions(
    session: ReadSession, tenant_id: TenantId, session_ids: Collection[SessionId]
) -> dict[SessionId, UsageSummary]:
    """Adds up all usage of each of these sessions. A session without usage is left out."""
    mine = _rows("session_id").where(UsageRow.tenant_id == tenant_id, UsageRow.session_id.in_(list(session_ids)))
    return {SessionId(one.group or ""): one for one in await _sums(session, [mine])}


@dataclass(frozen=True, slots=True)
class _Report:
    """What is added up for one report."""

    tenant_id: TenantId | None
    group_by: UsageGroup
    start: float
    end: float

    @property
    def has_hours(self) -> bool:
        """Whether there are sums of hours for the group."""
        return all(dimension in HOURLY for dimension in _DIMENSIONS[self.group_by])

    @property
    def whole(self) -> tuple[int, int, int, int] | None:
        """The whole hours [first, last) of the time, and the whole days among them, in this order: first hour, first day,
        last day, last hour. If the group has no sums of hours, days stand for the hours. None if there are none.
        """
        unit = HOUR_S if self.has_hours else DAY_S
        first, last = _ceil(max(self.start, 0.0), unit), _floor(min(self.end, _END), unit)
        if first >= last:
            return None
        first_day, last_day = _ceil(first, DAY_S), _floor(last, DAY_S)
        return (first, last, last, last) if first_day >= last_day else (first, first_day, last_day, last)

    def parts(self) -> Iterator[Select[Any]]:
        """Yields the selects whose rows together are all usage of the time, each request in one of them."""
        whole, edges = self.whole, [(self.start, self.end)]
        if whole is not None:
            first, first_day, last_day, last = whole
            yield self._summed(DAY, first_day, last_day)
            yield self._summed(HOUR, first, first_day)
            yield self._summed(HOUR, last_day, last)
            edges = [(self.start, float(first)), (float(last), self.end)]
        for since, until in edges:
            if since < until:
                yield self._edge(since, until)
        yield self.rows(self.start, self.end).join(UnrolledUsageRow, _IS_QUEUED)

    def rows(self, start: float, end: float) -> Select[Any]:
        """Selects the ledger's rows of the time [start, end)."""
        found = _rows(_GROUP_COLUMNS[self.group_by]).where(UsageRow.at >= start, UsageRow.at < end)
        return found if self.tenant_id is None else found.where(UsageRow.tenant_id == self.tenant_id)

    def _edge(self, start: float, end: float) -> Select[Any]:
        """Selects the ledger's rows of the time [start, end) that are in the sums."""
        found = self.rows(start, end).where(~exists().where(_IS_QUEUED))
        if self.tenant_id is not None:
            return found
        # No index has the rows of all tenants by time. The sums know which tenants have some.
        row = UsageSumRow
        days = [row.start_at >= _floor(max(start, 0.0), DAY_S), row.start_at <= _floor(min(end, _END), DAY_S)]
        tenants = select(row.tenant_id).where(row.span == DAY, row.dimension == "day", *days)
        return found.where(UsageRow.tenant_id.in_(tenants.distinct()))

    def _summed(self, span: str, start: int, end: int) -> Select[Any]:
        row = UsageSumRow
        name = getattr(row, _OWN_NAMES.get(self.group_by, "name"))
        named = [func.nullif(name, "").label("name"), func.nullif(row.price_id, "").label("price")]
        figures = [getattr(row, one) for one in (*SUMMED, *_HALVES)]
        found = select(*named, row.requests, *figures).where(
            row.span == span,
            row.dimension.in_(_DIMENSIONS[self.group_by]),
            row.start_at >= start,
            row.start_at < end,
        )
        return found if self.tenant_id is None else found.where(row.tenant_id == self.tenant_id)


def _rows(group: str) -> Select[Any]:
    row = UsageRow
    halves = [
        half.label(f"{name}_{part}")
        for name in SPLIT
        for part, half in (("high", getattr(row, name) // HALF), ("low", getattr(row, name) % HALF))
    ]
    named = [getattr(row, group).label("name"), row.price_id.label("price")]
    return select(*named, literal(1).label("requests"), *(getattr(row, name) for name in SUMMED), *halves)


async def _sums(session: ReadSession, parts: Sequence[Select[Any]]) -> list[UsageSummary]:
    """Adds up the rows of all parts, by the group's name and by currency."""
    rows = (union_all(*parts) if len(parts) > 1 else parts[0]).subquery()
    currency = PriceListRow.currency
    figures = [func.sum(rows.c[name]) for name in ("requests", *SUMMED, *_HALVES)]
    priced = select(rows.c.name, currency, *figures).outerjoin(PriceListRow, PriceListRow.id == rows.c.price)
    summaries: dict[str | None, UsageSummary] = {}
    for key, code, *found in await session.execute(priced.group_by(rows.c.name, currency)):
        summary = _summary(key, code, [int(figure) for figure in found])
        summaries[key] = summaries.get(key, UsageSummary(key)) + summary
    return list(summaries.values())


def _summary(group: str | None, currency: str | None, sums: Sequence[int]) -> UsageSummary:
    requests, *figures = sums
    found = dict(zip((*SUMMED, *_HALVES), figures, strict=True))
    kv, atoms, kv_atoms = (found[f"{name}_high"] * HALF + found[f"{name}_low"] for name in SPLIT)
    used = Quantities(
        uncached_tokens=found["prompt_tokens"] - found["cached_tokens"],
        device_tokens=found["cached_tokens"] - found["host_tokens"] - found["disk_tokens"],
        host_tokens=found["host_tokens"],
        disk_tokens=found["disk_tokens"],
        output_tokens=found["completion_tokens"],
        kv_byte_seconds=kv,
        adapter_bytes=found["adapter_bytes"],
    )
    work = Work(*(found[one.name] for one in fields(Work)))
    costs = {} if currency is None else {currency: Cost(atoms, kv_atoms)}
    return UsageSummary(group, requests, used, costs, work)


def _check_kept(pruned_before: int, report: _Report) -> None:
    """Raises InvalidRequest if a report needs rows that were pruned."""
    if report.start >= pruned_before:
        return
    day = datetime.fromtimestamp(pruned_before, UTC).date().isoformat()
    if report.group_by is UsageGroup.SESSION:
        raise InvalidRequest(f"Sessions have usage from {day} on: give a later `from`, or another group.", param="from")
    whole = report.whole
    if whole is None or report.start < whole[0] or whole[3] < min(report.end, pruned_before):
        unit = "hours" if report.has_hours else "days"
        raise InvalidRequest(
            f"Before {day} there are sums of whole {unit} only: let `from` and `to` be the beginnings of {unit} in UTC.",
            param="from",
        )


def _ceil(at: float, seconds: int) -> int:
    return -(-math.ceil(at) // seconds) * seconds


def _floor(at: float, seconds: int) -> int:
    return math.floor(at) // seconds * seconds
