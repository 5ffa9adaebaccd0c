"""Converts between the dataclasses of engine/core and the messages of engine.proto.

Only converts; checks no value. SamplingParams and EngineStats are sent as JSON objects of their fields, so a new field
of these two classes needs no change here.

WARNING: every other message lists the fields of its dataclass in engine.proto; change both together.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    EngineEvent,
    FinishReason,
    MissReason,
    PromptAdmitted,
    PromptEmbedded,
    PromptScored,
    RequestFinished,
    RequestOutput,
    StepsTraced,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.layer_modules import LayerModules
from graftwork.engine.core.load import NO_LOAD, EngineLoad
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import (
    AdapterUse,
    EngineRequest,
    GrammarKind,
    GrammarSource,
    KvFileKey,
    KvLimits,
    ReasoningRule,
    ServiceTier,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.engine.rpc.span_codec import traced_from_wire, traced_to_wire
from graftwork.platform.errors import GraftworkError, InternalFailure, Unavailable, error_classes
from graftwork.platform.ids import FIRST_GENERATION, IsolationDomain, RequestId
from graftwork.platform.metrics import HasFields

T = TypeVar("T", bound=HasFields)


def request_to_wire(request: EngineRequest) -> wire.Submit:
    return wire.Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_json=to_json(request.sampling),
        isolation=request.domain,
        adapters=[wire.AdapterUse(digest=use.digest, weight=use.weight) for use in request.adapters],
        tier=request.tier,
        weight=request.weight,
        session=None if request.session is None else wire.SessionUse(**asdict(request.session)),
        kv_limits=wire.KvLimits(**asdict(request.kv_limits)),
        public_tokens=request.public_tokens,
        cache_ttl_s=request.cache_ttl_s,
        deadline_s=request.deadline_s,
        no_lookups=not request.uses_lookups,
        grammar=_grammar_to_wire(request.grammar),
        prediction_token_ids=request.prediction_token_ids,
        emitted_token_ids=request.emitted_token_ids,
        traced=request.traced,
        pooling=request.pooling or "",
        reasoning_json="" if request.reasoning is None else to_json(request.reasoning),
        kv_key=_secret_of(request.kv_key),
    )


def _secret_of(key: KvFileKey | None) -> bytes:
    return b"" if key is None else key.secret


def _grammar_to_wire(grammar: GrammarSource | None) -> wire.Grammar | None:
    return wire.Grammar(kind=grammar.kind, text=grammar.text, strict=grammar.strict) if grammar is not None else None


def request_from_wire(submit: wire.Submit) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=from_json(SamplingParams, json.loads(submit.sampling_json)),
        domain=IsolationDomain(submit.isolation),
        adapters=tuple(AdapterUse(use.digest, use.weight) for use in submit.adapters),
        tier=ServiceTier(submit.tier),
        weight=submit.weight,
        session=_read(SessionUse, submit.session) if submit.HasField("session") else None,
        kv_limits=_read(KvLimits, submit.kv_limits),
        public_tokens=submit.public_tokens,
        cache_ttl_s=submit.cache_ttl_s if submit.HasField("cache_ttl_s") else None,
        deadline_s=submit.deadline_s if submit.HasField("deadline_s") else None,
        uses_lookups=not submit.no_lookups,
        grammar=_grammar_from_wire(submit.grammar) if submit.HasField("grammar") else None,
        prediction_token_ids=tuple(submit.prediction_token_ids),
        emitted_token_ids=tuple(submit.emitted_token_ids),
        traced=submit.traced,
        pooling=Pooling(submit.pooling) if submit.pooling else None,
        reasoning=from_json(ReasoningRule, json.loads(submit.reasoning_json)) if submit.reasoning_json else None,
        kv_key=KvFileKey(submit.kv_key) if submit.kv_key else None,
    )


def _grammar_from_wire(grammar: wire.Grammar) -> GrammarSource:
    return GrammarSource(GrammarKind(grammar.kind), grammar.text, grammar.strict)


def step_to_wire(step: Iterable[RequestOutput], load: EngineLoad | None = None) -> wire.StepOutput:
    """Fills in plain tokens in place, which takes less than half the time: the engine loop waits for this after each step."""
    message = wire.StepOutput(load_json="" if load is None else to_json(load))
    for request_id, event in ((output.request_id, output.event) for output in step):
        if isinstance(event, TokensGenerated) and event.token_ids and not event.logprobs:
            tokens = message.outputs.add(request_id=request_id).tokens
            tokens.token_ids.extend(event.token_ids)
            tokens.engine_us = event.engine_us
            if event.kv_byte_seconds:
                tokens.kv_byte_seconds = event.kv_byte_seconds
        else:
            message.outputs.append(output_to_wire(request_id, event))
    return message


def output_to_wire(request_id: RequestId, event: EngineEvent | GraftworkError) -> wire.RequestOutput:
    match event:
        case PromptAdmitted(cache, adapter_bytes):
            admitted = wire.Admitted(**asdict(cache), adapter_bytes=adapter_bytes)
            return wire.RequestOutput(request_id=request_id, admitted=admitted)
        case TokensGenerated():
            return wire.RequestOutput(request_id=request_id, tokens=_tokens_to_wire(event))
        case PromptScored(logprobs):
            return wire.RequestOutput(
                request_id=request_id, scored=wire.Scored(logprobs=map(_logprobs_to_wire, logprobs))
            )
        case PromptEmbedded(values):
            return wire.RequestOutput(request_id=request_id, embedded=wire.Embedded(values=values))
        case StepsTraced():
            return wire.RequestOutput(request_id=request_id, traced=traced_to_wire(event))
        case RequestFinished(reason, completion_tokens, drafts, kv_byte_seconds, engine_us):
            finished = wire.Finished(
                reason=reason,
                completion_tokens=completion_tokens,
                drafts=wire.Drafts(**asdict(drafts)),
                kv_byte_seconds=kv_byte_seconds,
                engine_us=engine_us,
            )
            return wire.RequestOutput(request_id=request_id, finished=finished)
        case GraftworkError():
            return wire.RequestOutput(request_id=request_id, failed=error_to_wire(event))


def event_from_wire(output: wire.RequestOutput) -> EngineEvent | GraftworkError:
    if output.HasField("tokens"):  # first, because nearly all events are tokens
        tokens = output.tokens
        token_ids = tuple(tokens.token_ids[:])  # a slice is a list, which is iterated twice as fast as a repeated field
        if not tokens.logprobs:
            return TokensGenerated(token_ids, (), tokens.kv_byte_seconds, tokens.engine_us)
        logprobs = tuple(map(_logprobs_from_wire, tokens.logprobs))
        return TokensGenerated(token_ids, logprobs, tokens.kv_byte_seconds, tokens.engine_us)
    match output.WhichOneof("event"):
        case "admitted":
            return PromptAdmitted(_cache_from_wire(output.admitted), output.admitted.adapter_bytes)
        case "scored":
            return PromptScored(tuple(map(_logprobs_from_wire, output.scored.logprobs)))
        case "embedded":
            return PromptEmbedded(output.embedded.values)
        case "traced":
            return traced_from_wire(output.traced)
        case "finished":
            return _finished_from_wire(output.finished)
        case "failed":
            return error_from_wire(output.failed)
        case unknown:
            return InternalFailure(f"The engine sent an event of unknown kind {unknown!r}.")


def _tokens_to_wire(tokens: TokensGenerated) -> wire.Tokens:
    return wire.Tokens(
        token_ids=tokens.token_ids,
        logprobs=map(_logprobs_to_wire, tokens.logprobs),
        kv_byte_seconds=tokens.kv_byte_seconds,
        engine_us=tokens.engine_us,
    )


def _logprobs_to_wire(logprobs: TokenLogprobs) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
        rank=logprobs.rank,
    )


def _logprobs_from_wire(message: wire.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.logprob, top, message.rank if message.HasField("rank") else None)


def _cache_from_wire(admitted: wire.Admitted) -> CacheReport:
    return CacheReport(
        admitted.device_tokens,
        admitted.host_tokens,
        admitted.disk_tokens,
        admitted.recomputed_tokens,
        MissReason(admitted.miss_reason) if admitted.HasField("miss_reason") else None,
    )


def _finished_from_wire(finished: wire.Finished) -> RequestFinished:
    return RequestFinished(
        FinishReason(finished.reason),
        finished.completion_tokens,
        _read(DraftReport, finished.drafts),
        finished.kv_byte_seconds,
        finished.engine_us,
    )


def error_to_wire(error: GraftworkError) -> wire.Failed:
    return wire.Failed(
        kind=type(error).__name__,
        message=error.message,
        code=error.code,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


def error_from_wire(failed: wire.Failed) -> GraftworkError:
    return error_classes().get(failed.kind, InternalFailure)(
        failed.message,
        code=failed.code,
        param=failed.param if failed.HasField("param") else None,
        retry_after_s=failed.retry_after_s if failed.HasField("retry_after_s") else None,
    )


def description_to_wire(description: EngineDescription) -> wire.Description:
    fields = asdict(description)
    shapes, experts, modules = (fields.pop(name) for name in ("target_shapes", "experts", "modules"))
    return wire.Description(
        **fields,
        experts_json="" if experts is None else json.dumps(experts),
        modules_json="" if modules is None else json.dumps(modules),
        target_shapes=[
            wire.TargetShape(target=target, out_features=out_features, in_features=in_features)
            for target, (out_features, in_features) in shapes.items()
        ],
    )


def description_from_wire(message: wire.Description) -> EngineDescription:
    return EngineDescription(
        model_name=message.model_name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        context_tokens=message.context_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        num_layers=message.num_layers,
        hidden_size=message.hidden_size,
        biased_targets=tuple(message.biased_targets),
        target_shapes={shape.target: (shape.out_features, shape.in_features) for shape in message.target_shapes},
        max_lora_rank=message.max_lora_rank,
        page_tokens=message.page_tokens,
        device_pages=message.device_pages,
        max_requests=message.max_requests if message.HasField("max_requests") else None,
        max_domain_requests=message.max_domain_requests if message.HasField("max_domain_requests") else None,
        version=message.version,
        epoch=message.epoch if message.HasField("epoch") else None,
        generation=message.generation or FIRST_GENERATION,
        experts=ExpertShapes.from_json(json.loads(message.experts_json)) if message.experts_json else None,
        modules=LayerModules.from_json(json.loads(message.modules_json)) if message.modules_json else None,
        head_dim=message.head_dim if message.HasField("head_dim") else None,
    )


def stats_to_wire(stats: EngineStats) -> wire.Stats:
    return wire.Stats(fields_json=to_json(stats))


def stats_from_wire(message: wire.Stats) -> EngineStats:
    """Reads the counters and gauges of an engine. Drops those that this version of the gateway does not know."""
    return _known_from_json(EngineStats, message.fields_json)


def progress_to_wire(stalled_s: float, load: EngineLoad) -> wire.Progress:
    return wire.Progress(stalled_s=stalled_s, load_json=to_json(load))


def load_from_json(text: str) -> EngineLoad:
    """Reads the load of an engine. Drops figures that this version of the gateway does not know. Empty text is NO_LOAD.

    Raises Unavailable if the text is not a load.
    """
    try:
        return _known_from_json(EngineLoad, text) if text else NO_LOAD
    except (AttributeError, TypeError, ValueError) as error:
        raise Unavailable(
            f"The engine reports a load that this version cannot read: {error}. Run gateway and engine of one version.",
            code=ENGINE_UNAVAILABLE,
        ) from error


def _known_from_json(kind: type[T], text: str) -> T:
    known = _types_of_fields(kind)
    return from_json(kind, {name: value for name, value in json.loads(text).items() if name in known})


def command_to_wire(command: SessionCommand) -> wire.Tending:
    return wire.Tending(
        verb=command.verb,
        session=command.session,
        isolation=command.domain,
        adapters=[wire.AdapterUse(digest=use.digest, weight=use.weight) for use in command.adapters],
        token_ids=command.token_ids,
        public_tokens=command.public_tokens,
        waits=[wire.ToolWait(**asdict(wait)) for wait in command.waits],
        kv_key=_secret_of(command.kv_key),
        window=None if command.window is None else wire.RollingWindow(**asdict(command.window)),
    )


def command_from_wire(message: wire.Tending) -> SessionCommand:
    return SessionCommand(
        verb=SessionVerb(message.verb),
        session=SessionKey(message.session),
        domain=IsolationDomain(message.isolation),
        adapters=tuple(AdapterUse(use.digest, use.weight) for use in message.adapters),
        token_ids=tuple(message.token_ids),
        public_tokens=message.public_tokens,
        waits=tuple(_read(ToolWait, wait) for wait in message.waits),
        kv_key=KvFileKey(message.kv_key) if message.kv_key else None,
        window=_read(RollingWindow, message.window) if message.HasField("window") else None,
    )


def memory_to_wire(memory: SessionMemory) -> wire.SessionMemory:
    return wire.SessionMemory(**asdict(memory))


def memory_from_wire(message: wire.SessionMemory) -> SessionMemory:
    return _read(SessionMemory, message)


# ---- any dataclass --------------------------------------------------------------------------------------------


def to_json(value: HasFields) -> str:
    """Returns a dataclass as the text of a JSON object of its fields. The fields must not be dataclasses themselves."""
    return json.dumps({field.name: getattr(value, field.name) for field in fields(value)})


def from_json(kind: type[T], found: dict[str, Any]) -> T:
    """Makes a dataclass of class `kind` from the fields that were read from JSON. Lists become tuples.

    Raises ValueError for a field that the class does not have.
    """
    kinds = _types_of_fields(kind)
    unknown = found.keys() - kinds.keys()
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {min(unknown)!r}")
    return kind(**{name: float(value) if kinds[name] is float else _frozen(value) for name, value in found.items()})


@cache
def _types_of_fields(kind: type[HasFields]) -> dict[str, Any]:
    """Returns the types of a dataclass's fields by their names. Each engine sends its load ten times a second."""
    return {field.name: field.type for field in fields(kind)}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read(kind: type[T], message: Message) -> T:
    """Makes a dataclass from a message with fields of the same names. An absent optional field becomes None."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        elif field.is_repeated:
            value = tuple(value)
        found[field.name] = value
    return kind(**found)
