"""Between the dataclasses of engine/core/requests.py and the messages of engine.proto.

WARNING: every field of engine.proto is named here, once for each direction; change the three together.
"""

from dataclasses import asdict

from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    EngineEvent,
    FinishReason,
    MissReason,
    PromptAdmitted,
    RequestFinished,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.requests import (
    AdapterUse,
    EngineRequest,
    GrammarKind,
    GrammarSource,
    KvLimits,
    ServiceTier,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionMemory, SessionTending, SessionVerb, ToolWait
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.rpc import engine_pb2 as wire
from graftwork.platform.errors import GraftworkError, InternalFailure, error_classes
from graftwork.platform.ids import IsolationDomain, RequestId


def request_to_wire(request: EngineRequest) -> wire.Submit:
    return wire.Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling_to_wire(request.sampling),
        isolation=request.isolation,
        adapters=[wire.AdapterUse(digest=use.digest, weight=use.weight) for use in request.adapters],
        tier=request.tier,
        share=request.share,
        weight=request.weight,
        session=None if request.session is None else wire.SessionUse(**asdict(request.session)),
        kv_limits=wire.KvLimits(**asdict(request.kv_limits)),
        public_tokens=request.public_tokens,
        grammar=_grammar_to_wire(request.grammar),
        prediction_token_ids=request.prediction_token_ids,
    )


def _grammar_to_wire(grammar: GrammarSource | None) -> wire.Grammar | None:
    return wire.Grammar(kind=grammar.kind, text=grammar.text, strict=grammar.strict) if grammar is not None else None


def request_from_wire(submit: wire.Submit) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(submit.request_id),
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=_sampling_from_wire(submit.sampling),
        isolation=IsolationDomain(submit.isolation),
        adapters=tuple(AdapterUse(use.digest, use.weight) for use in submit.adapters),
        tier=ServiceTier(submit.tier),
        share=submit.share,
        weight=submit.weight,
        session=_session_from_wire(submit.session) if submit.HasField("session") else None,
        kv_limits=_limits_from_wire(submit.kv_limits),
        public_tokens=submit.public_tokens,
        grammar=_grammar_from_wire(submit.grammar) if submit.HasField("grammar") else None,
        prediction_token_ids=tuple(submit.prediction_token_ids),
    )


def _grammar_from_wire(grammar: wire.Grammar) -> GrammarSource:
    return GrammarSource(GrammarKind(grammar.kind), grammar.text, grammar.strict)


def _session_from_wire(use: wire.SessionUse) -> SessionUse:
    return SessionUse(SessionKey(use.session), use.history_tokens)


def _limits_from_wire(limits: wire.KvLimits) -> KvLimits:
    return KvLimits(
        device_bytes=limits.device_bytes if limits.HasField("device_bytes") else None,
        host_bytes=limits.host_bytes if limits.HasField("host_bytes") else None,
    )


def _sampling_to_wire(sampling: SamplingParams) -> wire.Sampling:
    fields = asdict(sampling)
    biases = [wire.TokenBias(token_id=token_id, bias=bias) for token_id, bias in fields.pop("logit_bias")]
    return wire.Sampling(**fields, logit_bias=biases)


def _sampling_from_wire(sampling: wire.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        choice=sampling.choice,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in sampling.logit_bias),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def output_to_wire(request_id: RequestId, event: EngineEvent | GraftworkError) -> wire.RequestOutput:
    match event:
        case PromptAdmitted(cache):
            return wire.RequestOutput(request_id=request_id, admitted=wire.Admitted(**asdict(cache)))
        case TokensGenerated():
            return wire.RequestOutput(request_id=request_id, tokens=_tokens_to_wire(event))
        case RequestFinished(reason, completion_tokens, drafts):
            finished = wire.Finished(
                reason=reason, completion_tokens=completion_tokens, drafts=wire.Drafts(**asdict(drafts))
            )
            return wire.RequestOutput(request_id=request_id, finished=finished)
        case GraftworkError():
            return wire.RequestOutput(request_id=request_id, failed=error_to_wire(event))


def event_from_wire(output: wire.RequestOutput) -> EngineEvent | GraftworkError:
    match output.WhichOneof("event"):
        case "admitted":
            return PromptAdmitted(_cache_from_wire(output.admitted))
        case "tokens":
            return _tokens_from_wire(output.tokens)
        case "finished":
            return _finished_from_wire(output.finished)
        case "failed":
            return error_from_wire(output.failed)
        case unknown:
            return InternalFailure(f"The engine sent an event of unknown kind {unknown!r}.")


def _tokens_to_wire(tokens: TokensGenerated) -> wire.Tokens:
    logprobs = [
        wire.TokenLogprobs(
            logprob=one.logprob,
            top_token_ids=[token_id for token_id, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
        for one in tokens.logprobs
    ]
    return wire.Tokens(token_ids=tokens.token_ids, logprobs=logprobs)


def _tokens_from_wire(tokens: wire.Tokens) -> TokensGenerated:
    if not tokens.logprobs:
        return TokensGenerated(tuple(tokens.token_ids))
    logprobs = (
        TokenLogprobs(one.logprob, tuple(zip(one.top_token_ids, one.top_logprobs, strict=True)))
        for one in tokens.logprobs
    )
    return TokensGenerated(tuple(tokens.token_ids), tuple(logprobs))


def _cache_from_wire(admitted: wire.Admitted) -> CacheReport:
    return CacheReport(
        device_tokens=admitted.device_tokens,
        host_tokens=admitted.host_tokens,
        disk_tokens=admitted.disk_tokens,
        recomputed_tokens=admitted.recomputed_tokens,
        miss_reason=MissReason(admitted.miss_reason) if admitted.HasField("miss_reason") else None,
    )


def _finished_from_wire(finished: wire.Finished) -> RequestFinished:
    drafts = finished.drafts
    report = DraftReport(
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=drafts.accepted_tokens,
        forced_tokens=drafts.forced_tokens,
        accepted_prediction_tokens=drafts.accepted_prediction_tokens,
        rejected_prediction_tokens=drafts.rejected_prediction_tokens,
    )
    return RequestFinished(FinishReason(finished.reason), finished.completion_tokens, report)


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
    shapes = fields.pop("target_shapes")
    return wire.Description(
        **fields,
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
    )


def stats_to_wire(stats: EngineStats) -> wire.Stats:
    return wire.Stats(**asdict(stats))


def stats_from_wire(message: wire.Stats) -> EngineStats:
    return EngineStats(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        free_pages=message.free_pages,
        cached_pages=message.cached_pages,
        active_pages=message.active_pages,
        resident_adapters=tuple(message.resident_adapters),
        lora_pool_bytes=message.lora_pool_bytes,
        running_adapters=tuple(message.running_adapters),
        waiting_adapters=tuple(message.waiting_adapters),
        steps=message.steps,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        generated_tokens=message.generated_tokens,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        forced_tokens=message.forced_tokens,
        adapter_loads=message.adapter_loads,
        max_adapters_in_a_step=message.max_adapters_in_a_step,
        in_flight_pages=message.in_flight_pages,
        host_free_pages=message.host_free_pages,
        host_cached_pages=message.host_cached_pages,
        host_in_flight_pages=message.host_in_flight_pages,
        disk_pages=message.disk_pages,
        disk_bytes=message.disk_bytes,
        disk_corrupt_files=message.disk_corrupt_files,
        disk_foreign_files=message.disk_foreign_files,
        disk_failures=message.disk_failures,
        host_tokens=message.host_tokens,
        disk_tokens=message.disk_tokens,
        preemptions=message.preemptions,
    )


def tending_to_wire(tending: SessionTending) -> wire.Tending:
    return wire.Tending(
        verb=tending.verb,
        session=tending.session,
        isolation=tending.isolation,
        adapters=[wire.AdapterUse(digest=use.digest, weight=use.weight) for use in tending.adapters],
        token_ids=tending.token_ids,
        public_tokens=tending.public_tokens,
        waits=[wire.ToolWait(**asdict(wait)) for wait in tending.waits],
    )


def tending_from_wire(message: wire.Tending) -> SessionTending:
    return SessionTending(
        verb=SessionVerb(message.verb),
        session=SessionKey(message.session),
        isolation=IsolationDomain(message.isolation),
        adapters=tuple(AdapterUse(use.digest, use.weight) for use in message.adapters),
        token_ids=tuple(message.token_ids),
        public_tokens=message.public_tokens,
        waits=tuple(
            ToolWait(wait.tool, wait.expected_ms if wait.HasField("expected_ms") else None) for wait in message.waits
        ),
    )


def memory_to_wire(memory: SessionMemory) -> wire.SessionMemory:
    return wire.SessionMemory(**asdict(memory))


def memory_from_wire(message: wire.SessionMemory) -> SessionMemory:
    return SessionMemory(
        device_tokens=message.device_tokens,
        host_tokens=message.host_tokens,
        disk_tokens=message.disk_tokens,
        missing_tokens=message.missing_tokens,
        device_bytes=message.device_bytes,
        host_bytes=message.host_bytes,
        disk_bytes=message.disk_bytes,
        lease_s=message.lease_s if message.HasField("lease_s") else None,
    )
