"""The model of the console's tests: it follows a script, may take its time, and reports figures of its requests."""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    MissReason,
    PromptAdmitted,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineStats
from tests.api.server.test_fleets import FleetEngine
from tests.clients.scripted_gateway import ScriptedModel

CONTEXT_TOKENS = 16_384


@dataclass
class ConsoleModel(FleetEngine, ScriptedModel):
    """One engine. Without other words it answers at once, and finds nothing in its cache."""

    text: str = "I have nothing to say to this."
    context_tokens: int = CONTEXT_TOKENS
    queue_s: float = 0.0
    """How long a request waits in the queue; the next fields: for its first token, for each token of its prompt that is
    computed, and between two tokens.
    """
    first_token_s: float = 0.0
    prompt_token_s: float = 0.0
    token_s: float = 0.0
    cached_shares: tuple[float, float, float] | None = None
    """The parts of each prompt that are cached: on the device, on the host, on disk."""
    miss_reason: MissReason | None = None
    has_doubts: bool = False
    """Whether the probabilities differ from token to token."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the engine reports beside the figures of its requests."""
    most_resident: int = 100
    resident: dict[str, None] = field(default_factory=dict)
    """The digests of adapters on the device, the latest last; the next field: in host memory."""
    on_host: tuple[str, ...] = ()
    running: int = 0
    num_generated: int = 0
    num_prompt: int = 0

    async def _events(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self._load([one.digest for one in request.adapters])
        self.num_prompt += len(request.prompt_token_ids)
        self.running += 1
        try:
            pause_s = self.first_token_s
            async for event in super()._events(request):
                paced = await self._paced(event, len(request.prompt_token_ids), pause_s)
                if isinstance(paced, PromptAdmitted):
                    pause_s += self.prompt_token_s * paced.cache.recomputed_tokens
                elif isinstance(paced, TokensGenerated):
                    pause_s = self.token_s
                yield paced
        finally:
            self.running -= 1

    def _load(self, digests: list[str]) -> None:
        for digest in digests:
            self.resident.pop(digest, None)
            self.resident[digest] = None
        for _ in range(len(self.resident) - self.most_resident):
            digest = next(iter(self.resident))
            del self.resident[digest]
            self.on_host = (*self.on_host, digest)

    async def _paced(self, event: EngineEvent, num_prompt: int, pause_s: float) -> EngineEvent:
        if isinstance(event, PromptAdmitted):
            await asyncio.sleep(self.queue_s)
            return replace(event, cache=self._report(event.cache, num_prompt))
        if isinstance(event, TokensGenerated):
            await asyncio.sleep(pause_s)
            self.num_generated += 1
            if self.has_doubts and event.logprobs:
                return replace(event, logprobs=tuple(doubtful(token) for token in event.token_ids))
        return event

    def _report(self, cache: CacheReport, num_prompt: int) -> CacheReport:
        if self.cached_shares is None:
            return replace(cache, miss_reason=self.miss_reason)
        device, host, disk = (int(share * num_prompt) for share in self.cached_shares)
        return CacheReport(device, host, disk, num_prompt - device - host - disk, self.miss_reason)

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        memory = await super().run_session_command(command)
        if self.cached_shares is None:
            return memory
        total = len(command.token_ids)
        device, host, disk = (int(share * total) for share in self.cached_shares)
        missing = total - device - host - disk
        return replace(
            memory,
            device_tokens=device,
            host_tokens=host,
            disk_tokens=disk,
            missing_tokens=missing,
            device_bytes=device * 49_152,
            host_bytes=host * 49_152,
            disk_bytes=disk * 49_152,
        )

    async def stats(self) -> EngineStats:
        found = replace(
            await super().stats(),
            resident_adapters=tuple(self.resident),
            host_adapters=self.on_host,
            generated_tokens=self.num_generated,
            prompt_tokens=self.num_prompt,
        )
        if not self.figures:
            return found
        steps = 7 + self.num_generated
        return replace(found, running_requests=self.running, steps=steps, step_seconds=0.021 * steps, **self.figures)


def doubtful(token: int) -> TokenLogprobs:
    """A token with a probability of its own, and four rivals that share the rest."""
    share = 0.99 - (token * 37 % 11) ** 2 / 130
    rivals = [
        (token + step, math.log((1 - share) * part))
        for step, part in zip((1, 3, 5, 9), (0.5, 0.3, 0.1, 0.05), strict=True)
    ]
    own = (token, math.log(share))
    return TokenLogprobs(own[1], tuple(sorted([own, *rivals], key=lambda one: -one[1])))
