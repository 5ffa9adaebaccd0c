"""Loads the draft model of an engine onto the device of the served model, and allocates the memory of its KV.

It comes before the memory of the served model's KV, which takes a share of what is left.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graftwork.engine.build.devices import choose_dtype, load_weights, scheduler_limits
from graftwork.engine.build.kv import KvStorage, frame_sizer
from graftwork.engine.build.lora import build_lora
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, frame_bytes_for
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.runner.draft_model import DraftModelRunner, DraftModelSizes
from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _NoAdapters:
    """The resident adapters of a draft model: it has none."""

    def get(self, digest: str) -> ResidentAdapter:
        raise KeyError(digest)


def check_draft_model(config: EngineConfig, model: ModelConfig) -> ModelConfig | None:
    """Reads the configuration of the draft model; None without one. Needs neither its weights nor a device.

    Raises InvalidRequest if it is not supported, if it has another vocabulary than `model`, or if it cannot be used with
    other settings.
    """
    folder = config.draft_model
    if folder is None:
        return None
    if config.tensor_parallel > 1:
        raise InvalidRequest(
            "--draft-model does not work with --tensor-parallel: it runs on one device. Leave one out.",
            param="draft_model",
        )
    if not config.max_draft_tokens:
        raise InvalidRequest(
            "--draft-model drafts nothing with --max-draft-tokens 0: leave one out.", param="draft_model"
        )
    try:
        draft = read_model_config(folder)
    except InvalidRequest as error:
        raise InvalidRequest(f"The draft model {folder} is not served: {error.message}", param="draft_model") from error
    own, served = _token_ids(folder), _token_ids(config.model)
    if own is not None and served is not None:
        _refuse_other_tokens(folder, own, served)
    elif draft.vocab_size != model.vocab_size:
        raise InvalidRequest(
            f"The draft model {folder} has {draft.vocab_size} tokens and the served model {model.vocab_size}, and one of "
            "them has no tokenizer.json to compare: --draft-model takes a model with the same vocabulary.",
            param="draft_model",
        )
    return draft


def build_draft_model(
    config: EngineConfig, draft: ModelConfig | None, device: torch.device, weight_bytes: int
) -> DraftModelRunner | None:
    """Loads the draft model `draft`, and allocates its KV. `weight_bytes` are those of the served model.

    Raises InvalidRequest if it does not fit on the device.
    """
    if draft is None or config.draft_model is None:
        return None
    own = _own_config(config, device)
    dtype, limits = choose_dtype(own.dtype, draft, device), scheduler_limits(own, draft, device)
    weights = load_weights(own, draft, device, dtype)
    storage = _storage(own, draft, device, dtype)
    parts = RunnerParts(own, draft, weights, build_lora(own, draft, device, dtype), limits, dtype, lambda: None)
    sizes = DraftModelSizes(
        num_pages=storage.sizes.device_pages,
        page_tokens=storage.sizes.page_tokens,
        context_tokens=draft.context_tokens,
        max_rows=limits.max_batch_tokens,
        vocab_size=read_model_config(config.model).vocab_size,
        own_vocab_size=draft.vocab_size,
    )
    runner, relative_cost = parts.runner(storage, _NoAdapters()), weights.num_bytes / weight_bytes
    return DraftModelRunner(runner, sizes, relative_cost, weights.num_bytes, storage.device_memory.frames)


def _own_config(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Returns the settings with which the draft model runs: without tiers, quantisation and adapters of its own."""
    assert config.draft_model is not None
    return replace(
        config,
        model=config.draft_model,
        quantization=None,
        kv_dtype="auto",
        max_context_tokens=None,
        host_kv_bytes=0,
        disk_kv_bytes=0,
        lora_kernels="torch" if device.type == "cpu" else config.lora_kernels,
    )


def _storage(config: EngineConfig, draft: ModelConfig, device: torch.device, dtype: torch.dtype) -> KvStorage:
    wanted = frame_sizer(config, draft, dtype).wanted
    frame_bytes = frame_bytes_for(wanted.page_bytes)
    num_pages = config.draft_kv_bytes // frame_bytes
    if num_pages < 1:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} holds no page of the draft model: give at least {frame_bytes} bytes.",
            param="draft_kv_bytes",
        )
    try:
        memory = DeviceMemory(num_pages, wanted.page_bytes, device)
    except (MemoryError, RuntimeError) as error:
        raise InvalidRequest(
            f"--draft-kv-bytes {config.draft_kv_bytes} bytes cannot be allocated on {device}: give less.",
            param="draft_kv_bytes",
        ) from error
    cache = KvCache(draft, memory, config.page_tokens, dtype)
    host = HostMemory(0, cache.page_shape, cache.dtype)
    return KvStorage(replace(wanted, device_pages=num_pages), memory, cache, host, None)


def _token_ids(folder: Path) -> dict[str, int] | None:
    """Returns the id of each token of a model's tokenizer.json; None if there is no such file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        return _ids(content["model"]["vocab"]) | {one["content"]: one["id"] for one in content.get("added_tokens", ())}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path} holds no tokenizer ({type(error).__name__}: {error}): take the model's own file.",
            param="draft_model",
        ) from error


def _ids(vocab: Any) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    return {piece: token_id for token_id, (piece, _) in enumerate(vocab)}  # unigram: pairs of piece and score


def _refuse_other_tokens(folder: Path, own: dict[str, int], served: dict[str, int]) -> None:
    """Raises InvalidRequest if the two vocabularies differ, and names a token."""
    different = min(own.items() ^ served.items(), key=lambda pair: (pair[1], pair[0]), default=None)
    if different is not None:
        token, _ = different
        raise InvalidRequest(
            f"The draft model {folder} has another vocabulary than the served model: the token {token!r} has the id "
            f"{own.get(token, 'none')} there and {served.get(token, 'none')} here. --draft-model takes a model with the "
            "same tokenizer, usually a small one of the same family.",
            param="draft_model",
        )
