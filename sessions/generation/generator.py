"""Runs one generation and measures it. Chat completions, completions, messages and session turns all use this module.

    EngineClient.generate ──► times, counts ──► OutputParser ──► text and tool calls

Owns the stream of engine events. Never stores anything, and never renders a prompt. The engine cancels the request if
the caller closes `events` early, or if the answer contains a stop string.
Invariant: a token is counted when the engine sends it, even if the caller never reads its text.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    FinishReason,
    PromptAdmitted,
    PromptEmbedded,
    RequestFinished,
    StepsTraced,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest, KvFileKey
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.activity.meter import ActivityMeter, RequestWatch
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.encryption.kv_keys import TenantKvKeys
from graftwork.platform.errors import DeadlineExceeded, GraftworkError, InternalFailure, InvalidRequest
from graftwork.platform.modes.modes import ModeSwitch
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tracing.request_trace import NO_TRACE
from graftwork.sessions.generation.events import (
    GenerationEvent,
    GenerationFinished,
    OutputEvent,
    PromptReported,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.generation.logprobs import PromptLogprobCollector
from graftwork.sessions.generation.output_parser import OutputParser, OutputRules
from graftwork.sessions.generation.reasoning import ReasoningModel, ReasoningPlan, plan_reasoning
from graftwork.sessions.generation.request import GenerationRequest
from graftwork.sessions.generation.tracer import GenerationTracer
from graftwork.sessions.generation.usage import EngineUse, UnbilledTokens, Usage
from graftwork.sessions.text.encoding import NO_PUBLIC_PREFIXES, PublicPrefixes
from graftwork.sessions.text.tokenizer import TextTokenizer
from graftwork.sessions.tools.formats import HERMES, ToolCallFormat

__all__ = [
    "Generation",
    "GenerationEvent",
    "GenerationFinished",
    "Generator",
    "OutputEvent",
    "PromptAdmitted",
    "PromptReported",
    "ReasoningDelta",
    "StopReason",
    "TextDelta",
    "ToolCallArgumentsDelta",
    "ToolCallFinished",
    "ToolCallStarted",
]

_SEED_BITS = 53
"""So many bits of a drawn seed: every JSON reader keeps such a number exactly."""


@dataclass(frozen=True, slots=True)
class Generator:
    """Starts generations on one engine, with the tokenizer and the tool call format of its model."""

    engine: EngineClient
    tokenizer: TextTokenizer
    description: EngineDescription
    telemetry: Telemetry
    clock: Clock
    tool_call_format: ToolCallFormat = HERMES
    """How the model writes tool calls."""
    reasoning: ReasoningModel | None = None
    """How the model reasons; None for a model whose chat template shows no reasoning."""
    public_prefixes: PublicPrefixes = NO_PUBLIC_PREFIXES
    timeout_s: float | None = None
    """The most seconds of one generation, with its time in the queue; None sets no limit."""
    deadlines_s: Mapping[str, float] = field(default_factory=dict)
    """By service tier, the seconds to the first token that a request without a deadline of its own gets as its deadline.
    """

    activity: ActivityMeter = field(default_factory=lambda: ActivityMeter(SystemClock()))
    """Counts what tenants, adapters and sessions do."""
    modes: ModeSwitch | None = None
    """The operator's degraded modes; None has none."""
    kv_keys: TenantKvKeys | None = None
    """The keys of tenants' KV files; None lets engines write them plainly."""
    seeds: Random = field(default_factory=SystemRandom)
    """Draws the seeds of requests without one."""

    def prepared(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with a seed, and as the degraded modes allow it now. Call it before anything is reserved for
        the request.

        A request without a seed gets a new one, so that every run of it, on any engine, has the same noise. Raises
        Unavailable if the degraded modes refuse its service tier, and InvalidRequest for a budget of reasoning that
        cannot be kept.
        """
        self.reasoning_plan(request)
        if request.sampling.seed is None:
            seed = self.seeds.getrandbits(_SEED_BITS)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        return self._degraded(request)

    def refuse_early(self, newcomer: Newcomer, due_at: float | None) -> None:
        """Raises CapacityContended if the engine would refuse a request, however short its prompt. Call it before any work is
        done for the request.

        due_at: on the generator's monotonic clock; None takes the deadline of the tier.
        """
        deadline_s = self.deadlines_s.get(newcomer.tier) if due_at is None else due_at - self.clock.monotonic()
        self.engine.refuse_early(replace(newcomer, deadline_s=deadline_s))

    def reasoning_plan(self, request: GenerationRequest) -> ReasoningPlan:
        """Returns how the request's answer is split. Raises InvalidRequest for a budget that cannot be kept."""
        prompt, has_grammar = request.prompt_token_ids, request.grammar is not None
        return plan_reasoning(self.reasoning, request.reasoning, self.tokenizer, prompt, has_grammar=has_grammar)

    def _degraded(self, request: GenerationRequest) -> GenerationRequest:
        if self.modes is None:
            return request
        modes, sampling = self.modes.current, request.sampling
        modes.check_tier(request.tier)
        if request.uses_lookups == modes.suspend_drafts:
            request = replace(request, uses_lookups=not modes.suspend_drafts)
        most = modes.max_output_tokens
        if most is None or sampling.max_tokens <= most:
            return request
        capped = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        return replace(request, sampling=capped, output_cap=most)

    def start(self, request: GenerationRequest) -> "Generation":
        """Returns a new generation of a request that `prepared` has returned.

        The request goes to the engine when the caller first reads `Generation.events`.
        """
        return Generation(self, request)


class Generation:
    """One request to the engine: its events, and the tokens that it has used so far."""

    def __init__(self, generator: Generator, request: GenerationRequest) -> None:
        self.request = request
        self.cache: CacheReport | None = None
        """The prompt's tokens by the cache tier that had their KV; None until the prompt has left the queue."""
        self.completion_tokens = 0
        """The number of tokens that the engine has generated so far.

        After the end, tokens after a stop string do not count.
        """
        self._received_tokens = 0
        self.kv_byte_seconds = 0
        """The bytes of KV on the device that the engine has reported so far, times seconds."""
        self.engine_us = 0
        """The request's share of the time of the engine's steps, as far as reported, in microseconds."""
        self._adapter_bytes = 0
        self.drafts = DraftReport()
        """The counts of draft tokens, reported when the engine finishes; empty for a cancelled generation."""
        self.prompt_computed = asyncio.Event()
        """Is set when the first token arrives, or when a generation ends without tokens."""
        self._generator = generator
        self._reasoning = generator.reasoning_plan(request)
        self._telemetry = generator.telemetry
        self._now = generator.clock.monotonic
        self._tracer = GenerationTracer(NO_TRACE, request.request_id)
        self._started_at = 0.0
        self._last_tokens_at = self._first_tokens_at = 0.0
        self._num_first_tokens = 0
        self.reasoning_tokens = 0
        """Those of the tokens that are the model's reasoning, known at the end."""
        self._embedding: bytes | None = None
        self._watch: RequestWatch | None = None
        """Tells the activity meter what becomes of the request; None before its start and for a request of nobody."""

    @property
    def usage(self) -> Usage | None:
        """The token counts of the request so far. They are None while the prompt waits in the engine's queue."""
        if self.cache is None:
            return None
        unbilled = UnbilledTokens(completion=self.unbilled_tokens)
        return Usage(self.cache, self.completion_tokens, self.drafts, self.engine_use, self.reasoning_tokens, unbilled)

    @property
    def unbilled_tokens(self) -> int:
        """The number of tokens that the engine has generated and that do not count, known at the end."""
        return self._received_tokens - self.completion_tokens

    @property
    def engine_use(self) -> EngineUse:
        """What the engine has reported so far."""
        return EngineUse(self.kv_byte_seconds, self._adapter_bytes, self.engine_us)

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Sends the request to the engine, and yields the events of the answer.

        Call this method once. The order of the events is described in `sessions/generation/events.py`. Raises InvalidRequest
        if the engine refuses the request, DeadlineExceeded after the generator's `timeout_s`, and the engine's errors.
        """
        tracer = self._tracer = GenerationTracer(self.request.trace, self.request.request_id)
        parser = OutputParser(self._generator.tokenizer, self._rules())
        tracer.time(parser.push)
        try:
            scored_ids = None if self.request.sampling.prompt_logprobs is None else self.request.prompt_token_ids
            prompt = None if scored_ids is None else PromptLogprobCollector(self._generator.tokenizer, scored_ids)
            reported: PromptReported | None = None
            reason: FinishReason | None = None
            self._begin()
            async with aclosing(self._generator.engine.generate(await self._engine_request())) as engine_events:
                async for event in engine_events:
                    if prompt is not None and (tokens := prompt.take(event)) is not None:
                        prompt, reported = None, PromptReported(tokens)
                        yield reported
                    if isinstance(event, TokensGenerated):
                        self._count_tokens(event)
                        for output in tracer.push(event.token_ids, event.logprobs):
                            yield output
                        if parser.is_over:
                            break
                    elif isinstance(event, PromptAdmitted):
                        self._count_prompt(event)
                        yield event
                    elif isinstance(event, RequestFinished):
                        self._count_end(event)
                        reason = event.reason
                    elif isinstance(event, PromptEmbedded):
                        self._embedding = event.values
                    elif isinstance(event, StepsTraced):
                        tracer.add_steps(event)
        except GraftworkError as error:
            self._count_failure(error)
            if isinstance(error, InvalidRequest) and self.request.grammar is not None:
                raise self.request.grammar.name_field(error) from error
            raise
        finally:
            self._end(parser)
        if reason is None and not parser.is_over:
            raise InternalFailure("The engine's answer broke off without saying why; send the request again.")
        self._count_success()
        for output in parser.finish():
            yield output
        self.completion_tokens = len(parser.token_ids)  # tokens after a stop string are not charged
        self.reasoning_tokens = parser.reasoning_tokens
        tracer.count(self.usage)
        yield self._finished(parser, reason, reported)

    def _finished(
        self, parser: OutputParser, reason: FinishReason | None, reported: PromptReported | None
    ) -> GenerationFinished:
        """Returns the last event, with what the engine has told about the prompt."""
        finished = parser.finished(reason, self.cache or CacheReport())
        scores = None if reported is None else reported.tokens
        return replace(finished, prompt_logprobs=scores, embedding=self._embedding)

    def _begin(self) -> None:
        self._started_at = self._now()
        if self.request.owner is not None:
            self._watch = self._generator.activity.begin(self.request.owner, self.request.tier)

    def _end(self, parser: OutputParser) -> None:
        """Tells all who watch the request that the engine has ended with it, whatever the reason."""
        self._tracer.ended(self.usage)
        self._tracer.log_tokens(self.request.prompt_token_ids, parser.token_ids)
        self.prompt_computed.set()
        if self._watch is not None:
            self._watch.end()

    def _count_failure(self, error: GraftworkError) -> None:
        self._telemetry.objectives.note_end(self.request.tier, failed=error.is_server_fault)
        if self._watch is not None:
            self._watch.failed(error.code, by_server=error.is_server_fault)

    def _count_prompt(self, event: PromptAdmitted) -> None:
        self.cache = event.cache
        self._adapter_bytes = event.adapter_bytes
        self._tracer.admitted(event.cache)
        self._telemetry.queue.observe(self._now() - self._started_at)
        if self._watch is not None:
            self._watch.admitted(Usage(event.cache, 0, self.drafts).prompt_tokens_by_tier, event.cache.miss_reason)

    def _count_tokens(self, event: TokensGenerated) -> None:
        num_tokens = len(event.token_ids)
        self.kv_byte_seconds += event.kv_byte_seconds
        self.engine_us += event.engine_us
        if not num_tokens:
            return
        now = self._now()
        if self.completion_tokens:
            each_s = (now - self._last_tokens_at) / num_tokens
            self._telemetry.inter_token.observe(each_s)
            if self._watch is not None:
                self._watch.tokens(num_tokens, each_s)
        else:
            self._telemetry.time_to_first_token.observe(now - self._started_at)
            self._telemetry.objectives.note_first_token(self.request.tier, now - self._started_at)
            if self._watch is not None:
                self._watch.first_tokens(num_tokens, now - self._started_at)
            self._first_tokens_at, self._num_first_tokens = now, num_tokens
            self._tracer.first_token()
            self.prompt_computed.set()
        self._last_tokens_at = now
        self.completion_tokens += num_tokens
        self._received_tokens += num_tokens

    def _count_success(self) -> None:
        objectives, tier = self._telemetry.objectives, self.request.tier
        objectives.note_end(tier, failed=False)
        later = self.completion_tokens - self._num_first_tokens
        mean_s = (self._last_tokens_at - self._first_tokens_at) / later if later else None
        if mean_s is not None:
            objectives.note_between_tokens(tier, mean_s)
        if self._watch is not None:
            self._watch.ended_well(mean_s)

    def _count_end(self, event: RequestFinished) -> None:
        self.drafts = event.drafts
        self.kv_byte_seconds += event.kv_byte_seconds
        self.engine_us += event.engine_us
        self._telemetry.e2e.observe(self._now() - self._started_at)

    def _rules(self) -> OutputRules:
        request, generator = self.request, self._generator
        own_stops = () if request.sampling.ignore_eos else generator.description.eos_token_ids
        return OutputRules(
            stop=request.stop,
            stop_token_ids=frozenset((*request.sampling.stop_token_ids, *own_stops)),
            min_tokens=request.sampling.min_tokens,
            tool_calls=generator.tool_call_format if request.parse_tool_calls else None,
            parallel_tool_calls=request.parallel_tool_calls,
            reasoning=self._reasoning.form,
            is_reasoning=self._reasoning.is_open,
            with_logprobs=request.sampling.logprobs is not None,
            with_stop_logprobs=request.stop_logprobs,
        )

    async def _engine_request(self) -> EngineRequest:
        request, owner, keys = self.request, self.request.owner, self._generator.kv_keys
        kv_key = None if keys is None or owner is None else KvFileKey(await keys.of(owner.tenant_id))
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            domain=request.isolation,
            adapters=request.resolved.adapters,
            tier=request.tier,
            weight=request.weight,
            session=request.session,
            kv_limits=request.kv_limits,
            kv_key=kv_key,
            cache_ttl_s=request.cache_ttl_s,
            pooling=request.pooling,
            prediction_token_ids=request.prediction_token_ids,
            grammar=None if request.grammar is None else request.grammar.source,
            reasoning=self._reasoning.rule,
            public_tokens=self._generator.public_prefixes.tokens_of(request.prompt_token_ids),
            timeout_s=self._generator.timeout_s,
            deadline_s=self._deadline_s(),
            uses_lookups=request.uses_lookups,
            traced=request.trace.is_traced,
        )

    def _deadline_s(self) -> float | None:
        """Returns the seconds that are left until the first token is due. Raises DeadlineExceeded if none are."""
        if self.request.due_at is None:
            return self._generator.deadlines_s.get(self.request.tier)
        left_s = self.request.due_at - self._now()
        if left_s <= 0:
            raise DeadlineExceeded(
                "The deadline for the first token has passed before the request reached the engine. Send it again with a "
                "longer x-deadline-ms."
            )
        return left_s
