"""Measures on this machine how long two things take: loading KV pages from host or disk, and prefilling.

The measurements overwrite device pages. So they must run before the scheduler starts, while no request has pages.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import TypeVar

import torch

from graftwork.engine.build.kv import KvStorage
from graftwork.engine.core.prefix_keys import child_key, pages_for, root_key
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan, StepResult
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.disk.shared import SharedStore, TierStore
from graftwork.engine.kv.index.cost_model import (
    LoadCost,
    PrefillCost,
    PrefillSample,
    TransferCost,
    TransferSample,
    fit_prefill,
    fit_transfer,
)
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.ids import RequestId

T = TypeVar("T", bound=Hashable)


_UNAVAILABLE = TransferCost(fixed_s=1e6, page_s=1e6)
"""The cost of loading from a tier that this engine does not have. The cost is so high that such a load is never chosen.
"""


_PAGE_COUNTS = (1, 4, 16)


_REPEATS = 5


_AGREES_WITHIN = 3.0
"""The factor by which a prefill may take longer or shorter than kept costs say."""


_SAMPLE = SampleSpec(SamplingParams(max_tokens=1, temperature=0), seed=0, position=0)
"""Each measured step samples one token, like the last step of a prefill. Reading the token waits for the device, so the
measured time is complete.
"""


def measure(storage: KvStorage, run: Callable[[StepPlan], StepResult], limits: SchedulerLimits) -> LoadCost:
    """Measures the seconds for loading KV pages from host and disk, and the seconds for a prefill.

    `run` runs one step of the model. Overwrites pages on the device.
    """
    host = measure_host(storage.cache, storage.host, storage.sizes.device_pages)
    return LoadCost(
        host,
        measure_disk(storage.disk, storage.sizes.page_bytes, host),
        measure_prefill(run, limits),
    )


def confirms(cost: PrefillCost, run: Callable[[StepPlan], StepResult], limits: SchedulerLimits) -> bool:
    """Returns whether one short prefill takes about as long as `cost` says.

    Runs the prefill once more if the first one does not, which is slower than all others. Overwrites pages on the device.
    """
    num_tokens = _short_prefill(limits)
    plan = _prefill_of(num_tokens, 0, limits.page_tokens)
    expected = cost.seconds(num_tokens, 0)
    return any(1 / _AGREES_WITHIN <= _seconds(run, plan) / expected <= _AGREES_WITHIN for _ in range(2))


def measure_host(cache: KvCache, host: HostMemory, num_pages: int) -> TransferCost:
    """Measures the seconds for copying 1 to 16 KV pages from the host to the device.

    Overwrites the first `num_pages` device pages at most. If there is no host tier, returns a cost so high that the
    engine never chooses to load from it.
    """
    if not host.num_pages:
        return _UNAVAILABLE

    def load(count: int) -> None:
        for page in range(count):
            cache.write_page(page, host.page(page))
        if cache.device.type == "cuda":
            torch.cuda.synchronize(cache.device)

    counts = [count for count in _PAGE_COUNTS if count <= min(num_pages, host.num_pages)]
    return fit_transfer([TransferSample(*measured) for measured in _fastest(load, counts).items()])


def measure_disk(disk: TierStore | None, page_bytes: int, host: TransferCost) -> TransferCost:
    """Measures the seconds for loading 1 to 16 KV pages from disk to the device.

    The result is the time of reading from disk plus `host`, the cost of copying from host to device. Writes pages to
    disk for the measurement and deletes them again. If there is no disk tier, or if no page could be written, returns a
    cost so high that the engine never chooses to load from disk.
    """
    if disk is None:
        return _UNAVAILABLE
    if isinstance(disk, SharedStore):
        disk = disk.own  # the pages of a measurement are for nobody else
    domain = hashlib.sha256(b"calibration").digest()
    keys = [child_key(root_key(domain), [number]) for number in range(_PAGE_COUNTS[-1])]
    into = memoryview(bytearray(page_bytes * len(keys)))
    stored = disk.write(domain, keys, [into[:page_bytes]] * len(keys))

    def read(count: int) -> None:
        disk.read_pages(keys[:count], into[: count * page_bytes])

    counts = [count for count in _PAGE_COUNTS if count <= stored]
    samples = [TransferSample(*measured) for measured in _fastest(read, counts).items()] if counts else []
    for key in keys:
        disk.forget(key)
    disk.sweep()
    if not samples:
        return _UNAVAILABLE
    cost = fit_transfer(samples)
    onward = host if host is not _UNAVAILABLE else TransferCost(0.0, 0.0)
    return TransferCost(cost.fixed_s + onward.fixed_s, cost.page_s + onward.page_s)


def measure_prefill(run: Callable[[StepPlan], StepResult], limits: SchedulerLimits) -> PrefillCost:
    """Measures the seconds that the base model needs for a prefill, with and without earlier tokens in the context.

    `run` runs one step of the model. A measured prefill has at most 128 tokens.
    """
    longest = _longest_prefill(limits)
    cells = {
        (longest, 0),
        (_short_prefill(limits), 0),
        (_short_prefill(limits), min(limits.context_tokens - longest, 4 * longest)),
    }

    def compute(cell: tuple[int, int]) -> None:
        run(_prefill_of(*cell, limits.page_tokens))

    seconds = _fastest(compute, sorted(cells))
    return fit_prefill([PrefillSample(cell[0], max(cell[1], 0), seconds[cell]) for cell in sorted(cells)])


def _longest_prefill(limits: SchedulerLimits) -> int:
    return min(limits.max_batch_tokens, limits.context_tokens, 128)


def _short_prefill(limits: SchedulerLimits) -> int:
    return max(_longest_prefill(limits) // 4, 1)


def _prefill_of(num_tokens: int, start: int, page_tokens: int) -> StepPlan:
    """Returns a step that computes `num_tokens` tokens after `start` tokens of context."""
    pages = tuple(PageId(page) for page in range(pages_for(start + num_tokens, page_tokens)))
    piece = RequestSlice(RequestId("calibration"), (0,) * num_tokens, max(start, 0), pages, (), (_SAMPLE,))
    return StepPlan((piece,))


def _fastest(act: Callable[[T], None], arguments: Sequence[T]) -> dict[T, float]:
    """Calls a function once for each argument to warm up, then several times in turns.

    Returns the seconds of the fastest call for each argument. In turns, a moment in which the machine is busy slows all
    arguments, not all calls of one.
    """
    for argument in arguments:
        act(argument)
    rounds = [[_seconds(act, argument) for argument in arguments] for _ in range(_REPEATS)]
    return dict(zip(arguments, map(min, zip(*rounds, strict=True)), strict=True))


def _seconds(act: Callable[[T], object], argument: T) -> float:
    started = perf_counter()
    act(argument)
    return perf_counter() - started
