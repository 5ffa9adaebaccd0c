"""An engine that says what it is told to, for the routes above it."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    PromptEmbedded,
    PromptScored,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.reports import NO_REPORTS, RequestReports, note_event
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain
from tests.adapters import adapter_files
from tests.sessions.scripted_engine import logprobs_of
from tests.sessions.tokenizer_and_templates import text_tokenizer, token_id

END = token_id("<|im_end|>")
CONTEXT_TOKENS = 2048
BASE = "tiny"
HIDDEN_SIZE = adapter_files.DESCRIPTION.hidden_size
MAX_ANSWERS = 128
"""The most answers that one tenant may have in flight."""


def embedding_of(prompt: Sequence[int]) -> bytes:
    """The embedding of every prompt: its token ids, again and again."""
    return struct.pack(f"<{HIDDEN_SIZE}f", *islice(cycle(prompt), HIDDEN_SIZE))


def describe() -> EngineDescription:
    """A model of the text tests' vocabulary with the adapter tests' shapes."""
    vocab_size = text_tokenizer().vocab_size
    return replace(
        adapter_files.DESCRIPTION,
        vocab_size=vocab_size,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(END,),
        max_requests=2 * MAX_ANSWERS,
        max_domain_requests=MAX_ANSWERS,
    )


@dataclass
class FakeEngine:
    """Implements EngineClient: answers every request with `text`, one token a step."""

    text: str = "The weather in Paris is sunny."
    refusal: GraftworkError | None = None
    """Raised before a request is admitted."""
    lateness: GraftworkError | None = None
    """Raised for everything that is asked about before a request."""
    newcomers: list[Newcomer] = field(default_factory=list)
    """What was asked about."""
    refused_digests: dict[str, GraftworkError] = field(default_factory=dict)
    """Raised before a request for one of these adapters is admitted."""
    breaks_after: int | None = None
    """Tokens after which `breakage` is raised."""
    breakage: GraftworkError | None = None
    holds_after: int | None = None
    """Tokens after which a request waits until `release` is set."""
    max_answers: int = MAX_ANSWERS
    """The most answers that one tenant may have in flight."""
    holds_queue: bool = False
    """Requests are not even admitted before `release` is set."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request waits."""
    cancelled_event: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[EngineRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    forgotten_domains: list[IsolationDomain] = field(default_factory=list)
    absence: GraftworkError | None = None
    """Raised instead of forgetting a domain."""
    probed: list[str] = field(default_factory=list)
    probe_refusal: GraftworkError | None = None
    """Raised for every adapter that is tried."""
    cached_tokens: int = 0
    host_tokens: int = 0
    """The part of `cached_tokens` that is in host memory."""
    adapter_bytes: int = 0
    kv_byte_seconds: int = 0
    """What each token, and the end of an answer, reports; so is the next field."""
    engine_us: int = 0
    drafts: DraftReport = field(default_factory=DraftReport)
    """What every answer's end tells of its guesses."""
    session_commands: list[SessionCommand] = field(default_factory=list)

    reports: RequestReports = NO_REPORTS

    async def describe(self) -> EngineDescription:
        most = self.max_answers
        return replace(describe(), max_requests=2 * most, max_domain_requests=most)

    def refuse_early(self, newcomer: Newcomer) -> None:
        self.newcomers.append(newcomer)
        if self.lateness is not None:
            raise self.lateness

    def report_to(self, reports: RequestReports) -> None:
        self.reports = reports

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        for digest in request.adapter_digests:
            if digest in self.refused_digests:
                raise self.refused_digests[digest]
        has_ended, report = False, self.reports.begin(request)
        try:
            if self.holds_queue:
                await self.hold()
            async for event in self._events(request):
                has_ended = isinstance(event, RequestFinished)
                note_event(report, event)
                yield event
        except GraftworkError:
            has_ended = True
            raise
        finally:
            report.end()
            if not has_ended:
                self.cancelled.append(request.request_id)
                self.cancelled_event.set()

    def answer_to(self, request: EngineRequest) -> str:
        """The text that answers this request."""
        return self.text

    @property
    def _use(self) -> tuple[int, int]:
        return self.kv_byte_seconds, self.engine_us

    async def _events(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        cached = min(self.cached_tokens, len(request.prompt_token_ids))
        host = min(self.host_tokens, cached)
        recomputed = len(request.prompt_token_ids) - cached
        cache = CacheReport(device_tokens=cached - host, host_tokens=host, recomputed_tokens=recomputed)
        yield PromptAdmitted(cache, self.adapter_bytes)
        if (num_top := request.sampling.prompt_logprobs) is not None:
            yield PromptScored(
                tuple(
                    replace(one, rank=place)
                    for place, one in enumerate(logprobs_of(request.prompt_token_ids[1:], num_top), start=1)
                )
            )
        if request.pooling is not None:
            yield PromptEmbedded(embedding_of(request.prompt_token_ids))
        answer = (*text_tokenizer().encode(self.answer_to(request), allow_special=True), END)
        tokens = answer[: request.sampling.max_tokens]
        for made, token in enumerate(tokens):
            if made == self.breaks_after and self.breakage is not None:
                raise self.breakage
            if made == self.holds_after:
                await self.hold()
            yield TokensGenerated((token,), logprobs_of([token], request.sampling.logprobs), *self._use)
        reason = FinishReason.STOP if tokens == answer else FinishReason.LENGTH
        yield RequestFinished(reason, len(tokens), self.drafts, *self._use)

    async def hold(self) -> None:
        self.held.set()
        await self.release.wait()

    async def stalled_s(self) -> float:
        return 0.0

    async def stats(self) -> EngineStats:
        return EngineStats(
            running_requests=1,
            waiting_requests=2,
            kv_usage_ratio=0.18,
            free_pages=5,
            cached_pages=3,
            active_pages=2,
            in_flight_pages=1,
            host_cached_pages=6,
            disk_pages=9,
            disk_foreign_files=2,
            steps=7,
            preemptions=3,
        )

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        self.session_commands.append(command)
        return SessionMemory(
            host_tokens=len(command.token_ids), host_bytes=1000, lease_s=2.5 if command.waits else None
        )

    async def probe_adapter(self, digest: str) -> None:
        self.probed.append(digest)
        if self.probe_refusal is not None:
            raise self.probe_refusal

    async def forget_adapter(self, digest: str) -> None:
        self.forgotten.append(digest)

    async def forget_domain(self, domain: IsolationDomain) -> None:
        if self.absence is not None:
            raise self.absence
        self.forgotten_domains.append(domain)

    async def close(self) -> None:
        return None
