"""Chooses what computes attention, the row operations (norms, rotary embedding with the write of KV, activations) and the
sampling of a step.

The choice follows from the setting `kernels` and from the device. Triton kernels are chosen only if they pass their
self-test on this machine. Otherwise torch computes that part, and a warning says what it costs.
"""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from graftwork.engine.attention.backend import AttentionBackend
from graftwork.engine.attention.key_groups import KeyGrouper
from graftwork.engine.attention.rolling_attention import RollingAttention, RollingRows
from graftwork.engine.attention.torch_attention import Sinks, TorchAttention, scores_need_fp32
from graftwork.engine.build.kv import KvStorage
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.engine.sampling.sampler import Sampler
from graftwork.engine.sampling.torch_sampler import TorchSampler
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")
_NO_TRITON = "triton is not installed (the `kernels` extra)"
_COST_OF_TORCH = "attention copies all pages that it reads, and decoding takes several times as long"


def build_attention(
    config: EngineConfig, model: ModelConfig, storage: KvStorage, dtype: torch.dtype, sinks: Sinks = None
) -> AttentionBackend:
    """Builds the attention backend that the setting `kernels` names. `sinks` are those of the model's layers.

    `auto` takes Triton on CUDA if its kernels work there, else torch. Raises InvalidRequest if the name is unknown, or
    if it names kernels that do not work on this machine.
    """
    wanted = config.kernels_for("attention")
    device = storage.device_memory.device
    _check_known(wanted, "attention")
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return _torch_attention(model, storage, dtype, sinks)
    failure = _why_not_attention(model, storage, dtype)
    if failure is None:
        from graftwork.engine.attention.triton_attention import TritonAttention

        rolling_failure = None
        if model.recurrence is None:  # others serve no windows
            rolling_failure = _why_not_attention(model, storage, dtype, rolling=True)
        if rolling_failure is not None:
            loss = "torch computes the attention of requests with an attention window, one by one"
            _log.warning(
                "window_kernels_unavailable", extra={"device": str(device), "reason": rolling_failure, "loss": loss}
            )
        return TritonAttention(model, storage.cache, dtype, sinks, serves_rolling=rolling_failure is None)
    if wanted == "triton":
        raise InvalidRequest(
            f"The Triton attention kernels do not work on {device} ({failure}). "
            "Start the engine with kernels auto or torch.",
            param="kernels",
        )
    _log.warning(
        "attention_kernels_unavailable",
        extra={"device": str(device), "reason": failure, "loss": _COST_OF_TORCH},
    )
    return _torch_attention(model, storage, dtype, sinks)


def _torch_attention(model: ModelConfig, storage: KvStorage, dtype: torch.dtype, sinks: Sinks) -> AttentionBackend:
    memory = storage.device_memory
    rules = BatchInvariance.of(torch.float32 if scores_need_fp32(model) else dtype, memory.device)
    num_groups = len(storage.cache.groups.groups)
    grouper = KeyGrouper(storage.sizes.page_tokens, memory.null_frame, memory.device, rules, num_groups)
    others = TorchAttention(model, storage.cache, grouper, sinks)
    return RollingAttention(rolling_rows(model, storage, sinks), others)


def rolling_rows(model: ModelConfig, storage: KvStorage, sinks: Sinks = None) -> RollingRows:
    """Returns what computes the rows of requests with a rolling window beside a backend that leaves them out."""
    return RollingRows(model, storage.cache, storage.sizes.page_tokens, sinks)


def _why_not_attention(
    model: ModelConfig, storage: KvStorage, dtype: torch.dtype, *, rolling: bool = False
) -> str | None:
    """Returns why the Triton kernels do not work on a device over pages as `storage` has them, those for rolling windows with
    `rolling`; None if they do.
    """
    if find_spec("triton") is None:
        return _NO_TRITON
    from graftwork.engine.attention.selftest import why_attention_fails

    device, kv_dtype = storage.device_memory.device, storage.cache.format.name or "auto"
    return why_attention_fails(model, storage.sizes.page_tokens, device, dtype, kv_dtype=kv_dtype, rolling=rolling)


def _check_known(wanted: str, part: str) -> None:
    if wanted not in _CHOICES:
        choices = ", ".join(_CHOICES)
        raise InvalidRequest(f"kernels {wanted!r} of {part} is not known: choose one of {choices}.", param="kernels")


def build_row_ops(row_kernels: str, model: ModelConfig, cache: KvCache) -> RowOps:
    """Builds the row operations that the setting `kernels` names, for the device of `cache`.

    Raises InvalidRequest as `choose_row_ops` does.
    """
    rotary = RotaryTables.of(model, cache.device)
    form = cache.format
    return choose_row_ops(row_kernels, model, cache.device, form.model_dtype, form.name or "auto")(model, rotary, cache)


def choose_row_ops(
    row_kernels: str, model: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: str = "auto"
) -> "type[TorchRowOps | TritonRowOps]":
    """Returns the class that computes the row operations of a model. `kv_dtype` is that of EngineConfig.

    `auto` takes the Triton kernels on CUDA if they work, else plain torch. Raises InvalidRequest if the name is unknown,
    or if it names kernels that do not work on this machine.
    """
    _check_known(row_kernels, "rows")
    if row_kernels == "torch" or (row_kernels == "auto" and device.type != "cuda"):
        return TorchRowOps
    failure = _why_not_rows(model, device, dtype, kv_dtype)
    if failure is None:
        from graftwork.engine.runner.triton_row_ops import TritonRowOps

        return TritonRowOps
    if row_kernels == "triton":
        raise InvalidRequest(
            f"The triton row kernels do not work on {device} ({failure}). Start the engine with kernels auto or torch.",
            param="kernels",
        )
    loss = "each layer launches many more kernels, and short steps take longer"
    _log.warning("row_kernels_unavailable", extra={"device": str(device), "reason": failure, "loss": loss})
    return TorchRowOps


def _why_not_rows(model: ModelConfig, device: torch.device, dtype: torch.dtype, kv_dtype: str) -> str | None:
    """Returns why the Triton kernels do not work for a model on a device; None if they do."""
    if find_spec("triton") is None:
        return _NO_TRITON
    from graftwork.engine.runner.row_selftest import why_row_kernels_fail

    return why_row_kernels_fail(device, dtype, model, kv_dtype)


def build_sampler(vocab_size: int, max_requests: int, device: torch.device, kernels: str = "auto") -> Sampler:
    """Builds the sampler for a device. `max_requests` is the most requests that one step may sample.

    If the kernels do not work, logs a warning with the reason, and takes torch's sampler. Raises InvalidRequest if
    `kernels` is `triton` and they do not work on the GPU.
    """
    masks = MaskFiller(vocab_size)
    if device.type != "cuda" or kernels == "torch":
        return TorchSampler(masks)
    failure = _why_not_sampler(device)
    if failure is None:
        from graftwork.engine.sampling.device.device_sampler import DeviceSampler

        return DeviceSampler(masks, vocab_size, max_requests, device)
    if kernels == "triton":
        raise InvalidRequest(
            f"The Triton sampling kernels do not work on {device} ({failure}). "
            "Start the engine with kernels auto or torch.",
            param="kernels",
        )
    loss = "each step waits for the device several times while it samples"
    _log.warning("sampler_kernels_unavailable", extra={"device": str(device), "reason": failure, "loss": loss})
    return TorchSampler(masks)


def _why_not_sampler(device: torch.device) -> str | None:
    """Returns why the sampling kernels do not work on a device; None if they do."""
    if find_spec("triton") is None:
        return _NO_TRITON
    from graftwork.engine.sampling.device.selftest import why_sampler_fails

    return why_sampler_fails(device)
