"""Builds the runner of an engine: attention, the forward pass and the sampler for its device.

The packed forward pass is taken if Triton kernels compute everything that it sends numbers to: the row operations,
attention and LoRA. Otherwise the plain one is taken, which works with every backend.

An engine builds two runners: one for the warm-up step, with just enough memory for it, and one that serves.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from graftwork.engine.attention.backend import AttentionBackend
from graftwork.engine.attention.torch_attention import TorchAttention
from graftwork.engine.build.attention import build_attention
from graftwork.engine.build.kv import KvStorage
from graftwork.engine.build.row_ops import build_row_ops
from graftwork.engine.build.sampler import build_sampler
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.step import StepPlan
from graftwork.engine.kernels.step_inputs import PinnedMemory
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.pool import NoAdapters, ResidentAdapters
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import BatchInvariance
from graftwork.engine.model.weights import DecoderWeights
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.forward import PlainForward, SegmentFinder, StepPaths
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.model_runner import ModelRunner
from graftwork.engine.runner.prompt_scorer import PromptScorer
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.engine.sampling.torch_sampler import TorchSampler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.runner.decode_graphs import DecodeGraphs
    from graftwork.engine.runner.packed_forward import PackedForward

_log = logging.getLogger(__name__)

_GRAPH_CHOICES = ("auto", "off")


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

    def runner(self, storage: KvStorage, adapters: ResidentAdapters, *, with_graphs: bool = True) -> ModelRunner:
        """Returns a new runner that reads and writes KV in `storage`.

        With graphs, captures the CUDA graphs for decoding, if the device and the kernels can. No page may be in use.
        Raises InvalidRequest if the configuration names kernels that do not work on this machine.
        """
        memory, finder = storage.device_memory, SegmentFinder(adapters)
        own = self._step_parts(storage)
        forward = _forward(own, finder, self.spread)
        sampler = build_sampler(self.model.vocab_size, self.limits.max_running, memory.device)
        reads_logits_at_once = not isinstance(
            sampler, TorchSampler
        )  # a graph's logits are overwritten by the next step
        wants_graphs = wants_decode_graphs(self.config, memory.device) and with_graphs
        if wants_graphs and reads_logits_at_once and not isinstance(forward, PlainForward):
            forward.graphs = _graphs(forward, storage, self.limits)
        has_graphs = not isinstance(forward, PlainForward) and forward.graphs is not None
        forward.paths = own.fallbacks(self.config, memory.device)
        forward.paths.fallback_sampler = int(memory.device.type == "cuda" and not reads_logits_at_once)
        forward.paths.fallback_graphs = int(wants_graphs and not has_graphs)
        scorer = PromptScorer(own.decoder, self.lora, own.builder.rules, finder.mix)
        return ModelRunner(forward, sampler, scorer, memory.device)

    def follower(self, storage: KvStorage, adapters: ResidentAdapters) -> PlainForward:
        """Returns the forward pass of a rank above 0, which reads and writes KV in `storage`."""
        return self._step_parts(storage).plain(SegmentFinder(adapters), self.spread)

    def trial(self, storage: KvStorage) -> Callable[[StepPlan], object]:
        """Returns a function that runs one step without adapters, as this rank will serve."""
        if self.samples:
            return self.runner(storage, NoAdapters(), with_graphs=False).run
        return self.follower(storage, NoAdapters()).follow

    def _step_parts(self, storage: KvStorage) -> "_StepParts":
        memory, rules = storage.device_memory, BatchInvariance.of(self.dtype)
        rows = self.wrap_rows(build_row_ops(self.config.row_kernels, self.model, storage.cache))
        return _StepParts(
            Decoder(self.model, self.weights, rows, self.on_layer),
            build_attention(self.config, self.model, storage, self.dtype),
            BatchBuilder(storage.sizes.page_tokens, memory.null_frame, memory.device, rules),
            self.lora,
        )


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
            fallback_rows=int(on_gpu and config.row_kernels == "auto" and isinstance(self.decoder.rows, TorchRowOps)),
            fallback_attention=int(
                on_gpu and config.attention_backend == "auto" and isinstance(self.attention, TorchAttention)
            ),
            fallback_lora=int(config.lora_kernels == "auto" and isinstance(self.lora, TorchLora)),
        )

    def plain(self, finder: SegmentFinder, spread: Callable[[torch.Tensor], None]) -> PlainForward:
        return PlainForward(self.decoder, self.attention, self.builder, self.lora, finder, spread)


def wants_decode_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether an engine on this device captures CUDA graphs, if all its kernels work.

    Raises InvalidRequest if `decode_graphs` is unknown.
    """
    if config.decode_graphs not in _GRAPH_CHOICES:
        raise InvalidRequest(
            f"decode_graphs {config.decode_graphs!r} is not known: choose one of {', '.join(_GRAPH_CHOICES)}.",
            param="decode_graphs",
        )
    return config.decode_graphs == "auto" and device.type == "cuda" and config.tensor_parallel == 1


def _forward(
    own: _StepParts, finder: SegmentFinder, spread: Callable[[torch.Tensor], None]
) -> "PlainForward | PackedForward":
    """Returns the packed forward pass if all its parts are Triton's and there is one rank, else the plain one."""
    decoder, attention, builder, lora = own.decoder, own.attention, own.builder, own.lora
    plain = own.plain(finder, spread)
    if find_spec("triton") is None:
        return plain
    from graftwork.engine.attention.triton_attention import TritonAttention
    from graftwork.engine.lora.triton.backend import TritonLora
    from graftwork.engine.runner.packed_forward import PackedForward, PackedParts
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    if (
        isinstance(attention, TritonAttention)
        and isinstance(lora, TritonLora)
        and isinstance(decoder.rows, TritonRowOps)
    ):
        parts = PackedParts(decoder, attention, builder, lora)
        return PackedForward(parts, finder, PinnedMemory(builder.device))
    if builder.device.type == "cuda":
        loss = "each step waits for several copies to the device"
        _log.warning("packed_inputs_unavailable", extra={"device": str(builder.device), "loss": loss})
    return plain


def _graphs(forward: "PackedForward", storage: KvStorage, limits: SchedulerLimits) -> "DecodeGraphs | None":
    """Captures the CUDA graphs for decoding. If that fails, logs a warning with the reason, and returns None."""
    from graftwork.engine.runner.decode_graphs import CudaGraphs, DecodeGraphs, GraphLimits
    from graftwork.engine.runner.graph_keys import GraphKeys

    device = storage.device_memory.device
    keys = GraphKeys(limits.max_running, forward.parts.lora.max_rank, forward.parts.builder.rules.min_rows)
    sizes = GraphLimits(keys, limits.context_tokens, limits.page_tokens)
    graphs = DecodeGraphs(forward.parts, storage.cache.gates, PinnedMemory(device), sizes)
    try:
        with torch.cuda.device(device):
            graphs.capture(CudaGraphs())
    except Exception as error:  # noqa: BLE001 - drivers and libraries each fail in a way of their own
        loss = "each decoding step launches its kernels one by one"
        _log.warning("decode_graphs_unavailable", exc_info=error, extra={"device": str(device), "loss": loss})
        return None
    return graphs
