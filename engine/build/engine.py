"""Builds one engine from its configuration: loads the model, allocates memory, and connects the parts of the engine.

Never serves a request. EngineLoop does that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple

import torch

import graftwork
from graftwork.engine.arrivals import Arrivals
from graftwork.engine.build.calibration import confirms, measure
from graftwork.engine.build.calibration_cache import CalibrationCache, CalibrationKey
from graftwork.engine.build.devices import (
    ModelReading,
    check_draft_model,
    check_recurrent,
    choose_device,
    choose_dtype,
    load_weights,
    read_served_model,
)
from graftwork.engine.build.draft_head import build_draft_head, check_draft_head
from graftwork.engine.build.kv import (
    KvStorage,
    allocate_kv_storage,
    build_page_copier,
)
from graftwork.engine.build.limits import scheduler_limits
from graftwork.engine.build.lora import build_lora, build_probe_lora, import_kernels
from graftwork.engine.build.memory import EngineMemory
from graftwork.engine.build.phases import StartPhases
from graftwork.engine.build.ranks import EngineRanks, RankSettings, check_division, choose_ranks
from graftwork.engine.build.runner import RunnerParts, build_draft_model
from graftwork.engine.build.waiting_order import build_order
from graftwork.engine.build.warm_up import begin_compiling, choose_sizes
from graftwork.engine.build.weights import choose_weight_kernels
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.core.tiers import Tier
from graftwork.engine.draft_head.head_drafter import DraftHead
from graftwork.engine.grammar.compile.compiler import GrammarCompiler
from graftwork.engine.grammar.compile.grammar_cache import PublicGrammars
from graftwork.engine.grammar.manager import GrammarManager
from graftwork.engine.grammar.matching.vocabulary import read_vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.cost_model import UNMEASURED, CostTracker, LoadCost
from graftwork.engine.kv.index.frame_allocator import FrameAllocator
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.tool_latency import ToolLatencyModel
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.kv_format import scope_suffix
from graftwork.engine.loop import EngineLoop
from graftwork.engine.lora.adapter_copies import build_adapter_copies
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.device_pool import DeviceAdapterPool
from graftwork.engine.lora.fuse import BaseModules
from graftwork.engine.lora.loader import AdapterLoader
from graftwork.engine.lora.pool import LoraPool, LoraPoolLimits
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.lora.weights import AdapterSource
from graftwork.engine.messages import Message
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.fingerprint import FingerprintReading
from graftwork.engine.model.weights import open_weights
from graftwork.engine.parallel.leader import StepRunner
from graftwork.engine.parallel.workers import StartWorker, start_process
from graftwork.engine.runner.draft_model import DraftModelRunner
from graftwork.engine.runner.forward import StepPaths
from graftwork.engine.runner.model_runner import ModelRunner, PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.speculator import DraftLimits, Speculator
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.speculative.draft_model import DraftModel
from graftwork.engine.step_pipeline import StepPipeline
from graftwork.engine.step_recorder import StepRecorder, TraceRecorder
from graftwork.platform.clock import Clock, SystemClock, process_age_s


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that is ready to run, and its parts. Only the engine loop's thread may use the parts."""

    loop: EngineLoop
    description: EngineDescription
    scheduler: Scheduler
    kv_cache: KvCacheManager
    cache: KvCache
    frame_allocator: FrameAllocator
    adapters: LoraPool
    grammars: GrammarManager
    runner: ModelRunner
    memory: EngineMemory
    phases: StartPhases


SourceFor = Callable[[EngineDescription], AdapterSource]
"""A function that returns the source of adapters for a model. Adapters are checked against the given description."""


def build_engine(
    config: EngineConfig,
    source_for: SourceFor,
    clock: Clock | None = None,
    costs: CostTracker | None = None,
    start_worker: StartWorker = start_process,
    reading: ModelReading | None = None,
) -> Engine:
    """Loads the model, allocates memory for KV and adapters, and connects all parts of the engine.

    `source_for` makes the source of this model's adapters. `start_worker` starts the workers of tensor parallelism. Without
    `costs`, measures loads and prefills, or takes an earlier start's. Without `reading`, begins to read the files now.

    Raises InvalidRequest if the model is not supported, or if the configured sizes do not fit it.
    """
    clock, inbox = clock or SystemClock(), SimpleQueue[Message]()
    progress, phases = LoopProgress(clock), StartPhases(clock, process_age_s())
    grammars = _grammars(config, read_served_model(config), inbox, clock)  # while other threads copy the weights
    settings, ranks, parts, storage, draft_model = _load_model(config, progress, inbox, start_worker, phases, reading)
    parts, dtype, limits = ranks.connected(parts), settings.dtype, parts.limits
    description = _describe(settings, limits, storage.sizes.device_pages // storage.sizes.frames_of_page)
    tracker = costs or CostTracker(UNMEASURED)
    copies = ranks.copies(lambda report: build_page_copier(config, storage, report, clock), inbox.put)
    kv_cache = _kv_cache(storage, LowerTiers(copies, tracker, ranks.disk()), clock)
    on_device = _device_adapters(config, storage, kv_cache, ranks.lora(parts.lora), inbox)
    base = ranks.base(parts.weights)
    tester = _tester(parts, base, ranks.probe_device)
    loader = AdapterLoader(source_for(description), base, dtype, tester, inbox.put, ranks.divide)
    adapters = LoraPool(loader, LoraPoolLimits(config.lora_host_bytes), on_device, clock)
    with phases.phase("calibration"):
        all_ranks = ranks.runner(runner := parts.runner(storage, adapters))
        tracker.start_from(tracker.cost if costs else _costs(settings, storage, all_ranks, limits, clock))
    scopes = _scopes(settings, storage)
    sessions = SessionCache(kv_cache, scopes, ToolLatencyModel(), clock)
    recorder = _recorder(clock, adapters, grammars)
    speculator = _speculator(config, grammars, clock, recorder, draft_model)
    order = build_order(config, limits, kv_cache, adapters, tracker, clock)
    needs = limits, kv_cache, sessions, adapters, scopes
    scheduler = Scheduler(*needs, clock=clock, grammars=grammars, speculator=speculator, order=order, recorder=recorder)
    if costs is None:
        scheduler.step_times.costs.start_from(tracker.cost.prefill)
    on_device.frame_allocator.on_pages_moved = scheduler.renumber_pages
    prefills = PrefillMeter(tracker, clock)
    steps = _pipeline(config, storage, scheduler, all_ranks, prefills, progress, runner.forward.paths, recorder)
    threads = progress, Arrivals(clock), recorder
    loop = EngineLoop(inbox, scheduler, adapters, grammars, kv_cache, copies, storage.cache.gates, steps, *threads)
    progress.rest()  # the trial steps of this function advanced it
    return Engine(
        loop=loop,
        description=description,
        scheduler=scheduler,
        kv_cache=kv_cache,
        cache=storage.cache,
        frame_allocator=on_device.frame_allocator,
        adapters=adapters,
        grammars=grammars,
        runner=runner,
        memory=_memory(parts, storage, draft_model),
        phases=phases,
    )


def _memory(parts: RunnerParts, storage: KvStorage, draft_model: DraftModelRunner | DraftHead | None) -> EngineMemory:
    frames, host_kv, weights_bytes = storage.device_memory.frames, storage.host.block, parts.weights.num_bytes
    if draft_model is None:
        return EngineMemory(weights_bytes, frames, host_kv)
    return EngineMemory(weights_bytes + draft_model.weight_bytes, frames, host_kv, draft_model.kv)


def _scopes(settings: RankSettings, storage: KvStorage) -> CacheScopes:
    activations = (
        "" if settings.config.activation_dtype == "auto" else f"/activations {settings.config.activation_dtype}"
    )
    variant = f"{settings.model.kv_variant}{scope_suffix(storage.cache.format)}{activations}"
    return CacheScopes(settings.fingerprint, f"{settings.dtype}/{storage.sizes.page_tokens}{variant}")


def _costs(
    settings: RankSettings, storage: KvStorage, all_ranks: StepRunner, limits: SchedulerLimits, clock: Clock
) -> LoadCost:
    """Returns the costs of loads and prefills: those of an earlier start if they hold, else measures them."""
    config = settings.config
    key = CalibrationKey.of(config, settings.fingerprint, settings.device, settings.dtype)
    cache = CalibrationCache(config.calibration_folder, key, clock)
    kept = None if config.renew_calibration else cache.load()
    if kept is not None and confirms(kept.prefill, all_ranks.run, limits):
        return kept
    cost = measure(storage, all_ranks.run, limits)
    cache.store(cost)
    return cost


class _Loaded(NamedTuple):
    """The model of an engine in memory, and the ranks that compute it."""

    settings: RankSettings
    ranks: EngineRanks
    parts: RunnerParts
    storage: KvStorage
    draft_model: DraftModelRunner | DraftHead | None


def _load_model(
    config: EngineConfig,
    progress: LoopProgress,
    inbox: SimpleQueue[Message],
    start_worker: StartWorker,
    phases: StartPhases,
    reading: ModelReading | None,
) -> _Loaded:
    """Loads this rank's part of the model, allocates its memory, and waits for the other ranks.

    The weights come first, because KV memory takes a share of what they leave.
    """
    torch.set_num_threads(config.threads)
    model, device = read_served_model(config), choose_device(config.device)
    check_recurrent(model, device)
    dtype, limits = choose_dtype(config.dtype, model, device), scheduler_limits(config, model, device)
    check_division(config, model, dtype, device)
    draft, head = check_draft_model(config, model), check_draft_head(config, model)
    import_kernels(config, device)
    with phases.phase("fingerprint"):
        content = (
            FingerprintReading(config.model).result(config.quantization) if reading is None else reading.fingerprint()
        )
    settings = RankSettings(config, model, content, device, dtype)
    ranks = choose_ranks(settings, start_worker)
    own, part = ranks.config, ranks.model
    compiling = None
    try:
        compiling = begin_compiling(own, part, dtype, device)
        with phases.phase("kernels"):
            # On a CPU, the kernels of adapters are tried while other threads copy the weights.
            lora = build_lora(own, part, device, dtype) if device.type == "cpu" else None
        with phases.phase("weights"):
            weights = None if reading is None else reading.weights()
            if weights is None:
                weights = load_weights(own, part, device, dtype, ranks.tensors(open_weights(config.model, model)))
        with phases.phase("kernels"):
            if compiling is not None:
                compiling.wait()
            choose_weight_kernels(own, weights, device, dtype)
            lora = lora or build_lora(own, part, device, dtype)
        parts = RunnerParts(own, part, weights, lora, limits, dtype, progress.advance)
        draft_model = build_draft_model(config, draft, device, weights.num_bytes)
        draft_head = build_draft_head(config, head, parts)
        parts = parts if draft_head is None else replace(parts, taps=draft_head.taps)
        with phases.phase("warm_up"):
            sizes = ranks.agree(choose_sizes(parts, device))
        with phases.phase("memory"):
            storage = allocate_kv_storage(own, part, sizes, ranks.layout, device, dtype, phases)
        ranks.meet(storage, inbox.put)
    except Exception:
        ranks.abandon()
        if compiling is not None:
            compiling.stop()
        raise
    return _Loaded(settings, ranks, parts, storage, draft_head or draft_model)


def _tester(parts: RunnerParts, base: BaseModules, device: torch.device) -> AdapterTester:
    def new_backend() -> LoraBackend:
        return build_probe_lora(parts.config, parts.model, parts.lora, device, parts.dtype)

    return AdapterTester(base, parts.dtype, ProbeDevice.of(device, new_backend))


def _kv_cache(storage: KvStorage, lower: LowerTiers, clock: Clock) -> KvCacheManager:
    kv_cache = KvCacheManager(storage.sizes, lower, clock)
    storage.clear_ahead_of(kv_cache.page_store)
    return kv_cache


def _device_adapters(
    config: EngineConfig, storage: KvStorage, kv_cache: KvCacheManager, lora: LoraBackend, inbox: SimpleQueue[Message]
) -> DeviceAdapterPool:
    memory, page_store = storage.device_memory, kv_cache.page_store
    copies = build_adapter_copies(memory.device, inbox.put)
    on_device = DeviceAdapterPool(memory, page_store, lora, config.lora_pool_bytes, copies)
    page_store.frame_users[Tier.DEVICE] = on_device
    return on_device


def _pipeline(
    config: EngineConfig,
    storage: KvStorage,
    scheduler: Scheduler,
    runner: StepRunner,
    prefills: PrefillMeter,
    progress: LoopProgress,
    paths: StepPaths,
    recorder: StepRecorder,
) -> StepPipeline:
    on_gpu = storage.device_memory.device.type == "cuda"
    overlaps = on_gpu if config.overlap_steps is None else config.overlap_steps
    gates = storage.cache.gates
    return StepPipeline(runner, scheduler, gates, prefills, progress, overlaps=overlaps, paths=paths, recorder=recorder)


def _recorder(clock: Clock, adapters: LoraPool, grammars: GrammarManager) -> TraceRecorder:
    def lacks_adapter(request: EngineRequest) -> bool:
        return not all(map(adapters.is_ready, request.adapter_digests))

    def lacks_grammar(request: EngineRequest) -> bool:
        return not grammars.is_ready(request)

    return TraceRecorder(clock, lacks_adapter, lacks_grammar)


def _speculator(
    config: EngineConfig,
    grammars: GrammarManager,
    clock: Clock,
    recorder: StepRecorder,
    draft_model: DraftModel | None,
) -> Speculator:
    if isinstance(draft_model, DraftHead):
        draft_model.begin()
    limits = DraftLimits(config.max_draft_tokens, config.draft_cache_bytes, config.draft_from_texts)
    return Speculator(limits, clock, lambda state: grammars.constraint(state.request_id), recorder, draft_model)


def _grammars(config: EngineConfig, model: ModelConfig, inbox: SimpleQueue[Message], clock: Clock) -> GrammarManager:
    vocabulary = read_vocabulary(config.model, model.vocab_size, model.eos_token_ids)
    limits = CompileLimits()
    public = PublicGrammars.read(config.public_grammars)
    compiler = None
    if vocabulary is not None:
        compiler = GrammarCompiler(config.model, vocabulary, limits, inbox.put, clock, public)
    return GrammarManager(compiler, model.eos_token_ids, limits, clock)


def _describe(settings: RankSettings, limits: SchedulerLimits, device_pages: int) -> EngineDescription:
    config, model = settings.config, settings.model
    return EngineDescription(
        model_name=config.model_name or config.model.resolve().name,
        fingerprint=settings.fingerprint,
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        eos_token_ids=model.eos_token_ids,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        biased_targets=model.biased_targets,
        target_shapes=model.target_shapes,
        max_lora_rank=config.max_lora_rank,
        page_tokens=limits.page_tokens,
        device_pages=device_pages,
        max_requests=limits.max_running + limits.queue.requests,
        max_domain_requests=limits.max_running + limits.queue.domain_requests,
        version=graftwork.__version__,
        experts=None if model.experts is None else model.experts.shapes,
        modules=model.modules,
        head_dim=model.head_dim,
    )
