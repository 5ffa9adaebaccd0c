"""Measures how much device memory a step at the largest batch takes, by running one.

The warm-up runs when the device has the weights and nothing else, with just enough memory for the KV of its own steps.
It also loads the kernels, which take device memory too. When it ends, only the weights are left on the device.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Protocol

import torch

from graftwork.engine.build.device_sizes import MeasuredDevice
from graftwork.engine.build.kv import KvStorage, device_bytes_of, frame_sizer
from graftwork.engine.build.lora import PACK_BYTES
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.page_store import KvSizes
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId

_log = logging.getLogger(__name__)

_SAMPLING = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=MAX_TOP_LOGPROBS)
"""Sampling that needs much memory: all probabilities of a row are computed, and its log probabilities are reported."""


class DeviceMeter(Protocol):
    """Measures the memory of one device. CudaMeter implements it."""

    @property
    def device(self) -> torch.device: ...

    def peak_of(self, act: Callable[[], None]) -> int:
        """Calls `act`. Returns the most bytes that it took at a time, besides those that were taken before.

        Raises torch.OutOfMemoryError if `act` does.
        """
        ...

    def free_bytes(self) -> int:
        """Returns the free memory of the device in bytes, after memory that nothing uses was given back."""
        ...


class CudaMeter:
    """Measures the memory of a CUDA device, as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak_of(self, act: Callable[[], None]) -> int:
        self._give_back()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        act()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before

    def free_bytes(self) -> int:
        self._give_back()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


def choose_sizes(parts: RunnerParts, device: torch.device) -> KvSizes:
    """Returns the sizes of an engine's KV memory. On CUDA, they follow from what the weights leave on the device.

    Raises InvalidRequest if the device is too small. The error names a setting and a value that would work.
    """
    config, sizer = parts.config, frame_sizer(parts.config, parts.model, parts.dtype)
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
    """Runs the largest steps that `parts.limits` allow, and returns what they need and what is left.

    `wanted` has the sizes of KV pages. Raises InvalidRequest if such a step does not fit beside the weights. The error
    names a smaller batch, which was tried and fits.
    """
    step_bytes = _peak(parts, wanted, meter)
    if step_bytes is None:
        raise _too_large(parts, wanted, meter)
    return MeasuredDevice(str(meter.device), meter.free_bytes(), step_bytes, PACK_BYTES)


def _peak(parts: RunnerParts, wanted: KvSizes, meter: DeviceMeter) -> int | None:
    """Returns the most bytes that the largest steps take besides weights and KV; None if they do not fit."""
    plans = largest_steps(parts.limits, parts.config.max_draft_tokens)
    pages = 1 + max(page for plan in plans for piece in plan.slices for page in piece.pages)
    sizes = replace(wanted, device_pages=pages, host_pages=0)

    def run_all() -> None:
        memory = DeviceMemory(pages, sizes.page_bytes, meter.device)
        cache = KvCache(parts.model, memory, sizes.page_tokens, parts.dtype)
        host = HostMemory(0, cache.page_shape, parts.dtype)
        run = parts.trial(KvStorage(sizes, memory, cache, host, disk=None))
        for plan in plans:
            run(plan)

    try:
        return meter.peak_of(run_all)
    except torch.OutOfMemoryError:
        return None


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
    the second, each request has as many drafts as fit. All requests write their KV to the same pages.
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
    return RequestSlice(RequestId(f"warm-up {number}"), (0,) * num_tokens, 0, pages, (), samples)
