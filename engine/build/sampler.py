"""Chooses the sampler: on a CUDA device the one with Triton kernels, if they pass their self-test; else torch's.

The setting `kernels` may name one of them.
"""

import logging
from importlib.util import find_spec

import torch

from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.sampling.sampler import Sampler
from graftwork.engine.sampling.torch_sampler import TorchSampler
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)


def build_sampler(vocab_size: int, max_requests: int, device: torch.device, kernels: str = "auto") -> Sampler:
    """Builds the sampler for a device. `max_requests` is the most requests that one step may sample.

    If the kernels do not work, logs a warning with the reason, and takes torch's sampler. Raises InvalidRequest if
    `kernels` is `triton` and they do not work on the GPU.
    """
    masks = MaskFiller(vocab_size)
    if device.type != "cuda" or kernels == "torch":
        return TorchSampler(masks)
    failure = _why_not_kernels(device)
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


def _why_not_kernels(device: torch.device) -> str | None:
    """Returns why the sampling kernels do not work on a device; None if they do."""
    if find_spec("triton") is None:
        return "triton is not installed (the `kernels` extra)"
    from graftwork.engine.sampling.device.selftest import why_sampler_fails

    return why_sampler_fails(device)
