"""Measures how much device memory an engine takes besides its weights and KV: its largest step, and its CUDA graphs.

The warm-up runs when the device has the weights and nothing else, with just enough memory for the KV of its own steps.
It also loads the kernels, which take device memory too. When it ends, only the weights are left on the device.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from graftwork.engine.build.device_sizes import MeasuredDevice
from graftwork.engine.build.devices import CudaMeter, DeviceMeter
from graftwork.engine.build.graphs import wants_cuda_graphs
from graftwork.engine.build.kv import KvStorage, device_bytes_of, frame_sizer, groups_of
from graftwork.engine.build.limits import page_tokens_of
from graftwork.engine.build.lora import PACK_BYTES
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.core.config import EngineConfig, KernelPart
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import MAX_MIXTURE, AdapterUse
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.resident_adapter import ExpertDelta, GroupDelta, ResidentAdapter, SliceDelta
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import EXPERT_GROUPS, GroupShape, group_shapes
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId

if TYPE_CHECKING:
    from graftwork.engine.build.compile_kernels import CompilingAhead

_log = logging.getLogger(__name__)

_WARM_UP_MIXTURE = tuple(AdapterUse(f"warm-up {number}", 0.5) for number in range(MAX_MIXTURE))
_SAMPLING = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=MAX_TOP_LOGPROBS)
"""Sampling that needs much memory: all probabilities of a row are computed, and its log probabilities are reported."""


class WarmUpAdapters:
    """Adapters of the largest rank whose weights are zeros. All matrices of one shape share their memory.

    A mixture of them asks of the LoRA backend as much memory for a step as any request can.
    """

    def __init__(self, model: ModelConfig, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        by_group = {shape: _zero_delta(shape, rank, dtype, device) for shape in set(group_shapes(model).values())}
        deltas = {key: by_group[shape] for key, shape in group_shapes(model).items()}
        experts = _zero_experts(model, rank, dtype, device)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._by_digest = {
            use.digest: ResidentAdapter(
                use.digest, nothing, deltas, None, None, None, rank, is_low_rank=True, experts=experts
            )
            for use in _WARM_UP_MIXTURE
        }

    def get(self, digest: str) -> ResidentAdapter:
        return self._by_digest[digest]

    @contextmanager
    def placed_in(self, lora: LoraBackend) -> Iterator[None]:
        """Lets a backend use the adapters inside the block."""
        for adapter in self._by_digest.values():
            lora.place(adapter)
        try:
            yield
        finally:
            for digest in self._by_digest:
                lora.forget(digest)


def _zero_delta(shape: GroupShape, rank: int, dtype: torch.dtype, device: torch.device) -> GroupDelta:
    ends = list(accumulate(shape.widths))
    slices = tuple(
        SliceDelta(
            torch.zeros(rank, width, dtype=dtype, device=device), number * rank, (number + 1) * rank, end - width, end
        )
        for number, (width, end) in enumerate(zip(shape.widths, ends, strict=True))
    )
    return GroupDelta(torch.zeros(rank * len(slices), shape.in_features, dtype=dtype, device=device), None, slices)


def _zero_experts(
    model: ModelConfig, rank: int, dtype: torch.dtype, device: torch.device
) -> dict[tuple[int, str], ExpertDelta]:
    """Returns changes of all experts. All experts of a layer share their memory."""
    if model.experts is None:
        return {}
    shapes = model.experts.shapes

    def zeros(features: int) -> torch.Tensor:
        return torch.zeros(1, rank, features, dtype=dtype, device=device).expand(shapes.num_experts, -1, -1)

    sizes = dict(zip(EXPERT_GROUPS, (shapes.gate_up, shapes.down), strict=True))
    deltas = {group: ExpertDelta(zeros(into), zeros(out), None) for group, (out, into) in sizes.items()}
    return {(layer, group): delta for layer in shapes.layers for group, delta in deltas.items()}


def begin_compiling(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> "CompilingAhead | None":
    """Begins to compile the kernels that this engine may launch on a GPU, where this machine has not done so before.

    It happens in other processes, while the weights are loaded. Returns None if nothing is to be compiled.
    """
    parts: tuple[KernelPart, ...] = ("rows", "attention", "lora")
    are_wanted = all(config.kernels_for(part) in ("auto", "triton") for part in parts)
    is_whole = config.tensor_parallel == 1  # a rank's model has other sizes than its config.json
    if device.type != "cuda" or not are_wanted or not is_whole or find_spec("triton") is None:
        return None
    from graftwork.engine.build.compile_kernels import CompilingAhead, ServedModel

    major, minor = torch.cuda.get_device_capability(device)
    page_tokens = page_tokens_of(config, model)
    served = ServedModel(
        model,
        dtype,
        kv_dtype=config.kv_dtype,
        page_tokens=page_tokens,
        max_lora_rank=config.max_lora_rank,
        rounds_rows=config.activation_dtype == "fp8",
    )
    return CompilingAhead(config.model, served, 10 * major + minor)


def choose_sizes(parts: RunnerParts, device: torch.device) -> KvSizes:
    """Returns the sizes of an engine's KV memory. On CUDA, they follow from what the weights leave on the device.

    Raises InvalidRequest if the device is too small. The error names a setting and a value that would work.
    """
    config, sizer = parts.config, frame_sizer(parts.config, parts.model, parts.dtype, device)
    given = device_bytes_of(config, device)
    if device.type != "cuda":
        assert given is not None, "a CPU's memory has a default"
        return sizer.given(given)
    measured = measure_device(parts, sizer.wanted, CudaMeter(device))
    sizes = sizer.measured(measured, config.memory_share) if given is None else sizer.given_on(measured, given)
    _log.info(
        "device_memory", extra={**asdict(measured), "frames": sizes.device_pages, "frame_bytes": sizer.frame_bytes}
    )
    return sizes


def measure_device(parts: RunnerParts, wanted: KvSizes, meter: DeviceMeter) -> MeasuredDevice:
    """Runs the largest steps that `parts.limits` allow, captures some graphs, and returns what they need and what is left.

    `wanted` has the sizes of KV pages. Raises InvalidRequest if such a step does not fit beside the weights. The error
    names a smaller batch, which was tried and fits.
    """
    step_bytes = _peak(parts, wanted, meter)
    if step_bytes is None:
        raise _too_large(parts, wanted, meter)
    graphs = 0
    if wants_cuda_graphs(parts.config, meter.device):
        graphs = parts.graphs_bytes(_small_storage(parts, wanted, 1, meter.device), meter)
    return MeasuredDevice(str(meter.device), meter.free_bytes(), step_bytes, PACK_BYTES, graphs)


def _peak(parts: RunnerParts, wanted: KvSizes, meter: DeviceMeter) -> int | None:
    """Returns the most bytes that the largest steps take besides weights and KV; None if they do not fit."""
    plans = largest_steps(parts.limits, parts.config.max_draft_tokens)
    pages = 1 + max(page for plan in plans for piece in plan.slices for page in piece.pages)

    def run_all() -> None:
        adapters = WarmUpAdapters(parts.model, parts.lora_rank, parts.dtype, meter.device)
        with adapters.placed_in(parts.lora):
            run = parts.trial(_small_storage(parts, wanted, pages, meter.device), adapters)
            for plan in plans:
                run(plan)

    try:
        return meter.peak_of(run_all)
    except torch.OutOfMemoryError:
        return None


def _small_storage(parts: RunnerParts, wanted: KvSizes, num_pages: int, device: torch.device) -> KvStorage:
    """Returns KV memory of a few pages."""
    memory = DeviceMemory(num_pages, wanted.page_bytes, device)
    form = kv_format(parts.config.kv_dtype, parts.dtype)
    groups = groups_of(parts.config, parts.model)
    cache = KvCache(parts.model, memory, wanted.page_tokens, parts.dtype, form, groups)
    sizes = replace(wanted, device_pages=num_pages, host_pages=0)
    return KvStorage(sizes, memory, cache, HostMemory(0, cache.page_shape, cache.dtype), disk=None)


def _too_large(parts: RunnerParts, wanted: KvSizes, meter: DeviceMeter) -> InvalidRequest:
    """Returns the error for a batch that does not fit, after a search for one that does."""
    limits = parts.limits
    tokens = limits.max_batch_tokens // 2
    while tokens:
        smaller = replace(limits, max_batch_tokens=tokens, max_running=min(limits.max_running, tokens))
        if _peak(replace(parts, limits=smaller), wanted, meter) is not None:
            return InvalidRequest(
                f"A step of {limits.max_batch_tokens} tokens does not fit into the memory of {meter.device} beside the "
                f"weights. Give max_batch_tokens of at most {tokens}.",
                param="max_batch_tokens",
            )
        tokens //= 2
    return InvalidRequest(
        f"The weights leave {meter.device} {meter.free_bytes()} bytes, which is too little for a step of one token: "
        "take a smaller model, or a device with more memory.",
        param="model",
    )


def largest_steps(limits: SchedulerLimits, max_draft_tokens: int) -> tuple[StepPlan, StepPlan]:
    """Returns two steps that no step exceeds: one has the most tokens, the other samples the most rows.

    In the first, `max_running` requests share `max_batch_tokens` tokens: few have long chunks, the others one token. In
    the second, each request has as many drafts as fit. All requests write their KV to the same pages, and use the mixture
    of `WarmUpAdapters`.
    """
    longest = min(limits.context_tokens, limits.max_batch_tokens)
    left, lengths = limits.max_batch_tokens - limits.max_running, list[int]()
    for _ in range(limits.max_running):
        lengths.append(1 + min(left, longest - 1))
        left -= lengths[-1] - 1
    drafts = min(max_draft_tokens, limits.max_batch_tokens // limits.max_running - 1, limits.context_tokens - 1)
    chunks = [_slice(number, length, 0, limits.page_tokens) for number, length in enumerate(lengths)]
    drafting = [_slice(number, 1 + drafts, drafts, limits.page_tokens) for number in range(limits.max_running)]
    return StepPlan(tuple(chunks)), StepPlan(tuple(drafting))


def _slice(number: int, num_tokens: int, num_drafts: int, page_tokens: int) -> RequestSlice:
    """Returns the slice of the request with this number. Its last `num_drafts` tokens are drafts."""
    first = num_tokens - num_drafts
    samples = tuple(
        SampleSpec(_SAMPLING, seed=number, position=first + drafts, draft_token_ids=(0,) * drafts)
        for drafts in range(num_drafts + 1)
    )
    pages = tuple(PageId(page) for page in range(pages_for(num_tokens, page_tokens)))
    return RequestSlice(RequestId(f"warm-up {number}"), (0,) * num_tokens, 0, pages, _WARM_UP_MIXTURE, samples)
