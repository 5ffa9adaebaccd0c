"""Builds the runner of an engine: attention, the forward pass and the sampler for its device.

The packed forward pass is taken if Triton kernels compute everything that it sends numbers to: the row operations,
attention and LoRA. Otherwise the plain one is taken, which works with every backend.

An engine builds two runners: one for the warm-up step, with just enough memory for it, and one that serves. It builds
another for its draft model, if it has one. This comes before the memory of the served model's KV, which takes a share of
what is left.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from graftwork.engine.attention.backend import AttentionBackend, AttentionHook
from graftwork.engine.attention.rolling_attention import RollingAttention
from graftwork.engine.build.devices import CudaMeter, DeviceMeter, choose_dtype, load_weights
from graftwork.engine.build.graphs import GraphBuild, cuda_recorder, wants_cuda_graphs
from graftwork.engine.build.kernels import build_attention, build_row_ops, build_sampler, rolling_rows
from graftwork.engine.build.kv import KvStorage, frame_sizer
from graftwork.engine.build.limits import scheduler_limits
from graftwork.engine.build.lora import build_lora
from graftwork.engine.build.weights import choose_weight_kernels
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.step import StepPlan
from graftwork.engine.experts.backend import ExpertBackend
from graftwork.engine.kernels.step_inputs import PinnedMemory
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.pool import ResidentAdapters
from graftwork.engine.lora.resident_adapter import RANK_PAGE, ResidentAdapter
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.mlp_weights import RoutedWeights
from graftwork.engine.model.weights import DecoderWeights
from graftwork.engine.recurrence.layers import RecurrentLayers
from graftwork.engine.recurrence.scan import choose_scan
from graftwork.engine.recurrence.state_pages import StatePages
from graftwork.engine.runner.choose_experts import choose_experts
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.draft_model import DraftModelRunner, DraftModelSizes
from graftwork.engine.runner.forward import PlainForward, SegmentFinder, StepPaths
from graftwork.engine.runner.hidden_taps import HiddenTaps
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.model_runner import ModelRunner
from graftwork.engine.runner.prompt_evictor import PromptEvictor
from graftwork.engine.runner.prompt_pooler import PromptPooler
from graftwork.engine.runner.prompt_scorer import PromptScorer
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.engine.sampling.sampler import Sampler
from graftwork.engine.sampling.torch_sampler import TorchSampler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.runner.packed_forward import PackedForward, PackedParts
    from graftwork.engine.runner.step_graphs import StepGraphs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is built from, besides KV memory and adapters."""

    config: EngineConfig
    model: ModelConfig
    weights: DecoderWeights
    lora: LoraBackend
    limits: SchedulerLimits
    dtype: torch.dtype
    """The dtype of weights and KV."""
    on_layer: Callable[[], None]
    """Called before each layer of a forward pass."""
    samples: bool = True
    """Whether this rank computes logits and samples. Only rank 0 does."""
    wrap_rows: Callable[[RowOps], RowOps] = lambda own: own
    """Makes the row operations of several ranks from those of this one. The default is for one rank."""
    spread: Callable[[torch.Tensor], None] = lambda token_ids: None
    """Gives all ranks the tokens of rank 0, if a step awaits some. The default is for one rank."""
    taps: HiddenTaps | None = None
    """Keep hidden states for a draft head; None without one."""

    def runner(self, storage: KvStorage, adapters: ResidentAdapters, *, with_graphs: bool = True) -> ModelRunner:
        """Returns a new runner that reads and writes KV in `storage`.

        With graphs, captures the CUDA graphs for decoding, if the device and the kernels can. No page may be in use.
        Raises InvalidRequest if the configuration names kernels that do not work on this machine.
        """
        device, finder = storage.device_memory.device, SegmentFinder(adapters)
        own = self._step_parts(storage)
        packed, sampler = _packed_parts(own), self._sampler(device)
        wants_graphs = wants_cuda_graphs(self.config, device) and with_graphs
        build = self._graph_build(packed, sampler, storage) if wants_graphs else None
        graphs = None if build is None else build.capture(cuda_recorder(device), CudaMeter(device))
        forward = _forward(own, packed, graphs, finder, self.spread)
        forward.paths = own.fallbacks(self.config, device)
        forward.paths.fallback_sampler = int(
            device.type == "cuda" and self.config.kernels_for("sampler") == "auto" and isinstance(sampler, TorchSampler)
        )
        forward.paths.fallback_graphs = int(wants_graphs and graphs is None)
        scorer = PromptScorer(own.decoder, self.lora, own.builder.rules, finder.mix)
        return ModelRunner(forward, sampler, scorer, PromptPooler(own.decoder), device, self.taps)

    def graphs_bytes(self, storage: KvStorage, meter: DeviceMeter) -> int:
        """Captures some CUDA graphs over `storage`, and returns the bytes that all graphs of the engine will take.

        0 if it will have none. The captured graphs are gone when the method returns.
        """
        build = self._graph_build(_packed_parts(self._step_parts(storage)), self._sampler(meter.device), storage)
        return 0 if build is None else build.measure(cuda_recorder(meter.device), meter)

    def follower(self, storage: KvStorage, adapters: ResidentAdapters) -> PlainForward:
        """Returns the forward pass of a rank above 0, which reads and writes KV in `storage`."""
        return self._step_parts(storage).plain(SegmentFinder(adapters), self.spread)

    @property
    def lora_rank(self) -> int:
        """The largest rank of adapters, in whole pages of ranks."""
        return -(-self.config.max_lora_rank // RANK_PAGE) * RANK_PAGE

    def trial(self, storage: KvStorage, adapters: ResidentAdapters) -> Callable[[StepPlan], object]:
        """Returns a function that runs one step, as this rank will serve, but without graphs."""
        if self.samples:
            return self.runner(storage, adapters, with_graphs=False).run
        return self.follower(storage, adapters).follow

    def _sampler(self, device: torch.device) -> Sampler:
        return build_sampler(self.model.vocab_size, self.limits.max_running, device, self.config.kernels_for("sampler"))

    def _graph_build(self, packed: "PackedParts | None", sampler: Sampler, storage: KvStorage) -> GraphBuild | None:
        """Returns what graphs can be captured from. None if torch computes a part of the step that graphs need.

        A graph's logits are overwritten by the next step, and torch's sampler may read them later. Without kernels for
        experts, the host must know the choices of routers.
        """
        if packed is None or isinstance(sampler, TorchSampler):
            return None
        experts = packed.decoder.experts
        if experts is not None and not experts.uses_kernels:
            return None
        serves_rolling = self.config.cuda_graphs == "windows" and packed.attention.serves_rolling
        return GraphBuild(packed, storage.cache.gates, self.limits, storage.sizes.windows, serves_rolling)

    def _step_parts(self, storage: KvStorage) -> "_StepParts":
        memory, rules = storage.device_memory, BatchInvariance.of(self.dtype, storage.device_memory.device)
        attention = build_attention(self.config, self.model, storage, self.dtype, self.weights.sinks)
        rows = self.wrap_rows(build_row_ops(self.config.kernels_for("rows"), self.model, storage.cache))
        return _StepParts(
            Decoder(
                self.model,
                self.weights,
                rows,
                self.on_layer,
                self._recurrent(storage),
                self._experts(memory.device),
                self.taps,
                self._hooks(storage, attention),
            ),
            attention,
            BatchBuilder(
                storage.sizes.page_tokens,
                memory.null_frame,
                memory.device,
                rules,
                usual_sizes=self.weights.layers[0].qkv.is_packed,
                num_groups=len(storage.cache.groups.groups),
            ),
            self.lora,
        )

    def _hooks(self, storage: KvStorage, attention: AttentionBackend) -> list[AttentionHook]:
        """Returns what computes rows with a rolling window where `attention` does not, and what evicts prompts of requests with
        a budget, where the engine serves these.
        """
        hooks: list[AttentionHook] = []
        if self.limits.why_no_windows is None and not attention.serves_rolling:
            hooks.append(rolling_rows(self.model, storage, self.weights.sinks))
        if self.limits.why_no_budgets is None:
            hooks.append(PromptEvictor(self.model, storage.cache, self.weights.sinks))
        return hooks

    def _experts(self, device: torch.device) -> type[ExpertBackend]:
        """Returns what computes the experts of routed layers."""
        routed = [layer.mlp for layer in self.weights.layers if isinstance(layer.mlp, RoutedWeights)]
        return choose_experts(self.config.kernels_for("experts"), routed, device, self.dtype)

    def _recurrent(self, storage: KvStorage) -> RecurrentLayers | None:
        """Returns what computes the recurrent layers; None if the model has none."""
        if self.model.recurrence is None:
            return None
        pages = StatePages(self.model.recurrence, storage.device_memory, storage.cache)
        weights = [layer.recurrent for layer in self.weights.layers if layer.recurrent is not None]
        return RecurrentLayers(self.model, weights, pages, storage.sizes.page_tokens, choose_scan())


@dataclass(frozen=True, slots=True)
class _StepParts:
    """What every kind of forward pass computes with."""

    decoder: Decoder
    attention: AttentionBackend
    builder: BatchBuilder
    lora: LoraBackend

    def fallbacks(self, config: EngineConfig, device: torch.device) -> StepPaths:
        """Returns counts of no step yet, which tell where torch stands in for kernels that were wanted."""
        on_gpu = device.type == "cuda"
        return StepPaths(
            fallback_rows=int(
                on_gpu and config.kernels_for("rows") == "auto" and isinstance(self.decoder.rows, TorchRowOps)
            ),
            fallback_attention=int(
                on_gpu and config.kernels_for("attention") == "auto" and isinstance(self.attention, RollingAttention)
            ),
            fallback_experts=int(
                on_gpu
                and config.kernels_for("experts") == "auto"
                and self.decoder.experts is not None
                and not self.decoder.experts.uses_kernels
            ),
            fallback_weights=int(
                on_gpu
                and config.kernels_for("weights") == "auto"
                and not all(linear.has_kernels for linear in self.decoder.weights.quantized_linears)
            ),
            fallback_lora=int(config.kernels_for("lora") == "auto" and isinstance(self.lora, TorchLora)),
        )

    def plain(self, finder: SegmentFinder, spread: Callable[[torch.Tensor], None]) -> PlainForward:
        return PlainForward(self.decoder, self.attention, self.builder, self.lora, finder, spread)


def _packed_parts(own: _StepParts) -> "PackedParts | None":
    """Returns the parts whose numbers travel together, if all of them are Triton's; else None."""
    if find_spec("triton") is None:
        return None
    decoder, attention, builder, lora = own.decoder, own.attention, own.builder, own.lora
    if not isinstance(decoder.rows, TorchRowOps):
        # Else Triton, which takes a third of a second to import, is not needed.
        from graftwork.engine.attention.triton_attention import TritonAttention
        from graftwork.engine.lora.triton.backend import TritonLora
        from graftwork.engine.runner.packed_forward import PackedParts
        from graftwork.engine.runner.triton_row_ops import TritonRowOps

        if (
            isinstance(attention, TritonAttention)
            and isinstance(lora, TritonLora)
            and isinstance(decoder.rows, TritonRowOps)
        ):
            return PackedParts(decoder, attention, builder, lora)
    if builder.device.type == "cuda":
        loss = "each step waits for several copies to the device"
        _log.warning("packed_inputs_unavailable", extra={"device": str(builder.device), "loss": loss})
    return None


def _forward(
    own: _StepParts,
    packed: "PackedParts | None",
    graphs: "StepGraphs | None",
    finder: SegmentFinder,
    spread: Callable[[torch.Tensor], None],
) -> "PlainForward | PackedForward":
    """Returns the packed forward pass where there are parts for it, else the plain one."""
    if packed is None:
        return own.plain(finder, spread)
    from graftwork.engine.runner.packed_forward import PackedForward

    forward = PackedForward(packed, finder, PinnedMemory(own.builder.device))
    forward.graphs = graphs
    return forward


@dataclass(frozen=True, slots=True)
class _NoAdapters:
    """The resident adapters of a draft model: it has none."""

    def get(self, digest: str) -> ResidentAdapter:
        raise KeyError(digest)


def build_draft_model(
    config: EngineConfig, draft: ModelConfig | None, device: torch.device, weight_bytes: int
) -> DraftModelRunner | None:
    """Loads the draft model `draft`, and allocates its KV. `weight_bytes` are those of the served model.

    Raises InvalidRequest if it does not fit on the device.
    """
    if draft is None or config.draft_model is None:
        return None
    own = _own_config(config, device)
    dtype, limits = choose_dtype(own.dtype, draft, device), scheduler_limits(own, draft, device)
    weights = load_weights(own, draft, device, dtype)
    choose_weight_kernels(own, weights, device, dtype)
    storage = _draft_storage(own, draft, device, dtype)
    parts = RunnerParts(own, draft, weights, build_lora(own, draft, device, dtype), limits, dtype, lambda: None)
    sizes = DraftModelSizes(
        num_pages=storage.sizes.device_pages,
        page_tokens=storage.sizes.page_tokens,
        context_tokens=draft.context_tokens,
        max_rows=limits.max_batch_tokens,
        vocab_size=read_model_config(config.model).vocab_size,
        own_vocab_size=draft.vocab_size,
    )
    runner, relative_cost = parts.runner(storage, _NoAdapters()), weights.num_bytes / weight_bytes
    return DraftModelRunner(runner, sizes, relative_cost, weights.num_bytes, storage.device_memory.frames)


def _own_config(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Returns the settings with which the draft model runs: without tiers, quantisation and adapters of its own."""
    assert config.draft_model is not None
    return replace(
        config,
        model=config.draft_model,
        quantization=None,
        activation_dtype="auto",
        window_groups=False,
        kv_dtype="auto",
        max_context_tokens=None,
        host_kv_bytes=0,
        disk_kv_bytes=0,
        lora_kernels="torch" if device.type == "cpu" else config.lora_kernels,
    )


def _draft_storage(config: EngineConfig, draft: ModelConfig, device: torch.device, dtype: torch.dtype) -> KvStorage:
    wanted = frame_sizer(config, draft, dtype, device).wanted
    frame_bytes = frame_bytes_for(wanted.page_bytes)
    num_pages = config.draft_kv_bytes // frame_bytes
    if num_pages < 1:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} holds no page of the draft model: give at least {frame_bytes} bytes.",
            param="draft_kv_bytes",
        )
    try:
        memory = DeviceMemory(num_pages, wanted.page_bytes, device)
    except (MemoryError, RuntimeError) as error:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} bytes cannot be allocated on {device}: give less.",
            param="draft_kv_bytes",
        ) from error
    cache = KvCache(draft, memory, wanted.page_tokens, dtype)
    host = HostMemory(0, cache.page_shape, cache.dtype)
    return KvStorage(replace(wanted, device_pages=num_pages), memory, cache, host, None)
