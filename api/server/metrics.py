"""The usage ledger, with what is entered there counted for the metrics as well."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.events import EngineEvent, PromptAdmitted, RequestFinished, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.ids import IsolationDomain
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.metering import UsageEvent, UsageMeter


class CountedMeter(UsageMeter):
    """Counts a request once, as the ledger does."""

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        super().__init__(database)
        self._telemetry = telemetry

    async def record(self, event: UsageEvent) -> bool:
        is_new = await super().record(event)
        if is_new:
            # The ledger does not tell the tiers of a cache apart; until host and disk hold pages, all is the device's.
            tokens_by_tier = {"device": event.cached_tokens, "recomputed": event.prompt_tokens - event.cached_tokens}
            self._telemetry.count_tokens(event.tenant_id, tokens_by_tier, event.completion_tokens)
            self._telemetry.count_request(event.tenant_id, event.outcome)
        return is_new


class TimedEngine:
    """Owns the wrapped client: closing this closes that."""

    def __init__(self, engine: EngineClient, telemetry: Telemetry, clock: Clock) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._clock = clock

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        stopwatch = _Stopwatch(self._telemetry, self._clock)
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                stopwatch.observe(event)
                yield event

    async def describe(self) -> EngineDescription:
        return await self._engine.describe()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        return await self._engine.run_session_command(command)

    async def probe_adapter(self, digest: str) -> None:
        await self._engine.probe_adapter(digest)

    async def forget_adapter(self, digest: str) -> None:
        await self._engine.forget_adapter(digest)

    async def forget_domain(self, domain: IsolationDomain) -> None:
        await self._engine.forget_domain(domain)

    async def close(self) -> None:
        await self._engine.close()


class _Stopwatch:
    """The times of one request."""

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._started_at = clock.monotonic()
        self._last_tokens_at: float | None = None

    def observe(self, event: EngineEvent) -> None:
        now = self._clock.monotonic()
        if isinstance(event, PromptAdmitted):
            self._telemetry.queue.observe(now - self._started_at)
        elif isinstance(event, TokensGenerated) and event.token_ids:
            self._observe_tokens(now, len(event.token_ids))
        elif isinstance(event, RequestFinished):
            self._telemetry.e2e.observe(now - self._started_at)

    def _observe_tokens(self, now: float, num_tokens: int) -> None:
        if self._last_tokens_at is None:
            self._telemetry.time_to_first_token.observe(now - self._started_at)
        else:
            self._telemetry.inter_token.observe((now - self._last_tokens_at) / num_tokens)
        self._last_tokens_at = now
