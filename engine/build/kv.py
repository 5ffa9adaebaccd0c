"""Allocates the KV memory of one engine on all tiers (device, host, disk), and builds the KV cache over it.

Owns the sizes of the tiers. Never moves a page between tiers: the KV cache does that.
"""

import hashlib
from dataclasses import dataclass

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_store import KvSizes, NoDisk
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import Report
from graftwork.engine.model.config import ModelConfig
from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class KvStorage:
    """The KV memory of one engine on all tiers: device, host and disk."""

    sizes: KvSizes
    device_memory: DeviceMemory
    cache: KvCache
    """The KV cache: a view of `device_memory` as pages."""
    host: HostMemory
    disk: DiskStore | None


_PREDECESSOR_TIMEOUT_S = 15.0
"""Seconds to wait for the lock on the KV folder. An engine whose gateway was killed ends within ten seconds, and the
next engine waits until then.
"""


def allocate_kv_storage(
    config: EngineConfig, model: ModelConfig, fingerprint: str, device: torch.device, dtype: torch.dtype
) -> KvStorage:
    """Allocates KV memory on the device and the host, and opens the disk tier.

    Raises InvalidRequest if the device memory cannot hold one full context, or if the KV folder cannot be used.
    """
    sizes = _sizes(config, model, dtype)
    device_memory = DeviceMemory(sizes.device_pages, sizes.page_bytes, device)
    cache = KvCache(model, device_memory, config.page_tokens, dtype)
    host = HostMemory(sizes.host_pages, cache.page_shape, dtype, pinned=device.type == "cuda")
    return KvStorage(sizes, device_memory, cache, host, _open_disk(config, f"{fingerprint}/{dtype}/{cache.page_shape}"))


def build_kv_cache_manager(
    config: EngineConfig, storage: KvStorage, costs: CostTracker, report: Report, clock: Clock
) -> tuple[KvCacheManager, PageCopier]:
    """Builds the KV cache manager over the allocated memory, and the PageCopier that copies pages for it on its own
    threads.
    """
    overlaps = storage.device_memory.device.type == "cuda" if config.overlap_loads is None else config.overlap_loads
    copier = PageCopier(storage.cache, storage.host, storage.disk, report, clock, overlaps_loads=overlaps)
    lower = LowerTiers(copier, costs, storage.disk or NoDisk())
    return KvCacheManager(storage.sizes, lower, clock), copier


def _open_disk(config: EngineConfig, layout: str) -> DiskStore | None:
    if not config.disk_kv_bytes:
        return None
    if config.kv_folder is None:
        raise InvalidRequest("disk_kv_bytes needs kv_folder: name the folder for KV files.", param="kv_folder")
    digest = hashlib.sha256(layout.encode()).digest()
    disk = DiskStore(config.kv_folder, config.disk_kv_bytes, digest, reserve_share=config.kv_reserve_share)
    disk.open(_PREDECESSOR_TIMEOUT_S)
    return disk


def _sizes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KvSizes:
    page_bytes = bytes_per_page(model, config.page_tokens, dtype)
    frame = frame_bytes_for(page_bytes)
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
        page_bytes=page_bytes,
        device_pages=pages,
        host_pages=config.host_kv_bytes // page_bytes,
        context_pages=needed,
        reserve_share=config.kv_reserve_share,
        lora_floor_share=config.lora_floor_share,
    )
