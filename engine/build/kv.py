"""Allocates the KV memory of one engine on all tiers (device, host, disk), and builds the KV cache that uses it.

Owns the sizes of the tiers. Never moves a page between tiers: the KV cache does that.
"""

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.kv.index.page_store import KvSizes, NoDisk
from graftwork.engine.kv.manager import KvCacheManager, LowerTiers
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import Report
from graftwork.engine.lora.resident_adapter import RANK_PAGE
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

    Raises InvalidRequest if a size is too large for this machine, or if the KV folder cannot be used. Raises
    InvalidRequest if a size is too small: the device must hold one full context and one adapter, and each other tier
    one page.
    """
    sizes = _sizes(config, model, dtype)
    _check_room_for_adapters(config, model, sizes, dtype)
    _check_lower_tiers(config, sizes)
    _check_memory(config, device)
    with _allocating("--device-bytes", config.device_bytes, f"on {device}"):
        device_memory = DeviceMemory(sizes.device_pages, sizes.page_bytes, device)
    cache = KvCache(model, device_memory, config.page_tokens, dtype)
    with _allocating("--host-kv-bytes", config.host_kv_bytes, "on the host"):
        host = HostMemory(sizes.host_pages, cache.page_shape, dtype, pinned=device.type == "cuda")
    return KvStorage(sizes, device_memory, cache, host, _open_disk(config, f"{fingerprint}/{dtype}/{cache.page_shape}"))


def build_kv_cache_manager(
    config: EngineConfig, storage: KvStorage, costs: CostTracker, report: Report, clock: Clock
) -> tuple[KvCacheManager, PageCopier]:
    """Builds the manager of the KV cache, and the PageCopier that copies pages for it on its own threads.

    Both use the memory of `storage`.
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


def _check_room_for_adapters(config: EngineConfig, model: ModelConfig, sizes: KvSizes, dtype: torch.dtype) -> None:
    """Raises InvalidRequest if the device has no room for even the smallest adapter beside KV."""
    smallest = RANK_PAGE * min(map(sum, model.target_shapes.values())) * dtype.itemsize
    if config.lora_pool_bytes is not None and config.lora_pool_bytes < smallest:
        raise InvalidRequest(
            f"lora_pool_bytes {config.lora_pool_bytes} holds no adapter: the smallest takes {smallest} bytes. "
            "Give more, or leave it out.",
            param="lora_pool_bytes",
        )
    frame = frame_bytes_for(sizes.page_bytes)
    frames = -(-smallest // frame)
    if sizes.max_lora_pages < frames:
        raise InvalidRequest(
            f"--device-bytes {config.device_bytes} leaves adapters {sizes.max_lora_pages * frame} bytes beside KV; the "
            f"smallest adapter takes {frames * frame}. Give at least {sizes.device_pages_for(frames) * frame} bytes.",
            param="device_bytes",
        )


def _check_lower_tiers(config: EngineConfig, sizes: KvSizes) -> None:
    """Raises InvalidRequest for a tier that is switched on and cannot hold one page."""
    least_by_setting = {"host_kv_bytes": sizes.page_bytes, "disk_kv_bytes": file_bytes(1, sizes.page_bytes)}
    for setting, least in least_by_setting.items():
        given = getattr(config, setting)
        if 0 < given < least:
            flag = f"--{setting.replace('_', '-')}"
            raise InvalidRequest(
                f"{flag} {given} holds no page: give at least {least} bytes, or 0 for none.", param=setting
            )


def _check_memory(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidRequest if the host's budgets are above the memory of this machine."""
    given = config.host_kv_bytes + (config.device_bytes if device.type == "cpu" else 0)
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if given > present:
        flags = "--host-kv-bytes" if device.type != "cpu" else "--device-bytes and --host-kv-bytes together"
        raise InvalidRequest(
            f"{flags} are {given} bytes, and this machine has {present} bytes of memory: give less.",
            param="host_kv_bytes" if device.type != "cpu" else "device_bytes",
        )


@contextmanager
def _allocating(flag: str, num_bytes: int, where: str) -> Generator[None]:
    """Turns torch's errors of a failed allocation into InvalidRequest."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise InvalidRequest(
            f"{flag} {num_bytes} bytes cannot be allocated {where}: give less.", param=flag[2:].replace("-", "_")
        ) from error
