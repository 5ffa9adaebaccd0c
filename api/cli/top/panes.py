"""Turns the rows of an overview into the cells and the details that `graftwork top` shows. Draws nothing.

Every text that a client has chosen, such as a name, is shown as plain characters: what a terminal could take as a
command, or what turns the direction of writing, becomes a dot.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.platform.answers.overview import (
    AdapterOverview,
    EngineOverview,
    Overview,
    SessionOverview,
    TenantOverview,
    TierPages,
)

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    width: int
    """Characters, with one space after the text."""
    text: Callable[[Any, Overview], str]
    is_number: bool = True

    def cell(self, row: Any, overview: Overview) -> str:
        """Returns the text of a row in this column: exactly `width` characters."""
        text = plain(self.text(row, overview))
        room = self.width - 1
        text = text if len(text) <= room else text[: room - 1] + "…"
        return (text.rjust(room) if self.is_number else text.ljust(room)) + " "

    @property
    def heading(self) -> str:
        room = self.width - 1
        return (self.title.rjust(room) if self.is_number else self.title.ljust(room)) + " "


@dataclass(frozen=True, slots=True)
class Pane:
    """One table of `graftwork top`."""

    name: str
    columns: Sequence[Column]
    rows: Callable[[Overview], Sequence[Any]]
    key: Callable[[Any], str]
    sorts: Mapping[str, Callable[[Any], Any] | None]
    """The orders by name. None is an order that the server makes; else the function gives what rows are sorted by."""

    def sorted_rows(self, overview: Overview, sort: str) -> list[Any]:
        """Returns the rows in an order of `sorts`."""
        rows, by = [*self.rows(overview)], self.sorts[sort]
        return rows if by is None else sorted(rows, key=by)

    def cells(self, row: Any, overview: Overview) -> Cells:
        """Returns the texts of one row."""
        return tuple(column.cell(row, overview) for column in self.columns)


def plain(text: str) -> str:
    """Returns the text with a dot in place of each character that is not printable."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "·" for one in text)


def number(value: float | None, digits: int = 0) -> str:
    """Returns a number in few characters: `950`, `12.4k`, `3.1M`. None is a dash."""
    if value is None:
        return "–"
    for unit, factor in (("M", 1e6), ("k", 1e4)):
        if abs(value) >= factor:
            return f"{value / (1e6 if unit == 'M' else 1e3):.1f}{unit}"
    return f"{value:.{digits}f}"


def share(part: float | None, whole: float | None) -> str:
    """Returns a percentage. A dash where it is unknown."""
    return "–" if part is None or not whole else f"{part / whole:.0%}"


def ago(seconds: float) -> str:
    """Returns a duration in few characters."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def totals(overview: Overview) -> str:
    """Returns the line above the tables."""
    all_of = overview.totals
    return (
        f"{plain(overview.model)} {overview.version}  "
        f"running {all_of.running}  waiting {all_of.waiting}  "
        f"req/s {number(all_of.requests_per_s, 1)}  "
        f"tok/s in {number(all_of.prompt_tokens_per_s)} out {number(all_of.generated_tokens_per_s)}  "
        f"refused/s {number(all_of.refused_per_s, 1)}"
    )


def details(row: Any, overview: Overview) -> str:
    """Returns all that is known of one row, one fact a line."""
    facts = row.body() if not row.raw else dict(row.raw)
    if isinstance(row, AdapterOverview | SessionOverview):
        facts["tenant"] = _tenant_name(row.tenant_id, overview)
    width = max(len(name) for name in facts)
    return "\n".join(f"{name.ljust(width)}  {_fact(name, value)}" for name, value in facts.items())


def _fact(name: str, value: Any) -> str:
    if name.endswith("_at") and isinstance(value, int | float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if value is None or value in ({}, [], ()):
        return "–"
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _tenant_name(tenant_id: str, overview: Overview) -> str:
    return next((one.name for one in overview.tenants if one.id == tenant_id and one.name), tenant_id)


def _used(pages: TierPages | None) -> str:
    return (
        "–" if pages is None or pages.used is None or pages.free is None else share(pages.used, pages.used + pages.free)
    )


def _cached(row: SessionOverview) -> str:
    prompt = sum(row.prompt_tokens_by_tier.values())
    return share(prompt - row.prompt_tokens_by_tier.get("recomputed", 0), prompt)


def _engine(text: Callable[[EngineOverview], str]) -> Callable[[Any, Overview], str]:
    return lambda row, _: text(row)


def _tenant(text: Callable[[TenantOverview], str]) -> Callable[[Any, Overview], str]:
    return lambda row, _: text(row)


def _adapter(text: Callable[[AdapterOverview], str]) -> Callable[[Any, Overview], str]:
    return lambda row, _: text(row)


def _session(text: Callable[[SessionOverview], str]) -> Callable[[Any, Overview], str]:
    return lambda row, _: text(row)


ENGINES = Pane(
    "engines",
    (
        Column("ENGINE", 15, _engine(lambda one: one.id), is_number=False),
        Column("STATE", 9, _engine(lambda one: one.status), is_number=False),
        Column("RUN", 5, _engine(lambda one: number(one.running))),
        Column("WAIT", 5, _engine(lambda one: number(one.waiting))),
        Column("QUEUED", 7, _engine(lambda one: number(one.queued_tokens))),
        Column("KV", 5, _engine(lambda one: _used(one.pages.device if one.pages else None))),
        Column("HOST", 5, _engine(lambda one: _used(one.pages.host if one.pages else None))),
        Column("IN/s", 7, _engine(lambda one: number(one.prompt_tokens_per_s))),
        Column("OUT/s", 7, _engine(lambda one: number(one.generated_tokens_per_s))),
        Column("STEP ms", 8, _engine(lambda one: number(one.step_ms, 1))),
        Column("LORA", 5, _engine(lambda one: number(one.adapters_resident))),
    ),
    lambda overview: overview.engines,
    lambda row: str(row.id),
    {
        "id": lambda one: one.id,
        "waiting": lambda one: -(one.waiting or 0),
        "tokens": lambda one: -(one.generated_tokens_per_s or 0),
    },
)
TENANTS = Pane(
    "tenants",
    (
        Column("TENANT", 20, _tenant(lambda one: one.name or one.id), is_number=False),
        Column("RUN", 4, _tenant(lambda one: number(one.running))),
        Column("WAIT", 5, _tenant(lambda one: number(one.waiting))),
        Column("REQ/s", 6, _tenant(lambda one: number(one.requests_per_s, 1))),
        Column("OUT/s", 7, _tenant(lambda one: number(one.generated_tokens_per_s))),
        Column("TTFT", 7, _tenant(lambda one: number(one.ttft_ms.p50))),
        Column("p99 ms", 7, _tenant(lambda one: number(one.ttft_ms.p99))),
        Column("ITL", 6, _tenant(lambda one: number(one.inter_token_p99_ms))),
        Column("REFUSED", 8, _tenant(lambda one: number(sum(one.refusals.values())))),
        Column("SHARE", 6, _tenant(lambda one: share(one.service_share, 1.0))),
        Column("BURN", 4, _tenant(lambda one: number(one.slo_burn, 1))),
    ),
    lambda overview: overview.tenants,
    lambda row: str(row.id),
    dict.fromkeys(
        (
            "activity",
            "running",
            "waiting",
            "requests",
            "tokens",
            "ttft",
            "inter_token",
            "refusals",
            "burn",
            "name",
        )
    ),
)
ADAPTERS = Pane(
    "adapters",
    (
        Column("ADAPTER", 28, _adapter(lambda one: f"{one.name}@{one.version}" if one.version else one.name), False),
        Column("TENANT", 19, lambda row, overview: _tenant_name(row.tenant_id, overview), False),
        Column("WHERE", 7, _adapter(lambda one: one.residency), is_number=False),
        Column("RUN", 5, _adapter(lambda one: number(one.running))),
        Column("WAIT", 5, _adapter(lambda one: number(one.waiting))),
        Column("REQ/s", 7, _adapter(lambda one: number(one.requests_per_s, 1))),
        Column("p99 ms", 8, _adapter(lambda one: number(one.ttft_ms.p99))),
    ),
    lambda overview: overview.adapters,
    lambda row: f"{row.tenant_id}/{row.name}@{row.version}",
    TENANTS.sorts,
)
SESSIONS = Pane(
    "sessions",
    (
        Column("SESSION", 31, _session(lambda one: one.id), is_number=False),
        Column("MODEL", 15, _session(lambda one: one.model or "base"), is_number=False),
        Column("STATE", 8, _session(lambda one: one.status), is_number=False),
        Column("TOKENS", 7, _session(lambda one: number(one.tokens))),
        Column("CACHED", 7, _session(_cached)),
        Column("TURNS", 6, _session(lambda one: number(one.turns))),
        Column("AGO", 5, lambda row, overview: ago(overview.at - row.active_at)),
    ),
    lambda overview: overview.sessions,
    lambda row: str(row.id),
    {
        "activity": None,
        "tokens": lambda one: -one.tokens,
        "id": lambda one: one.id,
    },
)
PANES = (ENGINES, TENANTS, ADAPTERS, SESSIONS)
