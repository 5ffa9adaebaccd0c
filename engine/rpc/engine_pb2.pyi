from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayMessage(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling_json", "isolation", "adapters", "tier", "weight", "session", "kv_limits", "public_tokens", "cache_ttl_s", "deadline_s", "no_lookups", "grammar", "prediction_token_ids", "emitted_token_ids", "traced", "reasoning_json", "pooling", "kv_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KV_LIMITS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    NO_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    REASONING_JSON_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    KV_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_json: str
    isolation: bytes
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterUse]
    tier: str
    weight: float
    session: SessionUse
    kv_limits: KvLimits
    public_tokens: int
    cache_ttl_s: float
    deadline_s: float
    no_lookups: bool
    grammar: Grammar
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traced: bool
    reasoning_json: str
    pooling: str
    kv_key: bytes
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_json: _Optional[str] = ..., isolation: _Optional[bytes] = ..., adapters: _Optional[_Iterable[_Union[AdapterUse, _Mapping]]] = ..., tier: _Optional[str] = ..., weight: _Optional[float] = ..., session: _Optional[_Union[SessionUse, _Mapping]] = ..., kv_limits: _Optional[_Union[KvLimits, _Mapping]] = ..., public_tokens: _Optional[int] = ..., cache_ttl_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., no_lookups: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., traced: _Optional[bool] = ..., reasoning_json: _Optional[str] = ..., pooling: _Optional[str] = ..., kv_key: _Optional[bytes] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "strict")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    strict: bool
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class SessionUse(_message.Message):
    __slots__ = ("session", "history_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: str
    history_tokens: int
    def __init__(self, session: _Optional[str] = ..., history_tokens: _Optional[int] = ...) -> None: ...

class KvLimits(_message.Message):
    __slots__ = ("device_bytes", "host_bytes", "group", "group_device_bytes", "group_host_bytes")
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    host_bytes: int
    group: bytes
    group_device_bytes: int
    group_host_bytes: int
    def __init__(self, device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., group: _Optional[bytes] = ..., group_device_bytes: _Optional[int] = ..., group_host_bytes: _Optional[int] = ...) -> None: ...

class AdapterUse(_message.Message):
    __slots__ = ("digest", "weight")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    digest: str
    weight: float
    def __init__(self, digest: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("outputs", "load_json", "takes_messages")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    TAKES_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    load_json: str
    takes_messages: bool
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., load_json: _Optional[str] = ..., takes_messages: _Optional[bool] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "admitted", "tokens", "finished", "failed", "scored", "traced", "embedded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    admitted: Admitted
    tokens: Tokens
    finished: Finished
    failed: Failed
    scored: Scored
    traced: Traced
    embedded: Embedded
    def __init__(self, request_id: _Optional[str] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., traced: _Optional[_Union[Traced, _Mapping]] = ..., embedded: _Optional[_Union[Embedded, _Mapping]] = ...) -> None: ...

class Traced(_message.Message):
    __slots__ = ("run", "sent_s", "spans")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    run: int
    sent_s: float
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, run: _Optional[int] = ..., sent_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "start_s", "duration_s", "steps", "busy_s", "tokens", "batch_requests", "batch_tokens", "drafted", "accepted", "masks", "mask_s", "draft_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    MASK_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_s: float
    duration_s: float
    steps: int
    busy_s: float
    tokens: int
    batch_requests: float
    batch_tokens: float
    drafted: int
    accepted: int
    masks: int
    mask_s: float
    draft_s: float
    def __init__(self, name: _Optional[str] = ..., start_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., tokens: _Optional[int] = ..., batch_requests: _Optional[float] = ..., batch_tokens: _Optional[float] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., masks: _Optional[int] = ..., mask_s: _Optional[float] = ..., draft_s: _Optional[float] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Embedded(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("device_tokens", "host_tokens", "disk_tokens", "recomputed_tokens", "miss_reason", "adapter_bytes")
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    miss_reason: str
    adapter_bytes: int
    def __init__(self, device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., miss_reason: _Optional[str] = ..., adapter_bytes: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "kv_byte_seconds", "engine_us")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    kv_byte_seconds: int
    engine_us: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., kv_byte_seconds: _Optional[int] = ..., engine_us: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "completion_tokens", "drafts", "kv_byte_seconds", "engine_us")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_US_FIELD_NUMBER: _ClassVar[int]
    reason: str
    completion_tokens: int
    drafts: Drafts
    kv_byte_seconds: int
    engine_us: int
    def __init__(self, reason: _Optional[str] = ..., completion_tokens: _Optional[int] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., kv_byte_seconds: _Optional[int] = ..., engine_us: _Optional[int] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("drafted_tokens", "accepted_tokens", "forced_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("kind", "message", "code", "param", "retry_after_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    code: str
    param: str
    retry_after_s: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., code: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetShape(_message.Message):
    __slots__ = ("target", "out_features", "in_features")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    target: str
    out_features: int
    in_features: int
    def __init__(self, target: _Optional[str] = ..., out_features: _Optional[int] = ..., in_features: _Optional[int] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("model_name", "fingerprint", "vocab_size", "context_tokens", "eos_token_ids", "num_layers", "target_shapes", "max_lora_rank", "page_tokens", "device_pages", "hidden_size", "biased_targets", "max_requests", "max_domain_requests", "version", "epoch", "generation", "experts_json", "modules_json", "head_dim")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SHAPES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    BIASED_TARGETS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DOMAIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_JSON_FIELD_NUMBER: _ClassVar[int]
    MODULES_JSON_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_layers: int
    target_shapes: _containers.RepeatedCompositeFieldContainer[TargetShape]
    max_lora_rank: int
    page_tokens: int
    device_pages: int
    hidden_size: int
    biased_targets: _containers.RepeatedScalarFieldContainer[str]
    max_requests: int
    max_domain_requests: int
    version: str
    epoch: int
    generation: int
    experts_json: str
    modules_json: str
    head_dim: int
    def __init__(self, model_name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_layers: _Optional[int] = ..., target_shapes: _Optional[_Iterable[_Union[TargetShape, _Mapping]]] = ..., max_lora_rank: _Optional[int] = ..., page_tokens: _Optional[int] = ..., device_pages: _Optional[int] = ..., hidden_size: _Optional[int] = ..., biased_targets: _Optional[_Iterable[str]] = ..., max_requests: _Optional[int] = ..., max_domain_requests: _Optional[int] = ..., version: _Optional[str] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., experts_json: _Optional[str] = ..., modules_json: _Optional[str] = ..., head_dim: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stats(_message.Message):
    __slots__ = ("fields_json",)
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    fields_json: str
    def __init__(self, fields_json: _Optional[str] = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("stalled_s", "load_json")
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    stalled_s: float
    load_json: str
    def __init__(self, stalled_s: _Optional[float] = ..., load_json: _Optional[str] = ...) -> None: ...

class ForgetAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class ForgetAdapterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class ProbeAdapterReply(_message.Message):
    __slots__ = ("failed",)
    FAILED_FIELD_NUMBER: _ClassVar[int]
    failed: Failed
    def __init__(self, failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class ForgetDomainRequest(_message.Message):
    __slots__ = ("isolation",)
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    isolation: bytes
    def __init__(self, isolation: _Optional[bytes] = ...) -> None: ...

class ForgetDomainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tending(_message.Message):
    __slots__ = ("verb", "session", "isolation", "adapters", "token_ids", "public_tokens", "waits", "kv_key", "window")
    VERB_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    KV_KEY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    verb: str
    session: str
    isolation: bytes
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterUse]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    public_tokens: int
    waits: _containers.RepeatedCompositeFieldContainer[ToolWait]
    kv_key: bytes
    window: RollingWindow
    def __init__(self, verb: _Optional[str] = ..., session: _Optional[str] = ..., isolation: _Optional[bytes] = ..., adapters: _Optional[_Iterable[_Union[AdapterUse, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., public_tokens: _Optional[int] = ..., waits: _Optional[_Iterable[_Union[ToolWait, _Mapping]]] = ..., kv_key: _Optional[bytes] = ..., window: _Optional[_Union[RollingWindow, _Mapping]] = ...) -> None: ...

class RollingWindow(_message.Message):
    __slots__ = ("sinks", "window")
    SINKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    sinks: int
    window: int
    def __init__(self, sinks: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class ToolWait(_message.Message):
    __slots__ = ("tool", "expected_ms")
    TOOL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MS_FIELD_NUMBER: _ClassVar[int]
    tool: str
    expected_ms: float
    def __init__(self, tool: _Optional[str] = ..., expected_ms: _Optional[float] = ...) -> None: ...

class SessionMemory(_message.Message):
    __slots__ = ("device_tokens", "host_tokens", "disk_tokens", "missing_tokens", "device_bytes", "host_bytes", "disk_bytes", "lease_s")
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    missing_tokens: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    lease_s: float
    def __init__(self, device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., missing_tokens: _Optional[int] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...
