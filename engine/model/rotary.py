"""Rotary position embedding, in the half-split form of Hugging Face's Llama.

Owns the table of cosines and sines. Frequencies are computed by the same fp32 operations as in transformers, in the
same order, so that they are equal to the bit.
Source: RoFormer, Su et al. 2021 (arXiv 2104.09864).
"""

import math

import torch

from graftwork.engine.model.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class RotaryTable:
    """Cosines and sines of all positions of the context, computed once in fp32."""

    def __init__(self, head_dim: int, rope: RopeConfig, context_tokens: int, device: torch.device) -> None:
        frequencies = rotary_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
        both = torch.cat([angles, angles], dim=1)  # [context, head_dim]
        self._cos = (both.cos() * rope.attention_factor).to(device)
        self._sin = (both.sin() * rope.attention_factor).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines of some positions, to broadcast over heads.  # [num_tokens, 1, head_dim] each"""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates queries or keys, in fp32; the result has the dtype of x.  # [num_tokens, heads, head_dim]"""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos + turned * sin).to(x.dtype)


def rotary_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Returns the rotation of each pair of features from one position to the next, in radians.  # [head_dim / 2] fp32
    on CPU
    """
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # in positions / 2 pi
    frequencies = 1.0 / wavelengths
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(wavelengths, head_dim, rope.theta, scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    context = scaling.original_context_tokens
    wavelengths = 2 * math.pi / frequencies  # in positions
    is_low = wavelengths > context / scaling.low_freq_factor
    is_high = wavelengths < context / scaling.high_freq_factor
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / scaling.factor, between))


def _yarn(wavelengths: torch.Tensor, head_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    low, high = _yarn_range(head_dim, theta, scaling)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_range(head_dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """Returns the bounds of the ramp: pairs of features below the first are kept, pairs above the second are divided."""

    def pair_with_rotations(rotations: float) -> float:
        """Returns the pair of features that makes `rotations` rotations over the original context."""
        return head_dim * math.log(scaling.original_context_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high  # an empty range would divide by zero
