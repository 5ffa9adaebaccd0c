"""Chooses the backend that computes attention.

The choice follows from the setting `kernels` and from the device. The Triton kernels are chosen only if they
pass their self-test on this machine. Otherwise torch computes attention.
"""

import logging
from importlib.util import find_spec

import torch

from graftwork.engine.attention.backend import AttentionBackend
from graftwork.engine.attention.key_groups import KeyGrouper
from graftwork.engine.attention.rolling_attention import RollingAttention, RollingRows
from graftwork.engine.attention.torch_attention import Sinks, TorchAttention, scores_need_fp32
from graftwork.engine.build.kv import KvStorage
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")
_COST_WITHOUT_TRITON = "attention copies all pages that it reads, and decoding takes several times as long"


def build_attention(
    config: EngineConfig, model: ModelConfig, storage: KvStorage, dtype: torch.dtype, sinks: Sinks = None
) -> AttentionBackend:
    """Builds the attention backend that the setting `kernels` names. `sinks` are those of the model's layers.

    `auto` takes Triton on CUDA if its kernels work there, else torch. Raises InvalidRequest if the name is unknown, or
    if it names kernels that do not work on this machine.
    """
    wanted = config.kernels_for("attention")
    device = storage.device_memory.device
    if wanted not in _CHOICES:
        raise InvalidRequest(
            f"kernels {wanted!r} of attention is not known: choose one of {', '.join(_CHOICES)}.", param="kernels"
        )
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return _torch(model, storage, dtype, sinks)
    failure = _why_not_triton(model, storage.sizes.page_tokens, device, dtype)
    if failure is None:
        from graftwork.engine.attention.triton_attention import TritonAttention

        return TritonAttention(model, storage.cache, dtype, sinks)
    if wanted == "triton":
        raise InvalidRequest(
            f"The Triton attention kernels do not work on {device} ({failure}). "
            "Start the engine with kernels auto or torch.",
            param="kernels",
        )
    _log.warning(
        "attention_kernels_unavailable",
        extra={"device": str(device), "reason": failure, "loss": _COST_WITHOUT_TRITON},
    )
    return _torch(model, storage, dtype, sinks)


def _torch(model: ModelConfig, storage: KvStorage, dtype: torch.dtype, sinks: Sinks) -> AttentionBackend:
    memory = storage.device_memory
    rules = BatchInvariance.of(torch.float32 if scores_need_fp32(model) else dtype, memory.device)
    num_groups = len(storage.cache.groups.groups)
    grouper = KeyGrouper(storage.sizes.page_tokens, memory.null_frame, memory.device, rules, num_groups)
    others = TorchAttention(model, storage.cache, grouper, sinks)
    return RollingAttention(rolling_rows(model, storage, sinks), others)


def rolling_rows(model: ModelConfig, storage: KvStorage, sinks: Sinks = None) -> RollingRows:
    """Returns what computes the rows of requests with a rolling window."""
    return RollingRows(model, storage.cache, storage.sizes.page_tokens, sinks)


def _why_not_triton(model: ModelConfig, page_tokens: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels do not work on a device; None if they do."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.attention.selftest import why_attention_fails

    return why_attention_fails(model, page_tokens, device, dtype)
