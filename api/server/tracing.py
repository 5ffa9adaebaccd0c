"""Opens what a gateway needs to trace requests: the traces that it keeps and shares, the operator's switches, the export
of spans.

Never decides which request is traced: `platform/tracing/trace_rules.py` does.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from graftwork.api.deps.background import repeating
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.modes.modes import REFRESH_S
from graftwork.platform.modes.trace_switches import TraceSwitchboard
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.platform.tracing.trace_book import TraceBook
from graftwork.platform.tracing.trace_rules import Switches, TraceRules
from graftwork.platform.tracing.trace_store import TraceStore

_log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Tracing:
    """What a gateway knows of its requests, and who decides which are traced."""

    book: TraceBook
    store: TraceStore
    switchboard: TraceSwitchboard

    async def forget(self, scope: TenantScope) -> bool:
        """Drops the traces of a deleted tenant: those that this gateway keeps, and those that all share. Other gateways
        drop their own by and by.
        """
        self.book.forget(scope)
        await self.store.forget(scope)
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
    store = TraceStore(database, clock, gateway_id)
    book.exports.append(store.offer)
    tracing = Tracing(book, store, TraceSwitchboard(database, clock, switches))
    await tracing.switchboard.refresh()
    async with (
        _exported(settings, book),
        repeating(tracing.switchboard.refresh, REFRESH_S, "reading the switches of traces"),
        repeating(store.flush, _FLUSH_EVERY_S, "storing traces"),
    ):
        yield tracing
    try:
        await store.flush()
    except Unavailable as error:
        _log.warning("traces_not_stored", extra={"reason": error.message})


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
