"""Chooses what computes the experts of routed layers, by the setting `kernels`, the device and the form of the weights.

The Triton kernels are chosen only if they pass their self-test on this machine, for plain weights and for each form of codes
that the experts have. Otherwise the experts are computed one after another. Codes must be in use by kernels before (see
build/weights.py).
"""

import logging
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch

from graftwork.engine.experts.backend import ExpertBackend
from graftwork.engine.experts.expert_loop import ExpertLoop
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import RoutedWeights
from graftwork.engine.quantization.linear import DeviceProducts, QuantizedLinear
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_CHOICES = ("auto", "triton", "torch")


def choose_experts(
    kernels: str, layers: Iterable[RoutedWeights], device: torch.device, dtype: torch.dtype
) -> type[ExpertBackend]:
    """Returns what computes the experts of a model with these routed layers.

    `auto` takes the Triton kernels on CUDA if they work, else one product after another. Raises InvalidRequest if the
    name is unknown, or if it names kernels that do not work on this machine or with these weights.
    """
    if kernels not in _CHOICES:
        raise InvalidRequest(
            f"kernels {kernels!r} of experts is not known: choose one of {', '.join(_CHOICES)}.", param="kernels"
        )
    layers = list(layers)
    if not layers or kernels == "torch" or (kernels == "auto" and device.type != "cuda"):
        return ExpertLoop
    failure = _why_not_triton(layers, device, dtype)
    if failure is None:
        from graftwork.engine.experts.triton.backend import TritonExperts

        return TritonExperts
    if kernels == "triton":
        raise InvalidRequest(
            f"The triton kernels of experts do not work on {device} ({failure}). "
            "Start the engine with kernels auto or torch.",
            param="kernels",
        )
    loss = (
        "the host waits for the router in each layer, experts are computed one after another, and there are no graphs"
    )
    _log.warning("expert_kernels_unavailable", extra={"device": str(device), "reason": failure, "loss": loss})
    return ExpertLoop


def _why_not_triton(layers: Sequence[RoutedWeights], device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels cannot compute the experts of some layers on a device; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.experts.triton.products import layer_products
    from graftwork.engine.experts.triton.selftest import why_code_experts_fail, why_expert_kernels_fail

    try:
        for layer in layers:
            layer_products(layer)
    except ValueError as error:
        return str(error)
    linears = [linear for layer in layers for linear in layer.experts[0].linears]
    failure = why_expert_kernels_fail(device, dtype) if any(isinstance(one, Linear) for one in linears) else None
    quantised = [kernel for linear in linears if isinstance(linear, QuantizedLinear) for kernel in linear.kernels]
    for kernel in {_form(one): one for one in quantised}.values():
        failure = failure or why_code_experts_fail(kernel.weight, device, dtype, rounds_rows=kernel.rounds_rows)
    return failure


def _form(kernel: DeviceProducts) -> tuple[object, ...]:
    weight = kernel.weight
    return kernel.rounds_rows, weight.kind, weight.group_size, weight.zeros is None, weight.order is None
