"""Chooses what multiplies with quantised weights on a GPU, by the setting `kernels`.

The Triton kernels, which read the codes, are chosen only if they pass their self-test on this machine for each form of
weights that the model has. Otherwise torch makes the weights dense in each step, and a warning says what that costs.
On a CPU linear.py chooses.
"""

import logging
from importlib.util import find_spec

import torch

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.weights import DecoderWeights
from graftwork.engine.quantization.linear import QuantizedLinear
from graftwork.engine.quantization.weight import Codes, QuantizedWeight
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")
_FLOAT8_CAPABILITY = (8, 9)


def choose_weight_kernels(
    config: EngineConfig, weights: DecoderWeights, device: torch.device, dtype: torch.dtype
) -> None:
    """Lets the kernels compute the quantised layers of `weights` where they are wanted and work. Call it once.

    `auto` takes them on CUDA. Raises InvalidRequest if a name is unknown, or if it names kernels that do not work on this
    machine. So does `activation_dtype` fp8, whose numbers nothing else computes.
    """
    wanted, rounds_rows = config.kernels_for("weights"), _rounds_rows(config, weights, device)
    if wanted not in _CHOICES:
        raise InvalidRequest(
            f"kernels {wanted!r} of weights is not known: choose one of {', '.join(_CHOICES)}.", param="kernels"
        )
    layers = weights.quantized_linears
    if not layers or wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        if rounds_rows:
            raise _no_rounded_rows(f"on {device} with kernels {wanted} nothing multiplies float8 with float8")
        return
    failure = _why_not_triton(layers, device, dtype, rounds_rows=rounds_rows)
    if failure is None:
        from graftwork.engine.quantization.triton.products import products_of

        for layer in layers:
            layer.take_kernels(products_of(rounds_rows=rounds_rows))
        return
    if rounds_rows:
        raise _no_rounded_rows(failure)
    if wanted == "triton":
        raise InvalidRequest(
            f"The triton kernels of quantised weights do not work on {device} ({failure}). "
            "Start the engine with kernels auto or torch.",
            param="kernels",
        )
    loss = "each step makes all weights dense, and decoding takes several times as long"
    _log.warning("weight_kernels_unavailable", extra={"device": str(device), "reason": failure, "loss": loss})


def _rounds_rows(config: EngineConfig, weights: DecoderWeights, device: torch.device) -> bool:
    """Returns whether layers with weights of FLOAT8 round their input too. Raises InvalidRequest if none can."""
    if config.activation_dtype == "auto":
        return False
    if config.activation_dtype != "fp8":
        raise InvalidRequest(
            f"activation_dtype {config.activation_dtype!r} is not served: give auto or fp8.", param="activation_dtype"
        )
    if not any(weight.kind is Codes.FLOAT8 for layer in weights.quantized_linears for weight in layer.quantized):
        raise _no_rounded_rows("the model has no weights of float8_e4m3fn")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        raise _no_rounded_rows(f"{device} has no matrix units for float8, which begin with compute capability 8.9")
    return True


def _no_rounded_rows(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"--activation-dtype fp8 is not possible here: {reason}. Leave it out.", param="activation_dtype"
    )


def _why_not_triton(
    layers: list[QuantizedLinear], device: torch.device, dtype: torch.dtype, *, rounds_rows: bool
) -> str | None:
    """Returns why the Triton kernels cannot compute some layers on a device; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.quantization.triton.selftest import why_weight_kernels_fail

    forms = {_form(weight): weight for layer in layers for weight in layer.quantized}
    failures = (why_weight_kernels_fail(one, device, dtype, rounds_rows=rounds_rows) for one in forms.values())
    return next((failure for failure in failures if failure is not None), None)


def _form(weight: QuantizedWeight) -> tuple[object, ...]:
    return weight.kind, weight.group_size, weight.zeros is None
