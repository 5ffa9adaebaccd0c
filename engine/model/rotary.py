"""Rotary position embedding, in the half-split form of Hugging Face's Llama.

Frequencies are computed in fp32 by the operations of transformers, in their order, so that they are equal bit by bit.
Source: RoFormer, Su et al. 2021 (arXiv 2104.09864).
"""

import math

import torch

from graftwork.engine.model.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class RotaryTable:
    """Cosines and sines of every position of the context, computed once in fp32."""

    def __init__(self, head_dim: int, rope: RopeConfig, context_tokens: int, device: torch.device) -> None:
        frequencies = rotary_frequencies(head_dim, rope)
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
        both = torch.cat([angles, angles], dim=1)  # [context, head_dim]
        self._cos = (both.cos() * rope.attention_factor).to(device)
        self._sin = (both.sin() * rope.attention_factor).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of some positions, to be broadcast over heads.  # [num_tokens, 1, head_dim] each"""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys; computed in fp32, returned in the dtype of x.  # [num_tokens, heads, head_dim]"""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos + turned * sin).to(x.dtype)


def rotary_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """Radians by which each pair of features turns from one position to the next.  # [head_dim / 2] fp32 on the CPU"""
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
    """Pairs of features below the first are kept, those above the second divided."""

    def pair_that_turns(rotations: float) -> float:
        """The pair that turns so often over the original context."""
        return head_dim * math.log(scaling.original_context_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high  # a range of nothing would divide by zero
