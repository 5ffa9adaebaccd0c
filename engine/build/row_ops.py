"""Chooses how the row operations are computed: norms, rotary embedding with the write of KV, and activations.

The choice follows from the setting `kernels` and from the device. The Triton kernels are chosen only if they pass
their trial on this machine. Otherwise plain torch computes the row operations.
"""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")


def build_row_ops(row_kernels: str, model: ModelConfig, cache: KvCache) -> RowOps:
    """Builds the row operations that the setting `kernels` names, for the device of `cache`.

    Raises InvalidRequest as `choose_row_ops` does.
    """
    rotary = RotaryTables.of(model, cache.device)
    return choose_row_ops(row_kernels, model, cache.device, cache.dtype)(model, rotary, cache)


def choose_row_ops(
    row_kernels: str, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> "type[TorchRowOps | TritonRowOps]":
    """Returns the class that computes the row operations of a model.

    `auto` takes the Triton kernels on CUDA if they work, else plain torch. Raises InvalidRequest if the name is unknown,
    or if it names kernels that do not work on this machine.
    """
    if row_kernels not in _CHOICES:
        raise InvalidRequest(
            f"kernels {row_kernels!r} of rows is not known: choose one of {', '.join(_CHOICES)}.", param="kernels"
        )
    if row_kernels == "torch" or (row_kernels == "auto" and device.type != "cuda"):
        return TorchRowOps
    failure = _why_not_triton(model, device, dtype)
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


def _why_not_triton(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels do not work for a model on a device; None if they do."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.runner.row_selftest import why_row_kernels_fail

    return why_row_kernels_fail(device, dtype, model)
