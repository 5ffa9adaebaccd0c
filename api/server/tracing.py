"""Opens what a gateway needs to trace requests: the traces that it keeps, the operator's switches, the export of spans.

Never decides which request is traced: `platform/tracing/trace_rules.py` does.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from graftwork.api.deps.resources import repeating
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.modes.modes import REFRESH_S
from graftwork.platform.modes.trace_switches import TraceSwitchboard
from graftwork.platform.settings import Settings
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tracing.trace_book import TraceBook
from graftwork.platform.tracing.trace_rules import Switches, TraceRules


@dataclass(frozen=True, slots=True)
class Tracing:
    """What a gateway knows of its requests, and who decides which are traced."""

    book: TraceBook
    switchboard: TraceSwitchboard

    async def forget(self, scope: TenantScope) -> bool:
        """Drops the traces of a deleted tenant that this gateway keeps. Other gateways drop theirs by and by."""
        self.book.forget(scope)
        return True


@asynccontextmanager
async def open_tracing(
    settings: Settings, clock: Clock, database: Database, gateway_id: str
) -> AsyncGenerator[Tracing, None]:
    """Keeps traces and follows the operator's switches for the duration of the `async with` block.

    `gateway_id` names this gateway. The database must have the schema of this code.
    """
    switches = Switches()
    rules = TraceRules(settings.trace_share, follows_parent=settings.otlp_endpoint is not None, switches=switches)
    book = TraceBook(clock, gateway_id, rules=rules)
    tracing = Tracing(book, TraceSwitchboard(database, clock, switches))
    await tracing.switchboard.refresh()
    async with (
        _exported(settings, book),
        repeating(tracing.switchboard.refresh, REFRESH_S, "reading the switches of traces"),
    ):
        yield tracing


@asynccontextmanager
async def _exported(settings: Settings, book: TraceBook) -> AsyncGenerator[None, None]:
    """Sends the traced requests of this gateway to OpenTelemetry's collector, if the settings name one."""
    if settings.otlp_endpoint is None:
        yield
        return
    from graftwork.platform.tracing.otel_sdk import open_otlp

    export = open_otlp(settings.otlp_endpoint, book.gateway_id, with_gen_ai=settings.otel_gen_ai)
    book.exports.append(export.spans.export)
    try:
        yield
    finally:
        await asyncio.to_thread(export.close)
