"""What the engine really did for one request, counted where its events pass.

The usage of a turn that was cancelled is what the engine had emitted by then; the text above it may have seen less.
So the count is taken here, under the generator, and never from what was delivered.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    EngineEvent,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.ids import IsolationDomain


class TallyingEngine:
    """An engine client that counts what passes through it for one request."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.cache: CacheReport | None = None
        """None until the prompt has left the queue."""
        self.completion_tokens = 0
        self.drafts = DraftReport()
        """What was guessed; the engine tells at a request's own end, so of one that was broken off nothing is known."""
        self.prompt_computed = asyncio.Event()
        """Set by the first token, and when there will be none."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion; 0 until the prompt has left the queue."""
        return 0 if self.cache is None else self.cache.prompt_tokens + self.completion_tokens

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    self._count(event)
                    yield event
        finally:
            self.prompt_computed.set()

    def _count(self, event: EngineEvent) -> None:
        if isinstance(event, PromptAdmitted):
            self.cache = event.cache
        elif isinstance(event, TokensGenerated):
            self.completion_tokens += len(event.token_ids)
            self.prompt_computed.set()
        elif isinstance(event, RequestFinished):
            self.drafts = event.drafts

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
        """The engine is shared; its owner closes it."""
