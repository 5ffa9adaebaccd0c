# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Adds the output of a sublayer to the hidden states and computes the norm of the sum, in one launch.

    hidden = hidden + scale * norm(delta, post_weight)         norm and scale only if the model has them
    normed = norm(hidden, weight)                              hidden / rms(hidden) * weight, or another kind

One program computes one row (token) and keeps it in registers, so a row is read once and its bits do not depend on
other rows. It rounds to the dtype after each of these operations, as torch does. The sum `hidden` has the same bits as
torch's, if delta is not normalised. The norm has not always: squares are summed in another order, so the root mean
square may differ in its last bits. After rounding to 16 bits few values differ: less than one fp16 value in a thousand
under Triton's interpreter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.blocks import normalised, rounded
from graftwork.engine.kernels.launch import Launch


@dataclass(frozen=True, slots=True)
class NormRules:
    """What norms and sums of a model have in common."""

    epsilon: float
    kind: str = "rms"
    """A NormKind: "rms", "rms_rounded_once" or "layer"."""
    scale: float = 1.0
    """The factor of `delta`."""


@triton.jit
def add_norm_kernel(
    hidden,
    delta,
    post_weight,
    weight,
    normed,
    hidden_stride,
    delta_stride,
    normed_stride,
    epsilon,
    scale,
    HAS_DELTA: tl.constexpr,
    HAS_POST_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one row of hidden + delta (in place, unless HAS_DELTA is False) and its norm (unless HAS_NORM is False)."""
    dtype = normed.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < FEATURES
    x = tl.load(hidden + row * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        change = tl.load(delta + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_POST_NORM:
            post = tl.load(post_weight + columns, mask=mask, other=0.0).to(tl.float32)
            change = normalised(change, post, mask, epsilon, KIND, FEATURES, dtype)
        if HAS_SCALE:
            change = rounded(change * scale, dtype)
        x += change
        total = x.to(dtype)
        tl.store(hidden + row * hidden_stride + columns, total, mask=mask)
        x = total.to(tl.float32)
    if HAS_NORM:
        own = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        y = normalised(x, own, mask, epsilon, KIND, FEATURES, dtype)
        tl.store(normed + row * normed_stride + columns, y.to(dtype), mask=mask)


def norm_launch(x: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, rules: NormRules) -> Launch:
    """Returns the launch that writes the norm of x to `normed`, which may be x itself.

    x, normed: [num_rows, features] with any stride between rows, of one dtype; weight: [features]. Raises ValueError if
    the features of a row are not adjacent in memory.
    """
    return _launch(x, None, (None, weight), normed, rules)


def add_norm_launch(
    hidden: torch.Tensor,
    delta: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    normed: torch.Tensor | None,
    rules: NormRules,
) -> Launch:
    """Returns the launch that adds `delta` to `hidden`, in place, and writes the norm of the sum to `normed`.

    hidden, delta, normed: [num_rows, features] with any stride between rows, of one dtype. `weights` are those of the
    norm of delta and of the norm of the sum, each [features], or None for no such norm. `normed` is None if the sum is
    not normalised. Raises ValueError if the features of a row are not adjacent in memory.
    """
    return _launch(hidden, delta, weights, normed, rules)


def _launch(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    normed: torch.Tensor | None,
    rules: NormRules,
) -> Launch:
    features = hidden.shape[1]
    if any(part.stride(1) != 1 for part in (hidden, delta, normed) if part is not None):
        raise ValueError("the features of a row must be adjacent in memory")
    block = triton.next_power_of_2(features)
    post_weight, weight = weights
    change, target = hidden if delta is None else delta, hidden if normed is None else normed
    arguments: dict[str, Any] = {
        "hidden": hidden,
        "delta": change,
        "post_weight": hidden if post_weight is None else post_weight,
        "weight": hidden if weight is None else weight,
        "normed": target,
        "hidden_stride": hidden.stride(0),
        "delta_stride": change.stride(0),
        "normed_stride": target.stride(0),
        "epsilon": rules.epsilon,
        "scale": rules.scale,
        "HAS_DELTA": delta is not None,
        "HAS_POST_NORM": post_weight is not None,
        "HAS_SCALE": rules.scale != 1.0,
        "HAS_NORM": weight is not None,
        "KIND": rules.kind,
        "FEATURES": features,
        "BLOCK": block,
    }
    num_warps = min(max(block // 512, 1), 16)
    return Launch(add_norm_kernel, (len(hidden),), arguments, {"num_warps": num_warps, "num_stages": 1})
