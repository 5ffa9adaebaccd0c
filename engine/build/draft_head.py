"""Builds the draft head of an engine: its weights beside those of the served model, its pages, and the taps it reads from.

This comes before the memory of the served model's KV, which takes a share of what is left.
"""

import torch

from graftwork.engine.build.kernels import build_attention, build_row_ops, build_sampler
from graftwork.engine.build.kv import KvStorage
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.draft_head.head_config import HeadConfig, read_head_config
from graftwork.engine.draft_head.head_drafter import DraftHead, HeadSizes
from graftwork.engine.draft_head.head_layer import HeadLayer, HeadMemory, HeadParts
from graftwork.engine.draft_head.head_weights import load_head_weights
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.runner.hidden_taps import HiddenTaps
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.platform.errors import InvalidRequest

_PASS_STEPS = 4
"""A pass reads the prompt tokens of so many steps, so that a long prompt delays no guess. A head has one layer."""


def check_draft_head(config: EngineConfig, model: ModelConfig) -> HeadConfig | None:
    """Reads the configuration of the draft head; None without one. Needs neither its weights nor a device.

    Raises InvalidRequest if it is not served, belongs to another model than `model`, or cannot be used with other settings.
    """
    if config.draft_head is None:
        return None
    problems = {
        "--draft-model: one of the two guesses": config.draft_model is not None,
        "--tensor-parallel: it runs on one device": config.tensor_parallel > 1,
        "--max-draft-tokens 0, with which nothing is guessed": not config.max_draft_tokens,
    }
    for problem, applies in problems.items():
        if applies:
            raise InvalidRequest(f"--draft-head does not work with {problem}. Leave one out.", param="draft_head")
    return read_head_config(config.draft_head, model)


def build_draft_head(config: EngineConfig, head: HeadConfig | None, parts: RunnerParts) -> DraftHead | None:
    """Loads the draft head `head`, and allocates its pages. `parts` has the served model's weights.

    Raises InvalidRequest if its files are wrong, or if it does not fit on the device.
    """
    if head is None or config.draft_head is None:
        return None
    embedding, dtype = parts.weights.embedding, parts.dtype
    device, layer = embedding.device, head.layer
    weights = load_head_weights(config.draft_head, head, embedding, device, dtype)
    storage = _storage(config, layer, parts.limits.page_tokens, device, dtype)
    builder = BatchBuilder(
        storage.sizes.page_tokens,
        storage.device_memory.null_frame,
        device,
        BatchInvariance.of(dtype, device),
        usual_sizes=weights.qkv.is_packed,
    )
    computing = HeadParts(
        build_row_ops(config.kernels_for("rows"), layer, storage.cache),
        build_attention(config, layer, storage, dtype),
        builder,
    )
    memory = HeadMemory(storage.device_memory, storage.cache, storage.sizes.page_tokens, layer.hidden_size)
    sizes = HeadSizes(
        num_pages=storage.sizes.device_pages,
        page_tokens=storage.sizes.page_tokens,
        context_tokens=layer.context_tokens,
        max_rows=_PASS_STEPS * parts.limits.max_batch_tokens,
        vocab_size=parts.model.vocab_size,
    )
    return DraftHead(
        HeadLayer(weights, computing, memory, parts.model.vocab_size),
        builder,
        build_sampler(parts.model.vocab_size, parts.limits.max_running, device, config.kernels_for("sampler")),
        sizes,
        weights.num_bytes / parts.weights.num_bytes,
        weights.num_bytes,
        storage.device_memory.frames,
        HiddenTaps(head.after_layers, head.target_hidden_size, parts.limits.max_batch_tokens, device, dtype),
    )


def _storage(
    config: EngineConfig, layer: ModelConfig, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> KvStorage:
    """Allocates the pages of a head: keys, values and features of `page_tokens` tokens each."""
    kv_bytes = bytes_per_page(layer, page_tokens, dtype)
    page_bytes = kv_bytes + page_tokens * layer.hidden_size * dtype.itemsize
    num_pages = config.draft_kv_bytes // frame_bytes_for(page_bytes)
    if num_pages < 1:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} holds no page of the draft head: give at least "
            f"{frame_bytes_for(page_bytes)} bytes.",
            param="draft_kv_bytes",
        )
    try:
        memory = DeviceMemory(num_pages, page_bytes, device)
    except (MemoryError, RuntimeError) as error:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} bytes cannot be allocated on {device}: give less.",
            param="draft_kv_bytes",
        ) from error
    cache = KvCache(layer, memory, page_tokens, dtype)
    sizes = KvSizes(
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        device_pages=num_pages,
        host_pages=0,
        context_pages=pages_for(layer.context_tokens, page_tokens),
        reserve_share=config.kv_reserve_share,
        lora_floor_share=config.lora_floor_share,
    )
    return KvStorage(sizes, memory, cache, HostMemory(0, cache.page_shape, cache.dtype), None)
