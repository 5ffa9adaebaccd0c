"""Defines where a gateway notes what each engine reports about each request, apart from what it bills.

    begin   a request goes to an engine
    note    an event of the engine has come, before anybody else sees it
    end     the engine has ended with the request, or the gateway has left it

Owns only the interfaces, and which figures of an event are noted. Never changes an event.
"""

from typing import Protocol, runtime_checkable

from graftwork.engine.core.events import EngineEvent, PromptAdmitted, RequestFinished, TokensGenerated
from graftwork.engine.core.requests import EngineRequest


class RequestReport(Protocol):
    """What one engine has reported about one request so far."""

    def admit(self, prompt_tokens: int, cached_tokens: int, *, host_tokens: int = 0, disk_tokens: int = 0) -> None: ...

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0, engine_us: int = 0) -> None: ...

    def add_adapters(self, adapter_bytes: int) -> None: ...

    def end(self) -> None: ...


class RequestReports(Protocol):
    """Keeps the reports of all requests of a gateway."""

    def begin(self, request: EngineRequest) -> RequestReport:
        """Begins the report of a request. Raises Unavailable if it cannot be kept."""
        ...


@runtime_checkable
class ReportingClient(Protocol):
    """A connection to engines that notes what they report."""

    def report_to(self, reports: RequestReports) -> None:
        """Notes the events of all requests that are sent from now on."""
        ...


def note_event(report: RequestReport, event: EngineEvent) -> None:
    """Adds the figures of an event to a report."""
    if isinstance(event, TokensGenerated):
        report.add(len(event.token_ids), event.kv_byte_seconds, event.engine_us)
    elif isinstance(event, PromptAdmitted):
        cache = event.cache
        report.admit(
            cache.prompt_tokens, cache.cached_tokens, host_tokens=cache.host_tokens, disk_tokens=cache.disk_tokens
        )
        report.add_adapters(event.adapter_bytes)
    elif isinstance(event, RequestFinished):
        report.add(0, event.kv_byte_seconds, event.engine_us)


class _NoReports:
    """Notes nothing."""

    def begin(self, request: EngineRequest) -> RequestReport:
        return self

    def admit(self, prompt_tokens: int, cached_tokens: int, *, host_tokens: int = 0, disk_tokens: int = 0) -> None:
        return None

    def add(self, completion_tokens: int, kv_byte_seconds: int = 0, engine_us: int = 0) -> None:
        return None

    def add_adapters(self, adapter_bytes: int) -> None:
        return None

    def end(self) -> None:
        return None


NO_REPORTS: RequestReports = _NoReports()
