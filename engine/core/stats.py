"""Defines what an engine reports about itself: a description of its model, counters and gauges.

Owns the name, the kind and the help text of each figure. gRPC messages and `/metrics` carry these figures. Counts
nothing itself: the scheduler, the adapter pool and the KV cache count, and the engine loop collects the figures.
"""

from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.core.events import CacheReport
from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.core.layer_modules import LayerModules
from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.metrics import counter, gauge


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The facts about an engine's model that a gateway must know."""

    model_name: str
    fingerprint: str
    """`sha256:…` over the model's files; part of every adapter's identity."""
    vocab_size: int
    context_tokens: int
    """The most tokens of a prompt and its answer together."""
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    biased_targets: tuple[str, ...]
    """LoRA targets that have a bias in the base model."""
    target_shapes: dict[str, tuple[int, int]]
    """The pair (out_features, in_features) of each LoRA target.

    The targets are q_proj, k_proj, v_proj, o_proj, and those of the MLP: gate_proj, up_proj and down_proj of dense
    layers, of the widest if they differ; router, shared_gate_proj, shared_up_proj, shared_down_proj and shared_gate of
    routed layers; in_proj and out_proj of recurrent layers; linear_left, linear_right, per_layer_input_gate and
    per_layer_projection of layers with several residual streams.
    """
    max_lora_rank: int
    page_tokens: int
    device_pages: int
    max_requests: int | None = None
    """The most requests that may run or wait in the engine at one time; None if the engine does not say."""
    max_domain_requests: int | None = None
    """The most of these requests that one isolation domain (usually one tenant) may have; None as above."""
    version: str = ""
    """The version of Graftwork that the engine runs; empty if the engine does not say."""
    epoch: int | None = None
    """Counts the starts of engines under one replica id (see platform/replicas/lease.py). None without a lease."""
    generation: int = FIRST_GENERATION
    """Counts the upgrades of what engines serve under this model name. Engines of one generation agree in all of it."""
    experts: ExpertShapes | None = None
    """The sizes and names of the model's experts; None if no layer is routed."""
    modules: LayerModules | None = None
    """The names of the layers' modules, and which layers are recurrent; None if the names are those of Llama."""
    head_dim: int | None = None
    """The numbers of one head of q and k; None if the engine does not say."""


def _pages(tier: str, state: str) -> dict[str, Any]:
    return gauge("kv_pages", "KV pages by tier and state.", tier=tier, state=state)


def _disk_trouble(kind: str) -> dict[str, Any]:
    return counter("kv_disk_troubles", "Troubles with KV files, by kind.", kind=kind)


def _objects(direction: str) -> dict[str, Any]:
    return counter("kv_object_pages", "KV pages written to the bucket and read from it.", direction=direction)


def _memory(owner: str) -> dict[str, Any]:
    return gauge("engine_memory_bytes", "Memory of the engine by owner.", memory="host", owner=owner)


def _gpu(owner: str) -> dict[str, Any]:
    return gauge("engine_memory_bytes", "Memory of the engine by owner.", memory="gpu", owner=owner)


def _start(phase: str) -> dict[str, Any]:
    return gauge("engine_start_seconds", "Seconds of the engine's start, by phase.", phase=phase)


def _drafts(drafter: str, result: str) -> dict[str, Any]:
    return counter(
        "draft_tokens", "Guessed tokens by who guessed them and what came of them.", drafter=drafter, result=result
    )


def _lora_rows(path: str) -> dict[str, Any]:
    return counter("lora_rows", "Tokens of steps that had an adapter, by what applied it.", path=path)


def _expert_rows(path: str) -> dict[str, Any]:
    return counter("expert_rows", "Tokens of steps of a model with experts, by what computed those.", path=path)


def _steps(path: str, reason: str) -> dict[str, Any]:
    return counter("engine_steps", "Forward passes by how they were computed, and why.", path=path, reason=reason)


def _fallback(kernels: str) -> dict[str, Any]:
    return gauge("kernel_fallbacks", "1 if torch stands in for kernels that do not work.", kernels=kernels)


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start. To add a counter, add one field here."""

    steps: int = 0
    """The number of forward passes."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found on some tier."""
    host_tokens: int = 0
    """Cached tokens that were loaded from host memory."""
    disk_tokens: int = 0
    """Cached tokens that were loaded from disk."""
    generated_tokens: int = 0
    step_seconds: float = field(
        default=0.0, metadata=counter("engine_step_seconds", "Seconds that the device has worked on steps.")
    )
    preemptions: int = field(default=0, metadata=counter("preemptions", "Requests offloaded to make room."))
    max_adapters_in_a_step: int = 0
    """The most distinct adapters that one forward pass has served."""

    def count_step(self, num_adapters: int) -> None:
        """Counts a forward pass that served `num_adapters` distinct adapters."""
        self.steps += 1
        self.max_adapters_in_a_step = max(self.max_adapters_in_a_step, num_adapters)

    def count_prompt(self, report: CacheReport) -> None:
        """Counts the prompt of a request that was admitted."""
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.host_tokens += report.host_tokens
        self.disk_tokens += report.disk_tokens


@dataclass(slots=True)
class EngineStats(EngineCounters):
    """The values of all counters and gauges at one time.

    `/metrics` adds up the fields that have the same metric and the same labels.
    """

    running_requests: int = field(
        default=0,
        metadata=gauge("running_requests", "Requests in the running batch.", also="vllm:num_requests_running"),
    )
    waiting_requests: int = field(
        default=0,
        metadata=gauge("waiting_requests", "Requests in the engine's queue.", also="vllm:num_requests_waiting"),
    )
    queued_tokens: int = field(
        default=0,
        metadata=gauge("queued_tokens", "Prompt tokens, of requests that wait or run, that must still be computed."),
    )
    kv_usage_ratio: float = field(
        default=0.0,
        metadata=gauge("kv_usage_ratio", "Share of KV pages in use, 0 to 1.", also="vllm:kv_cache_usage_perc"),
    )
    """Pages of running requests, as a fraction of the device pages that adapters do not use."""
    free_pages: int = field(default=0, metadata=_pages("device", "free"))
    """Device pages that hold nothing a request could reuse."""
    cached_pages: int = field(default=0, metadata=_pages("device", "owned"))
    """Device pages that only the prefix tree holds. Such pages are evicted when room is needed."""
    active_pages: int = field(default=0, metadata=_pages("device", "owned"))
    """Device pages that at least one running request holds."""
    in_flight_pages: int = field(default=0, metadata=_pages("device", "in_flight"))
    """Device pages that a copy reads or writes."""
    host_free_pages: int = field(default=0, metadata=_pages("host", "free"))
    host_cached_pages: int = field(default=0, metadata=_pages("host", "owned"))
    host_in_flight_pages: int = field(default=0, metadata=_pages("host", "in_flight"))
    disk_pages: int = field(default=0, metadata=_pages("disk", "owned"))
    disk_bytes: int = 0
    disk_corrupt_files: int = field(default=0, metadata=_disk_trouble("corrupt_file"))
    """KV files dropped because a checksum or a length was wrong."""
    disk_foreign_files: int = field(default=0, metadata=_disk_trouble("foreign_file"))
    """Files that were skipped at start: they have another model or layout, or they are no KV files."""
    disk_failures: int = field(default=0, metadata=_disk_trouble("failed_operation"))
    """Operations on KV files that failed in the file system."""
    object_pages: int = field(default=0, metadata=_pages("object", "owned"))
    """Pages in the bucket that engines share, as far as this one knows."""
    object_bytes: int = field(
        default=0, metadata=gauge("kv_object_bytes", "Bytes in the bucket of KV that engines share.")
    )
    object_pages_written: int = field(default=0, metadata=_objects("written"))
    object_pages_read: int = field(default=0, metadata=_objects("read"))
    object_failures: int = field(default=0, metadata=_disk_trouble("failed_object"))
    """Operations on the bucket that failed."""
    object_dropped_pages: int = field(default=0, metadata=_disk_trouble("dropped_upload"))
    """Pages that were not written to the bucket, because it has no room or uploads are too slow."""
    lora_pool_bytes: int = field(default=0, metadata=gauge("lora_pool_bytes", "Adapter weights on the device."))
    adapter_loads: int = field(default=0, metadata=counter("adapter_loads", "Adapters loaded to the device."))
    lora_kernel_rows: int = field(default=0, metadata=_lora_rows("kernels"))
    lora_torch_rows: int = field(default=0, metadata=_lora_rows("torch"))
    """On a GPU these rows are slow: the kernels did not pass their self-test, or have no place for the adapter. On a CPU
    they are the tokens of prefill chunks, for which torch is the fast way.
    """
    lora_vocabulary_rows: int = field(
        default=0,
        metadata=counter("lora_vocabulary_rows", "Tokens whose adapter changes the embedding or the output head."),
    )
    """These rows are in one of the two counters before, too. Torch makes these changes on every device."""
    expert_kernel_rows: int = field(default=0, metadata=_expert_rows("kernels"))
    expert_torch_rows: int = field(default=0, metadata=_expert_rows("torch"))
    """On a GPU these rows are slow: the kernels did not pass their self-test, or do not read the experts' forms together."""
    graph_steps: int = field(default=0, metadata=_steps("graph", "decoding"))
    """Steps that one launch of a CUDA graph has computed. Trial steps at the engine's start count too."""
    graph_prompt_steps: int = field(default=0, metadata=_steps("graph", "prompt"))
    """Such steps in which some rows are of a prompt."""
    eager_chunk_steps: int = field(default=0, metadata=_steps("eager", "prompt"))
    """Eager steps, whose kernels are launched one by one. These have rows of a prompt, and more rows than any graph."""
    eager_score_steps: int = field(default=0, metadata=_steps("eager", "scores"))
    """Eager steps that report log probabilities of a prompt, or evict its KV."""
    eager_window_steps: int = field(default=0, metadata=_steps("eager", "windows"))
    """Eager steps with a rolling window, of an engine that has no graphs for them."""
    eager_adapter_steps: int = field(default=0, metadata=_steps("eager", "adapters"))
    """Eager steps in which torch applies an adapter."""
    eager_row_steps: int = field(default=0, metadata=_steps("eager", "rows"))
    """Eager steps with more rows than any graph."""
    eager_steps: int = field(default=0, metadata=_steps("eager", "no_graphs"))
    """Eager steps of an engine without graphs, as on a CPU."""
    fallback_rows: int = field(default=0, metadata=_fallback("rows"))
    """1 if torch stands in for kernels of this engine's device that were wanted and do not work. The log says why."""
    fallback_attention: int = field(default=0, metadata=_fallback("attention"))
    fallback_experts: int = field(default=0, metadata=_fallback("experts"))
    fallback_lora: int = field(default=0, metadata=_fallback("lora"))
    fallback_weights: int = field(default=0, metadata=_fallback("weights"))
    """Torch makes quantised weights dense in each step."""
    fallback_sampler: int = field(default=0, metadata=_fallback("sampler"))
    fallback_graphs: int = field(default=0, metadata=_fallback("graphs"))
    forced_drafts: int = field(default=0, metadata=_drafts("grammar", "forced"))
    """Accepted draft tokens that a grammar dictated. A verified draft token is either forced, accepted or rejected."""
    accepted_drafts: int = field(default=0, metadata=_drafts("lookup", "accepted"))
    """Accepted draft tokens that a lookup guessed."""
    rejected_drafts: int = field(default=0, metadata=_drafts("lookup", "rejected"))
    """Rejected draft tokens that no draft model guessed."""
    model_accepted_drafts: int = field(default=0, metadata=_drafts("model", "accepted"))
    """Accepted draft tokens that the draft model guessed."""
    model_rejected_drafts: int = field(default=0, metadata=_drafts("model", "rejected"))
    adapter_copy_bytes: int = 0
    """Bytes of the copies of adapters that lie side by side, for products over several adapters."""
    memory_weights: int = field(default=0, metadata=_memory("weights"))
    """Bytes of the model's weights in host memory. This figure and the next seven add up to the resident memory of the
    engine's process.
    """
    memory_device_kv: int = field(default=0, metadata=_memory("device_kv"))
    """The touched part of the device memory for KV, if the device is the CPU."""
    memory_host_kv: int = field(default=0, metadata=_memory("host_kv"))
    """The touched part of the host memory for KV."""
    memory_adapters: int = field(default=0, metadata=_memory("adapters"))
    """Adapters in host memory, and, if the device is the CPU, those on the device."""
    memory_grammars: int = field(default=0, metadata=_memory("grammars"))
    """Cached compiled grammars."""
    memory_drafts: int = field(default=0, metadata=_memory("drafts"))
    """Earlier answers from which drafts are taken, and, if the device is the CPU, the draft model's KV."""
    memory_workspace: int = field(default=0, metadata=_memory("workspace"))
    """Freed memory that the process keeps for the tensors of the next step."""
    memory_other: int = field(default=0, metadata=_memory("other"))
    """The rest: program code, libraries, the interpreter's objects, and the tensors of a step that runs now."""
    gpu_weights: int = field(default=0, metadata=_gpu("weights"))
    """As `memory_weights`, on a GPU. The memory of the CUDA context itself is in no figure."""
    gpu_kv: int = field(default=0, metadata=_gpu("device_kv"))
    gpu_adapters: int = field(default=0, metadata=_gpu("adapters"))
    gpu_drafts: int = field(default=0, metadata=_gpu("drafts"))
    """The draft model's KV."""
    gpu_workspace: int = field(default=0, metadata=_gpu("workspace"))
    """What torch holds for the tensors of steps."""
    start_imports_s: float = field(default=0.0, metadata=_start("imports"))
    """From the start of the process until the engine was built: Python's imports."""
    start_fingerprint_s: float = field(default=0.0, metadata=_start("fingerprint"))
    """Reading and hashing all files of the model."""
    start_weights_s: float = field(default=0.0, metadata=_start("weights"))
    start_kernels_s: float = field(default=0.0, metadata=_start("kernels"))
    """Loading or compiling the kernels of adapters, and trying them."""
    start_warm_up_s: float = field(default=0.0, metadata=_start("warm_up"))
    """On a GPU: the trial steps that compile kernels and measure memory."""
    start_memory_s: float = field(default=0.0, metadata=_start("memory"))
    """Allocating the memory of KV and adapters."""
    start_disk_scan_s: float = field(default=0.0, metadata=_start("disk_scan"))
    """Reading what the KV folder has."""
    start_calibration_s: float = field(default=0.0, metadata=_start("calibration"))
    """Measuring loads and prefills, or confirming what an earlier start has measured, after the CUDA graphs of a GPU are
    captured.
    """
    resident_adapters: tuple[str, ...] = ()
    """Digests of the adapters on the device."""
    host_adapters: tuple[str, ...] = ()
    """Digests of the adapters in host memory."""
    running_adapters: tuple[str, ...] = ()
    """Digests of the adapters of running requests."""
    waiting_adapters: tuple[str, ...] = ()
    """Digests of the adapters of waiting requests."""

    @property
    def drafted_tokens(self) -> int:
        """The number of draft tokens that the model has verified (accepted or rejected) since the engine's start."""
        return self.accepted_tokens + self.rejected_drafts + self.model_rejected_drafts

    @property
    def accepted_tokens(self) -> int:
        """The number of draft tokens that became part of an answer since the engine's start."""
        return self.forced_drafts + self.accepted_drafts + self.model_accepted_drafts
