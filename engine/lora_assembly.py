"""Chooses how an engine applies adapters, once: by its device, its settings, and what works there."""

import logging
from importlib.util import find_spec

import torch

from graftwork.engine.config import EngineConfig
from graftwork.engine.lora_backend import LoraBackend, TorchLora
from graftwork.engine.lora_packs import PackCache
from graftwork.engine.model_config import ModelConfig
from graftwork.engine.row_rules import RowRules
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")
_PACK_BYTES = 256 * 2**20
"""Of copies side by side, which torch makes of the adapters in the last batches."""


def build_lora(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> LoraBackend:
    """The backend that `config.lora_kernels` asks for; `auto` takes the kernels on CUDA, if they work there.

    Raises InvalidRequest if there is no such choice, or the kernels are asked for by name and do not work.
    """
    wanted = config.lora_kernels
    if wanted not in _CHOICES:
        raise InvalidRequest(
            f"lora_kernels {wanted!r} is not known: choose one of {', '.join(_CHOICES)}.", param="lora_kernels"
        )
    rules = RowRules.of(dtype)
    plain = TorchLora(PackCache(_PACK_BYTES, rules.min_columns), rules)
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return plain
    failure = _why_not(device, dtype)
    if failure is None:
        from graftwork.engine.kernels.kernel_lora import build_kernel_lora

        return build_kernel_lora(model, config.max_lora_rank, dtype, device, plain)
    if wanted == "triton":
        raise InvalidRequest(
            f"The Triton LoRA kernels do not work on {device} ({failure}). Start the engine with lora_kernels torch.",
            param="lora_kernels",
        )
    _log.warning("lora_kernels_unavailable", extra={"device": str(device), "reason": failure})
    return plain


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the kernels from a device; None if nothing does."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.kernels.kernel_trial import why_kernels_fail

    return why_kernels_fail(device, dtype)
