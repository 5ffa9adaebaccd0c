"""Lays out the memory of one engine: the device's frames, the host's pages, and the folder of those on disk."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar
import torch
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.core.step import SequenceSlice, StepPlan, StepResult
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.kv.index.cost_model import (
    LoadCost,
    PrefillCost,
    PrefillSample,
    TransferCost,
    TransferSample,
    fit_prefill,
    fit_transfer,
)
from graftwork.engine.core.prefix_keys import child_key, root_key
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.page_store import KvSizes
from graftwork.platform.ids import RequestId
import hashlib
import torch
from graftwork.engine.kv.transfer.device_memory import KvCache, bytes_per_page
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.index.page_store import KvSizes
from graftwork.engine.kv.index.page_store import NoDisk
from graftwork.engine.kv.transfer.plan import Report
from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest

@dataclass(frozen=True, slots=True)
class KvStorage:
    """Where the KV of one engine lies."""

    sizes: KvSizes
    device_memory: DeviceMemory
    cache: KvCache
    """A view of it."""
    host: HostMemory
    files: DiskStore | None


_PREDECESSOR_GOES_WITHIN_S = 15.0
"""An engine whose gateway was killed ends by itself within ten seconds; the next one waits for its folder, not fails."""


def allocate_kv_storage(
    config: EngineConfig, model: ModelConfig, fingerprint: str, device: torch.device, dtype: torch.dtype
) -> KvStorage:
    """Raises InvalidRequest if the sizes cannot hold one context, or the folder cannot be used."""
    sizes = _sizes(config, model, dtype)
    device_memory = DeviceMemory(sizes.device_pages, sizes.page_bytes, device)
    cache = KvCache(model, device_memory, config.page_tokens, dtype)
    host = HostMemory(sizes.host_pages, cache.page_shape, dtype, pinned=device.type == "cuda")
    return KvStorage(sizes, device_memory, cache, host, _open_files(config, f"{fingerprint}/{dtype}/{cache.page_shape}"))


def build_kv_cache_manager(
    config: EngineConfig, store: KvStorage, costs: CostTracker, report: Report, clock: Clock
) -> tuple[KvCacheManager, PageCopier]:
    """The memory over a store, and the threads that copy for it."""
    overlaps = store.device_memory.device.type == "cuda" if config.overlap_loads is None else config.overlap_loads
    copier = PageCopier(store.cache, store.host, store.files, report, clock, overlaps_loads=overlaps)
    lower = LowerTiers(copier, costs, store.files or NoDisk())
    return KvCacheManager(store.sizes, lower, clock), copier


def _open_files(config: EngineConfig, layout: str) -> DiskStore | None:
    if not config.disk_kv_bytes:
        return None
    if config.kv_folder is None:
        raise InvalidRequest("disk_kv_bytes needs kv_folder: name the folder for KV files.", param="kv_folder")
    digest = hashlib.sha256(layout.encode()).digest()
    files = DiskStore(config.kv_folder, config.disk_kv_bytes, digest, reserve_share=config.kv_reserve_share)
    files.open(_PREDECESSOR_GOES_WITHIN_S)
    return files


def _sizes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KvSizes:
    each = bytes_per_page(model, config.page_tokens, dtype)
    frame = frame_bytes_for(each)
    pages = config.device_bytes // frame
    needed = pages_for(model.context_tokens, config.page_tokens)
    if pages < needed:
        raise InvalidRequest(
            f"--device-bytes {config.device_bytes} holds {pages} pages; one context of {model.context_tokens} "
            f"tokens needs {needed}. Give at least {needed * frame} bytes.",
            param="device_bytes",
        )
    return KvSizes(
        page_tokens=config.page_tokens,
        page_bytes=each,
        device_pages=pages,
        host_pages=config.host_kv_bytes // each,
        context_pages=needed,
        reserve_share=config.kv_reserve_share,
        lora_floor_share=config.lora_floor_share,
    )
