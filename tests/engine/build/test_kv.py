"""Tests of the KV memory of an engine."""

import pytest
import torch

from graftwork.engine.build.kv import allocate_kv_storage, frame_sizer
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import NoDisk, PageStore
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import SystemClock
from tests.engine.conftest import RandomModels
from tests.engine.kv.transfer.test_system_memory import clearing_threads, needs_populate, resident_mib

MIB = 2**20


@needs_populate
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_pages_that_are_taken_are_ready_before_they_are_written(models: RandomModels, tier: Tier) -> None:
    """All of 192 MiB of KV takes memory when its last page is taken, though nothing is written; before, almost nothing does."""
    config = EngineConfig(models.base, device_bytes=192 * MIB, host_kv_bytes=192 * MIB)
    model = read_model_config(models.base)
    before = clearing_threads()
    sizes = frame_sizer(config, model, torch.float32).given(192 * MIB)
    storage = allocate_kv_storage(config, model, sizes, "fingerprint", torch.device("cpu"), torch.float32)
    page_store = PageStore(sizes, lambda node, tier: (0, 0.0, node.last_used), NoDisk(), SystemClock())
    storage.clear_ahead_of(page_store)
    pool, block = page_store.pool(tier), storage.device_memory.frames if tier is Tier.DEVICE else storage.host.block

    assert resident_mib(block) <= 2  # the huge page that holds the frame of padding
    pool.allocate(pool.num_pages)

    threads = clearing_threads() - before
    assert len(threads) == 2
    while resident_mib(block) < 188:
        for thread in threads:
            thread.join(timeout=0.01)
