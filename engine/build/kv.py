"""Allocates the KV memory of one engine on all tiers (device, host, disk), and builds the KV cache that uses it.

Owns the sizes of the tiers. Never moves a page between tiers: the KV cache does that.
"""

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from graftwork.engine.build.device_sizes import FrameSizer
from graftwork.engine.build.graphs import wants_cuda_graphs
from graftwork.engine.build.limits import page_tokens_of, step_tokens_of
from graftwork.engine.build.phases import StartPhases
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.disk.file_format import file_bytes
from graftwork.engine.kv.disk.shared import LIST_EVERY_S, TierStore, open_bucket, take_slot
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.page_windows import PageWindows, frames_for
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.kv_format import kv_format, scope_suffix
from graftwork.engine.kv.transfer.layer_groups import LayerGroups, layer_groups, one_group
from graftwork.engine.kv.transfer.plan import Report
from graftwork.engine.kv.transfer.system_memory import CudaRegistry
from graftwork.engine.lora.resident_adapter import RANK_PAGE
from graftwork.engine.model.config import ModelConfig
from graftwork.platform.clock import Clock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.outbound.buckets import check_bucket_url


@dataclass(frozen=True, slots=True)
class KvStorage:
    """The KV memory of one engine on all tiers: device, host and disk."""

    sizes: KvSizes
    device_memory: DeviceMemory
    cache: KvCache
    """The KV cache: a view of `device_memory` as pages."""
    host: HostMemory
    disk: TierStore | None

    def clear_ahead_of(self, page_store: PageStore) -> None:
        """Lets the memory of the device and the host know which pages are taken, so that the next ones are ready in time."""
        page_store.device.on_taken = self.device_memory.used_up_to
        page_store.host.on_taken = self.host.used_up_to


_CPU = torch.device("cpu")
_CPU_DEVICE_BYTES = 768 * 2**20
"""Bytes of KV and adapters on a CPU, if the configuration names none."""

_PREDECESSOR_TIMEOUT_S = 15.0
"""Seconds to wait for the lock on the KV folder. An engine whose gateway was killed ends within ten seconds, and the
next engine waits until then.
"""


def groups_of(config: EngineConfig, model: ModelConfig) -> LayerGroups:
    """Returns which layers share pages: one group, unless some layers keep only a window."""
    if config.tensor_parallel > 1 or not config.window_groups:
        return one_group(model)
    return layer_groups(model)


def windows_of(config: EngineConfig, model: ModelConfig, device: torch.device) -> PageWindows | None:
    """Returns what the windowed layer groups keep; None if all layers are one group."""
    groups = groups_of(config, model)
    if groups.window is None:
        return None
    step_tokens = step_tokens_of(config, device)
    return PageWindows(groups.window, groups.num_windowed, page_tokens_of(config, model), step_tokens)


def frame_sizer(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device = _CPU
) -> FrameSizer:
    """Returns the object that decides the number of frames. A frame is device memory of the size of one KV page.

    The device decides the largest step, if the configuration does not.
    """
    page_tokens, windows = page_tokens_of(config, model), windows_of(config, model, device)
    groups = groups_of(config, model)
    page_bytes = bytes_per_page(model, page_tokens, dtype, kv_format(config.kv_dtype, dtype), groups)
    sizes = KvSizes(
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        device_pages=0,
        host_pages=config.host_kv_bytes // page_bytes,
        context_pages=frames_for(model.context_tokens, page_tokens, windows),
        windows=windows,
        step_tokens=step_tokens_of(config, device),
        layer_window=max((window for window in model.windows if window is not None), default=0),
        reserve_share=config.kv_reserve_share,
        lora_floor_share=config.lora_floor_share,
    )
    smallest = RANK_PAGE * min(map(sum, model.target_shapes.values())) * dtype.itemsize
    return FrameSizer(sizes, model.context_tokens, smallest)


def check_sizes(config: EngineConfig, sizer: FrameSizer, device: torch.device) -> None:
    """Raises InvalidRequest if a size of the configuration can never serve. Needs neither weights nor device memory."""
    given = device_bytes_of(config, device)
    if given is not None:
        sizer.given(given)
    if not 0 < config.memory_share <= 1:
        raise InvalidRequest(
            f"--memory-share {config.memory_share} is no share of memory: give a number above 0 and at most 1.",
            param="memory_share",
        )
    _check_adapters(config, sizer)
    _check_lower_tiers(config, sizer.wanted)
    _check_shared_folder(config)
    _check_bucket(config)
    _check_memory(config, device)


def device_bytes_of(config: EngineConfig, device: torch.device) -> int | None:
    """Returns the bytes of KV and adapters that the configuration names; None if the device decides."""
    if config.device_bytes is not None or device.type == "cuda":
        return config.device_bytes
    return _CPU_DEVICE_BYTES


def allocate_kv_storage(
    config: EngineConfig,
    model: ModelConfig,
    sizes: KvSizes,
    content: str,
    device: torch.device,
    dtype: torch.dtype,
    phases: StartPhases | None = None,
) -> KvStorage:
    """Allocates KV memory of these sizes on the device and the host, and opens the disk tier.

    `content` names what computes the KV: the model's fingerprint, and which part of the model. Files of KV with another
    content are not read.

    Raises InvalidRequest if a size is too large for this machine, or if the KV folder cannot be used.
    """
    with _allocating("--device-bytes", sizes.device_pages * frame_bytes_for(sizes.page_bytes), f"on {device}"):
        device_memory = DeviceMemory(sizes.device_pages, sizes.page_bytes, device)
    form = kv_format(config.kv_dtype, dtype)
    cache = KvCache(model, device_memory, sizes.page_tokens, dtype, form, groups_of(config, model))
    with _allocating("--host-kv-bytes", config.host_kv_bytes, "on the host"):
        registry = CudaRegistry() if device.type == "cuda" else None
        host = HostMemory(sizes.host_pages, cache.page_shape, cache.dtype, registry)
    with nullcontext() if phases is None else phases.phase("disk_scan"):
        groups = f"/groups {cache.groups.groups}" if cache.groups.num_windowed else ""
        disk = _open_disk(config, f"{content}/{dtype}/{cache.page_shape}{scope_suffix(form)}{groups}")
    return KvStorage(sizes, device_memory, cache, host, disk)


def build_page_copier(config: EngineConfig, storage: KvStorage, report: Report, clock: Clock) -> PageCopier:
    """Builds the PageCopier that copies pages between the tiers of `storage`, on its own threads."""
    overlaps = overlaps_loads(config, storage.device_memory.device)
    return PageCopier(storage.cache, storage.host, storage.disk, report, clock, overlaps_loads=overlaps)


def overlaps_loads(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether a step starts while its KV is still loaded from the host."""
    if config.overlap_loads is not None:
        return config.overlap_loads
    return device.type == "cuda" and not wants_cuda_graphs(config, device)


def _open_disk(config: EngineConfig, layout: str) -> TierStore | None:
    if not config.disk_kv_bytes:
        return None
    digest = hashlib.sha256(layout.encode()).digest()
    if config.shared_kv_folder is not None:
        shared = take_slot(config.shared_kv_folder, config.disk_kv_bytes, digest, config.kv_reserve_share)
        shared.start()
        return shared
    if config.kv_folder is None:
        raise InvalidRequest("disk_kv_bytes needs kv_folder: name the folder for KV files.", param="kv_folder")
    disk = DiskStore(config.kv_folder, config.disk_kv_bytes, digest, reserve_share=config.kv_reserve_share)
    disk.open(_PREDECESSOR_TIMEOUT_S)
    if config.kv_object_url is None:
        return disk
    with_bucket = open_bucket(disk, config.kv_object_url, config.kv_object_bytes, digest)
    with_bucket.start(LIST_EVERY_S, waits=False)
    return with_bucket


def _check_adapters(config: EngineConfig, sizer: FrameSizer) -> None:
    """Raises InvalidRequest if `lora_pool_bytes` leaves no room for even the smallest adapter."""
    if config.lora_pool_bytes is not None and config.lora_pool_bytes < sizer.adapter_bytes:
        raise InvalidRequest(
            f"lora_pool_bytes {config.lora_pool_bytes} holds no adapter: the smallest takes {sizer.adapter_bytes} bytes. "
            "Give more, or leave it out.",
            param="lora_pool_bytes",
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


def _check_shared_folder(config: EngineConfig) -> None:
    """Raises InvalidRequest if KV files are to be shared and cannot be."""
    if config.shared_kv_folder is None:
        return
    if config.tensor_parallel > 1:
        raise InvalidRequest(
            "--shared-kv-dir does not work with --tensor-parallel: each rank keeps a part of each page. Leave one out.",
            param="shared_kv_dir",
        )
    if not config.disk_kv_bytes:
        raise InvalidRequest(
            "--shared-kv-dir needs a disk tier: give --disk-kv-bytes above 0, or leave it out.", param="shared_kv_dir"
        )


def _check_bucket(config: EngineConfig) -> None:
    """Raises InvalidRequest if KV files are to be in a bucket and cannot be."""
    if config.kv_object_url is None:
        return
    check_bucket_url(config.kv_object_url, "kv_object_url")
    reasons = {
        "--tensor-parallel: each rank keeps a part of each page": config.tensor_parallel > 1,
        "--shared-kv-dir: engines read each other's pages there already": config.shared_kv_folder is not None,
        "--disk-kv-bytes 0: files reach the bucket through the disk": not config.disk_kv_bytes,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidRequest(f"--kv-object-url does not work with {reason}. Leave one out.", param="kv_object_url")


def _check_memory(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidRequest if the host's budgets are above the memory of this machine."""
    given = config.host_kv_bytes + (device_bytes_of(config, device) or 0 if device.type == "cpu" else 0)
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
    except (MemoryError, OSError, RuntimeError) as error:
        raise InvalidRequest(
            f"{flag} {num_bytes} bytes cannot be allocated {where}: give less.", param=flag[2:].replace("-", "_")
        ) from error
