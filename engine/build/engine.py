"""Builds one engine from its configuration: loads the model, allocates memory, and connects the parts of the engine.

Never serves a request. EngineLoop does that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from random import Random

import torch

from graftwork.engine.build.calibration import measure
from graftwork.engine.build.devices import choose_device, choose_dtype, keep_freed_memory, load_decoder
from graftwork.engine.build.kv import KvStorage, allocate_kv_storage, build_kv_cache_manager
from graftwork.engine.build.lora import build_lora
from graftwork.engine.build.memory import EngineMemory
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.core.tiers import Tier
from graftwork.engine.grammar.compile.compiler import GrammarCompiler
from graftwork.engine.grammar.compile.grammar_cache import PublicGrammars
from graftwork.engine.grammar.manager import GrammarManager
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.grammar.matching.vocabulary import read_vocabulary
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.cost_model import UNMEASURED, CostTracker
from graftwork.engine.kv.index.frame_allocator import FrameAllocator
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.tool_latency import ToolLatencyModel
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.loop import EngineLoop
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.device_pool import DeviceAdapterPool
from graftwork.engine.lora.loader import AdapterLoader
from graftwork.engine.lora.pool import LoraPool, LoraPoolLimits
from graftwork.engine.lora.weights import AdapterSource
from graftwork.engine.messages import Message
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.fingerprint import fingerprint
from graftwork.engine.model.layers import BatchInvariance
from graftwork.engine.runner.attention import PagedAttention
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.model_runner import ModelRunner, PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.speculator import DraftLimits, Speculator
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.clock import Clock, SystemClock


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


SourceFor = Callable[[EngineDescription], AdapterSource]
"""A function that returns the source of adapters for a model. Adapters are checked against the given description."""


def build_engine(
    config: EngineConfig,
    source_for: SourceFor,
    clock: Clock | None = None,
    costs: CostTracker | None = None,
    seeds: Random | None = None,
) -> Engine:
    """Loads the model, allocates memory for KV and adapters, and connects all parts of the engine.

    `source_for` returns the source from which adapters of this model are read. `seeds` draws a seed for each request
    that has none. If `costs` is None, the engine measures two times on this device: the time to load KV pages from host
    or disk, and the time of a prefill.

    Raises InvalidRequest if the model is not supported, or if the configured sizes do not fit it.
    """
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    model, device = read_model_config(config.model), choose_device(config.device)
    dtype = choose_dtype(config.dtype, model, device)
    clock = clock or SystemClock()
    inbox: SimpleQueue[Message] = SimpleQueue()
    storage = allocate_kv_storage(config, model, fingerprint(config.model), device, dtype)
    description = _describe(config, model, storage.sizes.device_pages)
    progress = LoopProgress(clock)
    decoder = load_decoder(config, model, device, dtype, progress.advance)
    lora = build_lora(config, model, device, dtype)
    tracker = costs or CostTracker(UNMEASURED)
    kv_cache, copier = build_kv_cache_manager(config, storage, tracker, inbox.put, clock)
    on_device = DeviceAdapterPool(storage.device_memory, kv_cache.page_store, lora, config.lora_pool_bytes)
    kv_cache.page_store.frame_users[Tier.DEVICE] = on_device
    loader = AdapterLoader(source_for(description), decoder.weights, dtype, inbox.put)
    adapters = LoraPool(loader, LoraPoolLimits(config.lora_host_bytes), on_device, clock)
    grammars = _grammars(config, model, inbox, clock)
    runner = _runner(model, storage, decoder, adapters, lora, BatchInvariance.of(dtype))
    limits = _limits(config, model)
    if costs is None:
        tracker.start_from(measure(storage, runner.run, limits))
    scopes = CacheScopes(description.fingerprint, f"{dtype}/{config.page_tokens}")
    sessions = SessionCache(kv_cache, scopes, ToolLatencyModel(), clock)
    speculator, seeds = _speculator(config, grammars, clock), seeds or Random()
    scheduler = Scheduler(
        limits, kv_cache, sessions, adapters, scopes, clock=clock, seeds=seeds, grammars=grammars, speculator=speculator
    )
    on_device.frame_allocator.on_pages_moved = scheduler.renumber_pages
    gates, prefills = storage.cache.gates, PrefillMeter(tracker, clock)
    loop = EngineLoop(inbox, scheduler, adapters, grammars, kv_cache, copier, gates, runner, prefills, progress)
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
        memory=EngineMemory(decoder.weights.num_bytes, storage.device_memory.frames, storage.host.block),
    )


def _runner(
    model: ModelConfig,
    storage: KvStorage,
    decoder: Decoder,
    adapters: LoraPool,
    lora: LoraBackend,
    rules: BatchInvariance,
) -> ModelRunner:
    memory = storage.device_memory
    builder = BatchBuilder(storage.sizes.page_tokens, memory.null_frame, memory.device, rules)
    attention = PagedAttention(model, storage.cache)
    return ModelRunner(decoder, attention, builder, adapters, lora, MaskFiller(model.vocab_size))


def _speculator(config: EngineConfig, grammars: GrammarManager, clock: Clock) -> Speculator:
    limits = DraftLimits(config.max_draft_tokens, config.draft_cache_bytes)
    return Speculator(limits, clock, lambda state: grammars.constraint(state.request_id))


def _grammars(config: EngineConfig, model: ModelConfig, inbox: SimpleQueue[Message], clock: Clock) -> GrammarManager:
    vocabulary = read_vocabulary(config.model, model.vocab_size, model.eos_token_ids)
    limits = CompileLimits()
    public = PublicGrammars.read(config.public_grammars)
    compiler = None
    if vocabulary is not None:
        compiler = GrammarCompiler(config.model, vocabulary, limits, inbox.put, clock, public)
    return GrammarManager(compiler, model.eos_token_ids, limits, clock)


def _limits(config: EngineConfig, model: ModelConfig) -> SchedulerLimits:
    return SchedulerLimits(
        page_tokens=config.page_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_running=min(config.max_running, config.max_batch_tokens),
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        waiting_share=config.waiting_share,
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def _describe(config: EngineConfig, model: ModelConfig, device_pages: int) -> EngineDescription:
    limits = _limits(config, model)
    return EngineDescription(
        model_name=config.model_name or config.model.resolve().name,
        fingerprint=fingerprint(config.model),
        vocab_size=model.vocab_size,
        context_tokens=model.context_tokens,
        eos_token_ids=model.eos_token_ids,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        biased_targets=model.biased_targets,
        target_shapes=model.target_shapes,
        max_lora_rank=config.max_lora_rank,
        page_tokens=config.page_tokens,
        device_pages=device_pages,
        max_requests=limits.max_running + limits.queue.requests,
        max_domain_requests=limits.max_running + limits.queue.domain_requests,
    )
