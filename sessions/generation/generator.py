"""Where an engine's tokens become text and tool calls, for chat completions and for session turns alike.

Owns the engine's stream for as long as somebody listens: closing `stream` early cancels the request, and so does a
stop string. Never stores anything and never renders a prompt.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.requests import NO_KV_LIMITS, EngineRequest, KvLimits, ServiceTier, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import InternalFailure, InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.sessions.generation.constraints import AnswerGrammar
from graftwork.sessions.generation.events import (
    AnswerEvent,
    GenerationEvent,
    GenerationFinished,
    StopReason,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.generation.logprobs import ScoreKeeper
from graftwork.sessions.generation.output_parser import AnswerReader, AnswerRules
from graftwork.sessions.text.tokenizer import TextTokenizer
from graftwork.sessions.tools.formats import HERMES, ToolCallForm

__all__ = [
    "AnswerEvent",
    "GenerationEvent",
    "GenerationFinished",
    "GenerationRequest",
    "Generator",
    "PromptAdmitted",
    "StopReason",
    "TextDelta",
    "ToolCallArgumentsDelta",
    "ToolCallFinished",
    "ToolCallStarted",
]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue, and how to read what comes."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resolved: ResolvedModel
    isolation: IsolationDomain
    stop: tuple[str, ...] = ()
    weight: float = 1.0
    tier: ServiceTier = ServiceTier.DEFAULT
    parse_tool_calls: bool = False
    """False: everything is text."""
    parallel_tool_calls: bool = True
    """False: the generation ends with its first call."""
    session: SessionUse | None = None
    """The session that the prompt continues."""
    kv_limits: KvLimits = NO_KV_LIMITS
    prediction_token_ids: tuple[int, ...] = ()
    """What the answer is expected to be; it changes nothing but the pace."""
    grammar: AnswerGrammar | None = None
    """What the answer is held to."""


class Generator:
    """Generates on one engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        description: EngineDescription,
        *,
        tool_call_form: ToolCallForm = HERMES,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._description = description
        self._tool_call_form = tool_call_form

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one generation; see `generation_events` for their order.

        Raises InvalidRequest, and whatever the engine raises.
        """
        answer = _Answer(AnswerReader(self._tokenizer, self._rules(request)), self._score_keeper(request))
        reader = answer.reader
        cache = CacheReport()
        reason: FinishReason | None = None
        async with aclosing(self._engine_events(request)) as engine_events:
            async for engine_event in engine_events:
                match engine_event:
                    case PromptAdmitted():
                        cache = engine_event.cache
                        yield engine_event
                    case TokensGenerated():
                        for event in answer.read(engine_event):
                            yield event
                    case RequestFinished():
                        reason = engine_event.reason
                if reader.is_over:
                    break
        if reason is None and not reader.is_over:
            raise InternalFailure("The engine's answer broke off without saying why; send the request again.")
        for event in answer.rest():
            yield event
        yield answer.finished(reason, cache)

    async def _engine_events(self, request: GenerationRequest) -> AsyncGenerator[EngineEvent, None]:
        """The engine's own; what it says against the request's grammar is told in the client's terms."""
        try:
            async with aclosing(self._engine.generate(_engine_request(request))) as events:
                async for event in events:
                    yield event
        except InvalidRequest as error:
            raise error if request.grammar is None else request.grammar.blamed(error) from error

    def _score_keeper(self, request: GenerationRequest) -> ScoreKeeper | None:
        return None if request.sampling.logprobs is None else ScoreKeeper(self._tokenizer)

    def _rules(self, request: GenerationRequest) -> AnswerRules:
        own_stops = () if request.sampling.ignore_eos else self._description.eos_token_ids
        return AnswerRules(
            stop=request.stop,
            stop_token_ids=frozenset((*request.sampling.stop_token_ids, *own_stops)),
            min_tokens=request.sampling.min_tokens,
            tool_calls=self._tool_call_form if request.parse_tool_calls else None,
            parallel_tool_calls=request.parallel_tool_calls,
        )


class _Answer:
    """One answer as it is read, and the scores of its tokens where they are wanted."""

    def __init__(self, reader: AnswerReader, keeper: ScoreKeeper | None) -> None:
        self.reader = reader
        self._keeper = keeper

    def read(self, step: TokensGenerated) -> Iterator[AnswerEvent]:
        """What the tokens of one step bring; those behind the answer's end were never part of it."""
        for place, token_id in enumerate(step.token_ids):
            if self.reader.is_over:
                return
            if self._keeper is not None and self.reader.is_spoken(token_id):
                self._keeper.add(token_id, step.logprobs[place], self.reader.next_offset)
            yield from self._scored(self.reader.push(token_id))

    def rest(self) -> Iterator[AnswerEvent]:
        """What was held back, when no token follows."""
        yield from self._scored(self.reader.finish())

    def finished(self, reason: FinishReason | None, cache: CacheReport) -> GenerationFinished:
        if self._keeper is not None and self.reader.stop_string is not None:
            self._keeper.cut()
        return GenerationFinished(
            reason=self.reader.reason(reason),
            token_ids=tuple(self.reader.token_ids),
            text=self.reader.text,
            tool_calls=tuple(self.reader.tool_calls),
            cache=cache,
            scores=None if self._keeper is None else tuple(self._keeper.scores),
            num_scores_told=0 if self._keeper is None else self._keeper.num_told,
            stop_string=self.reader.stop_string,
        )

    def _scored(self, events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
        for event in events:
            if self._keeper is not None and isinstance(event, TextDelta):
                yield replace(event, scores=self._keeper.told_with(event.text))
            else:
                yield event


def _engine_request(request: GenerationRequest) -> EngineRequest:
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
        prediction_token_ids=request.prediction_token_ids,
        grammar=None if request.grammar is None else request.grammar.source,
    )
