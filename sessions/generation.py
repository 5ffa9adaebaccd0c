"""Where an engine's tokens become text and tool calls, for chat completions and for session turns alike.

Owns the engine's stream for as long as somebody listens: closing `stream` early cancels the request, and so does a
stop string. Never stores anything and never renders a prompt.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from graftwork.adapters.specs import ResolvedModel
from graftwork.engine.client import EngineClient
from graftwork.engine.request import (
    CacheReport,
    EngineDescription,
    EngineRequest,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    SamplingParams,
    ServiceTier,
    TokensGenerated,
)
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.sessions.answer_reader import AnswerReader, AnswerRules
from graftwork.sessions.generation_events import (
    AnswerEvent,
    GenerationEvent,
    GenerationFinished,
    StopReason,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.tokenizer import TextTokenizer
from graftwork.sessions.tool_call_parser import HERMES, ToolCallForm

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
    share: str = ""
    weight: float = 1.0
    tier: ServiceTier = ServiceTier.DEFAULT
    parse_tool_calls: bool = False
    """False: everything is text."""
    parallel_tool_calls: bool = True
    """False: the generation ends with its first call."""
    prediction_token_ids: tuple[int, ...] = ()
    """What the answer is expected to be; it changes nothing but the pace."""


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
        reader = AnswerReader(self._tokenizer, self._rules(request))
        cache = CacheReport()
        reason: FinishReason | None = None
        async with aclosing(self._engine.generate(_engine_request(request))) as engine_events:
            async for engine_event in engine_events:
                match engine_event:
                    case PromptAdmitted():
                        cache = engine_event.cache
                        yield engine_event
                    case TokensGenerated():
                        for event in _read(reader, engine_event.token_ids):
                            yield event
                    case RequestFinished():
                        reason = engine_event.reason
                if reader.is_over:
                    break
        if reason is None and not reader.is_over:
            raise InternalFailure("The engine's answer broke off without saying why; send the request again.")
        for event in reader.finish():
            yield event
        yield GenerationFinished(
            reason=reader.reason(reason),
            token_ids=tuple(reader.token_ids),
            text=reader.text,
            tool_calls=tuple(reader.tool_calls),
            cache=cache,
        )

    def _rules(self, request: GenerationRequest) -> AnswerRules:
        own_stops = () if request.sampling.ignore_eos else self._description.eos_token_ids
        return AnswerRules(
            stop=request.stop,
            stop_token_ids=frozenset((*request.sampling.stop_token_ids, *own_stops)),
            min_tokens=request.sampling.min_tokens,
            tool_calls=self._tool_call_form if request.parse_tool_calls else None,
            parallel_tool_calls=request.parallel_tool_calls,
        )


def _read(reader: AnswerReader, token_ids: tuple[int, ...]) -> list[AnswerEvent]:
    """What the tokens of one step bring; those behind the answer's end were never part of it."""
    events: list[AnswerEvent] = []
    for token_id in token_ids:
        if reader.is_over:
            break
        events += reader.push(token_id)
    return events


def _engine_request(request: GenerationRequest) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        isolation=request.isolation,
        adapters=request.resolved.adapters,
        tier=request.tier,
        share=request.share,
        weight=request.weight,
        prediction_token_ids=request.prediction_token_ids,
    )
