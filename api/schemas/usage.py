"""Reads the time range of a request for usage, and converts the sums from the database to answers.

Never reads the database.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import Query
from pydantic import WithJsonSchema

from graftwork.api.schemas.admin import unix_seconds
from graftwork.engine.fleet.replicas import ReplicaReading
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.usage import (
    ComparedUsage,
    EngineTotals,
    Money,
    OpenJournal,
    SumDifference,
    UsageCheck,
    UsageRow,
    UsageTotals,
)
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.invoices import MONTH_PATTERN
from graftwork.platform.ledger.upkeep.agreement import Agreement
from graftwork.platform.ledger.usage import UsageGroup, UsageSummary

DEFAULT_SPAN_S = timedelta(days=30).total_seconds()

_LATEST = 253_402_300_799
"""The last second of the year 9999, in Unix seconds."""

TimeText = Annotated[
    str | None,
    Query(max_length=64),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": _LATEST},
                {"type": "string", "format": "date-time"},
            ]
        }
    ),
]
"""A time as Unix seconds, or as ISO 8601 text."""
MonthText = Annotated[
    str, Query(max_length=16, examples=["2026-11"], json_schema_extra={"pattern": MONTH_PATTERN, "maxLength": 7})
]
"""A month such as `2026-11`. The pattern is only for the OpenAPI document: the invoice refuses other texts by itself."""


def span(start: str | None, end: str | None, now: float) -> tuple[float, float]:
    """Returns the time range [start, end) in Unix seconds. By default the range covers the 30 days before `now`.

    Raises InvalidRequest for an invalid time, and for a start after the end.
    """
    until = now if end is None else _moment(end, "to")
    since = until - DEFAULT_SPAN_S if start is None else _moment(start, "from")
    if since > until:
        raise InvalidRequest("from lies behind to: swap them.", param="from")
    # The end is exclusive. Add one second, so that a range "until now" includes rows of this second.
    return since, until if end is not None else until + 1.0


def usage_answer(summaries: Sequence[UsageSummary], group_by: UsageGroup, base_name: str) -> Page[UsageRow]:
    """Converts sums of usage to the body of an answer. Each row is the sum of one group, such as a day or an adapter.

    Rows have no ids, so `first_id` and `last_id` are None. If the groups are adapters, the row of requests without an
    adapter has the name `base_name`.
    """
    unnamed = base_name if group_by is UsageGroup.ADAPTER else None
    rows = [
        UsageRow(group=unnamed if summary.group is None else summary.group, **_totals(summary)) for summary in summaries
    ]
    return Page(data=tuple(rows), has_more=False, first_id=None, last_id=None)


def totals_answer(summary: UsageSummary | None) -> UsageTotals:
    """Converts the sum of one group to an answer without the group's name. None is a group without requests."""
    return UsageTotals(**_totals(summary or UsageSummary(None)))


def check_answer(found: Agreement, engines: Sequence[ReplicaReading], backlog: UsageBacklog) -> UsageCheck:
    """Converts the result of a check, with what the engines that answer have counted, and what this gateway's ledger
    does not have yet.
    """
    return UsageCheck(
        start=found.start,
        end=found.end,
        differences=found.differences,
        compared=tuple(
            ComparedUsage(
                verdict=one.verdict.value,
                is_difference=one.verdict.is_difference,
                requests=one.requests,
                billed=dict(one.billed),
                unbilled=dict(one.unbilled),
                reported=dict(one.reported),
                examples=one.examples,
            )
            for one in found.compared
        ),
        sums=tuple(
            SumDifference(field=name, sums=sums, requests=requests) for name, (sums, requests) in found.sums.items()
        ),
        engines=tuple(
            EngineTotals(
                replica_id=one.replica_id,
                prompt_tokens=one.stats.prompt_tokens,
                generated_tokens=one.stats.generated_tokens,
            )
            for one in engines
            if one.stats is not None
        ),
        journal=OpenJournal(open=backlog.journal.num_open, waiting=backlog.num_waiting),
    )


def _totals(summary: UsageSummary) -> dict[str, Any]:
    used = summary.used
    return {
        "requests": summary.requests,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "device_tokens": used.device_tokens,
        "host_tokens": used.host_tokens,
        "disk_tokens": used.disk_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.total_tokens,
        "kv_byte_seconds": used.kv_byte_seconds,
        "adapter_bytes": used.adapter_bytes,
        "drafted_tokens": summary.work.drafted_tokens,
        "forced_tokens": summary.work.forced_tokens,
        "reasoning_tokens": summary.work.reasoning_tokens,
        "engine_ms": summary.work.engine_us / 1000,
        "costs": tuple(Money.of(cost.atoms, currency) for currency, cost in sorted(summary.costs.items())),
    }


def _moment(text: str, param: str) -> float:
    """Parses Unix seconds or ISO 8601 text. Raises InvalidRequest for any other text."""
    try:
        value = unix_seconds(_number(text))
        seconds = float(str(value))
        if not 0 <= seconds <= _LATEST:
            raise ValueError("before 1970, or after the year 9999")
        datetime.fromtimestamp(seconds)  # noqa: DTZ006 - only checks that such a time exists
    except (ValueError, OverflowError, OSError) as error:
        message = f"{param}: give unix seconds, or a time such as 2026-01-31T12:00:00Z."
        raise InvalidRequest(message, param=param) from error
    return seconds


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
