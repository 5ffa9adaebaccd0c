"""An engine that plays a scripted list of steps, and a generator on it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.clock import Clock, ManualClock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain
from graftwork.platform.telemetry import Telemetry
from graftwork.sessions.generation.generator import Generator
from tests.sessions.tokenizer_and_templates import text_tokenizer, token_id


def description(eos_token_ids: tuple[int, ...] | None = None) -> EngineDescription:
    tokenizer = text_tokenizer()
    return EngineDescription(
        model_name="tiny",
        fingerprint="sha256:0",
        vocab_size=tokenizer.vocab_size,
        context_tokens=2048,
        eos_token_ids=eos_token_ids or (token_id("<|im_end|>"),),
        num_layers=1,
        hidden_size=8,
        biased_targets=(),
        target_shapes={},
        max_lora_rank=8,
        page_tokens=16,
        device_pages=8,
    )


def generator_on(engine: EngineClient, *, telemetry: Telemetry | None = None, clock: Clock | None = None) -> Generator:
    """A generator of the tests' model on this engine."""
    return Generator(engine, text_tokenizer(), description(), telemetry or Telemetry(), clock or ManualClock())


def logprobs_of(token_ids: Sequence[int], wanted: int | None) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities that show their token: -(id + 1) / 1000, with the following ids as alternatives."""
    if wanted is None:
        return ()
    tops = [tuple((other, -(other + 1) / 1000) for other in range(token, token + wanted)) for token in token_ids]
    return tuple(TokenLogprobs(-(token + 1) / 1000, top) for token, top in zip(token_ids, tops, strict=True))


class BareEngine:
    """What the scripted engines of these tests have in common: all of EngineClient but `generate`."""

    async def describe(self) -> EngineDescription:
        return description()

    async def stalled_s(self) -> float:
        return 0.0

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        return SessionMemory(missing_tokens=len(command.token_ids))

    def refuse_early(self, newcomer: Newcomer) -> None:
        return None

    async def probe_adapter(self, digest: str) -> None:
        raise NotImplementedError

    async def forget_adapter(self, digest: str) -> None:
        raise NotImplementedError

    async def forget_domain(self, domain: IsolationDomain) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return None


@dataclass
class ScriptedEngine(BareEngine):
    """Implements EngineClient: plays the steps, each of any number of tokens, then finishes or fails."""

    steps: Sequence[tuple[int, ...]]
    reason: FinishReason | None = FinishReason.STOP
    """None: the stream ends without its last event."""
    failure: GraftworkError | None = None
    """Raised instead of the last event."""
    cache: CacheReport = field(default_factory=CacheReport)
    requests: list[EngineRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Requests that were closed before their end."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        has_ended = False
        try:
            yield PromptAdmitted(self.cache)
            for step in self.steps:
                yield TokensGenerated(step, logprobs_of(step, request.sampling.logprobs))
            has_ended = True
            if self.failure is not None:
                raise self.failure
            if self.reason is not None:
                yield RequestFinished(self.reason, sum(map(len, self.steps)))
        finally:
            if not has_ended:
                self.cancelled.append(request.request_id)
