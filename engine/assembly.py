"""Puts one engine together from its configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from random import Random

import torch

from graftwork.engine.adapter_weights import AdapterSource
from graftwork.engine.allocator import keep_freed_memory
from graftwork.engine.attention import KvCache
from graftwork.engine.batch_tensors import BatchBuilder
from graftwork.engine.calibration import measure
from graftwork.engine.config import EngineConfig
from graftwork.engine.device_adapters import DeviceAdapters
from graftwork.engine.drafting.speculator import DraftLimits, Speculator
from graftwork.engine.fingerprint import fingerprint
from graftwork.engine.frame_room import FrameRoom
from graftwork.engine.grammar.compiler import GrammarCompiler
from graftwork.engine.grammar.desk import GrammarDesk
from graftwork.engine.grammar.limits import CompileLimits
from graftwork.engine.grammar.masks import MaskFiller
from graftwork.engine.grammar.vocabulary import read_vocabulary
from graftwork.engine.intake import SchedulerLimits
from graftwork.engine.kv_assembly import build_memory, lay_out_kv
from graftwork.engine.kv_memory import KvMemory
from graftwork.engine.lease_advisor import LeaseAdvisor
from graftwork.engine.load_cost import UNMEASURED, CostTracker, LoadCost
from graftwork.engine.loop import EngineLoop, Message
from graftwork.engine.lora_assembly import build_lora
from graftwork.engine.lora_pool import AdapterLoader, LoraPool, LoraPoolLimits
from graftwork.engine.model_config import ModelConfig, read_model_config
from graftwork.engine.request import EngineDescription
from graftwork.engine.row_rules import RowRules
from graftwork.engine.runner import ModelRunner, choose_device, choose_dtype, load_decoder
from graftwork.engine.scheduler import Scheduler
from graftwork.engine.scope import ScopeMaker
from graftwork.engine.session_tending import SessionTender
from graftwork.engine.tier_names import Tier
from graftwork.platform.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class Engine:
    """A loop that is ready to run, what it says of itself, and the parts that it runs.

    Only the loop's thread may use the parts.
    """

    loop: EngineLoop
    description: EngineDescription
    scheduler: Scheduler
    memory: KvMemory
    cache: KvCache
    """The KV of the device's pages."""
    adapters: LoraPool
    room: FrameRoom
    """The device's frames."""
    grammars: GrammarDesk
    runner: ModelRunner


SourceFor = Callable[[EngineDescription], AdapterSource]
"""Makes the source of adapters for a model: what they are checked against is known only once the model is read."""


def build_engine(
    config: EngineConfig,
    source_for: SourceFor,
    clock: Clock | None = None,
    costs: LoadCost | None = None,
    seeds: Random | None = None,
) -> Engine:
    """Load the model and lay out its memory. Raises InvalidRequest if the model or the sizes cannot be served.

    `costs` of loading and computing are measured where they are not given. `seeds` draws the seed of every request
    that has none; by default it differs from run to run.
    """
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    model = read_model_config(config.model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model, device)
    clock = clock or SystemClock()
    inbox: SimpleQueue[Message] = SimpleQueue()
    store = lay_out_kv(config, model, fingerprint(config.model), device, dtype)
    description = _describe(config, model, store.sizes.device_pages)
    decoder = load_decoder(config, model, device, dtype)
    lora = build_lora(config, model, device, dtype)
    tracker = CostTracker(costs or UNMEASURED)
    memory, copier = build_memory(config, store, tracker, inbox.put, clock)
    on_device = DeviceAdapters(store.arena, memory.residency, lora, config.lora_pool_bytes)
    memory.residency.lodgers[Tier.DEVICE] = on_device
    adapters = LoraPool(
        AdapterLoader(source_for(description), decoder.weights, dtype, inbox.put),
        LoraPoolLimits(config.lora_host_bytes),
        on_device,
        clock,
    )
    grammars = _grammars(config, model, inbox, clock)
    builder = BatchBuilder(config.page_tokens, store.arena.null_frame, device, RowRules.of(dtype))
    runner = ModelRunner(decoder, store.cache, builder, adapters, lora, MaskFiller(model.vocab_size))
    if costs is None:
        tracker.start_from(measure(store, runner.run, _limits(config, model)))
    scopes = ScopeMaker(description.fingerprint, f"{dtype}/{config.page_tokens}")
    scheduler = Scheduler(
        _limits(config, model),
        memory,
        SessionTender(memory, scopes, LeaseAdvisor(), clock),
        adapters,
        scopes,
        clock=clock,
        seeds=seeds or Random(),
        grammars=grammars,
        speculator=Speculator(
            DraftLimits(config.max_draft_tokens, config.draft_cache_bytes),
            clock,
            lambda sequence: grammars.constraint(sequence.request_id),
        ),
    )
    on_device.room.on_pages_moved = scheduler.rename_pages
    loop = EngineLoop(inbox, scheduler, adapters, grammars, memory, copier, store.cache.gates, runner)
    return Engine(
        loop=loop,
        description=description,
        scheduler=scheduler,
        memory=memory,
        cache=store.cache,
        adapters=adapters,
        room=on_device.room,
        grammars=grammars,
        runner=runner,
    )


def _grammars(config: EngineConfig, model: ModelConfig, inbox: SimpleQueue[Message], clock: Clock) -> GrammarDesk:
    vocabulary = read_vocabulary(config.model, model.vocab_size, model.eos_token_ids)
    limits = CompileLimits()
    compiler = GrammarCompiler(config.model, vocabulary, limits, inbox.put, clock) if vocabulary is not None else None
    return GrammarDesk(compiler, model.eos_token_ids, limits, clock)


def _limits(config: EngineConfig, model: ModelConfig) -> SchedulerLimits:
    return SchedulerLimits(
        page_tokens=config.page_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_running=min(config.max_running, config.max_batch_tokens),
        max_waiting=config.max_waiting,
        context_tokens=model.context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
    )


def _describe(config: EngineConfig, model: ModelConfig, device_pages: int) -> EngineDescription:
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
    )
