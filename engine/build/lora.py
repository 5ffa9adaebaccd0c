"""Chooses the backend that applies LoRA adapters.

The choice follows from the setting `kernels` and from the device. A backend with kernels is chosen only if its
kernels pass their self-test on this machine. Otherwise plain torch applies the adapters.
"""

import logging
import threading
from contextlib import suppress
from importlib.util import find_spec

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.packs import PackCache
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "native", "triton", "torch")
PACK_BYTES = 256 * 2**20
"""Bytes of packed copies that torch keeps of the adapters in recent batches."""


def import_kernels(config: EngineConfig, device: torch.device) -> None:
    """Imports the compiler of the CPU's kernels on another thread, if they are wanted. Call it before this thread waits for
    the model's files. `build_lora` waits for the import, and finds its error.
    """
    if device.type == "cpu" and config.kernels_for("lora") in ("auto", "native") and find_spec("numba") is not None:
        threading.Thread(target=_import_kernels, name="import-kernels", daemon=True).start()


def _import_kernels() -> None:
    with suppress(Exception):
        import graftwork.engine.lora.cpu_selftest  # noqa: F401


def build_lora(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> LoraBackend:
    """Builds the LoRA backend that the setting `kernels` names.

    `auto` takes the kernels for this device if they work, else plain torch. Raises InvalidRequest if the name is
    unknown, or if it names kernels that do not work on this machine.
    """
    wanted = config.kernels_for("lora")
    if wanted not in _CHOICES:
        raise InvalidRequest(f"kernels {wanted!r} is not known: choose one of {', '.join(_CHOICES)}.", param="kernels")
    rules = BatchInvariance.of(dtype, device)
    plain = TorchLora(PackCache(PACK_BYTES, rules.min_columns), rules)
    kernels = _kernels_of(device) if wanted == "auto" else wanted
    if kernels == "torch":
        return plain
    failure = _why_not_native(device, dtype) if kernels == "native" else _why_not_triton(device, dtype)
    if failure is None:
        return _native(model, dtype, plain) if kernels == "native" else _triton(config, model, device, dtype, plain)
    if wanted != "auto":
        raise InvalidRequest(
            f"The {kernels} LoRA kernels do not work on {device} ({failure}). Start the engine with kernels auto or torch.",
            param="kernels",
        )
    _log.warning(
        "lora_kernels_unavailable", extra={"device": str(device), "reason": failure, "loss": _COST_WITHOUT[kernels]}
    )
    return plain


def build_probe_lora(
    config: EngineConfig, model: ModelConfig, served: LoraBackend, device: torch.device, dtype: torch.dtype
) -> LoraBackend:
    """Builds a backend in which one adapter is tested, of the kind of `served`, the backend that serves on `device`.

    On a CPU, torch stands for the compiled kernel.
    """
    rules = BatchInvariance.of(dtype, device)
    plain = TorchLora(PackCache(0, rules.min_columns), rules)
    if device.type != "cuda" or isinstance(served, TorchLora):
        return plain
    from graftwork.engine.lora.triton.backend import build_triton_lora

    return build_triton_lora(model, config.max_lora_rank, dtype, device, plain, num_slots=1)


_COST_WITHOUT = {
    "native": "decoding with many adapters at a time takes up to half as long again",
    "triton": "adapters are applied by torch, one product after another",
}
"""For each kind of kernel, the loss of speed if it does not work, as text for the log."""


def _kernels_of(device: torch.device) -> str:
    return {"cpu": "native", "cuda": "triton"}.get(device.type, "torch")


def _native(model: ModelConfig, dtype: torch.dtype, plain: TorchLora) -> LoraBackend:
    from graftwork.engine.lora.cpu_backend import build_cpu_lora

    return build_cpu_lora(model, dtype, plain)


def _triton(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, plain: TorchLora
) -> LoraBackend:
    from graftwork.engine.lora.triton.backend import build_triton_lora

    return build_triton_lora(model, config.max_lora_rank, dtype, device, plain)


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the CPU kernel does not work on a device; None if it does."""
    if device.type != "cpu":
        return "they are the CPU's"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they do not compute in {dtype}"
    if find_spec("numba") is None:
        return "numba is not installed"
    from graftwork.engine.lora.cpu_selftest import why_cpu_kernel_fails

    return why_cpu_kernel_fails(dtype)


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels do not work on a device; None if they do."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.lora.triton.selftest import why_kernels_fail

    return why_kernels_fail(device, dtype)
