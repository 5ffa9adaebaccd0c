"""Computes the rotary position embedding: the tables of cosines and sines, and the rotation of queries and keys.

Pairs of features are rotated by angles that grow with the position (RoFormer, Su et al. 2021, arXiv 2104.09864). In the
half-split form of Hugging Face's Llama, a pair is a feature of the first half and its counterpart of the second; in the
interleaved form of GPT-J, it is two neighbours. A model may rotate only the first features of each head, and may rotate
nothing in some layers.

Frequencies are computed by the same fp32 operations in the same order as in transformers, so their bits are the same.
"""

import math
from dataclasses import dataclass

import torch

from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import LinearScaling, Llama3Scaling, LongScaling, RopeConfig, YarnScaling


class RotaryTable:
    """Holds the cosines and sines of one rotary embedding in fp32, for every position of the context."""

    def __init__(self, head_dim: int, rope: RopeConfig, context_tokens: int, device: torch.device) -> None:
        frequencies = rotary_frequencies(head_dim, rope, context_tokens)
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
        both = angles.repeat_interleave(2, dim=1) if rope.is_interleaved else torch.cat([angles, angles], dim=1)
        self.cosines = (both.cos() * rope.attention_factor).to(device)  # [context, rotated features]
        self.sines = (both.sin() * rope.attention_factor).to(device)  # [context, rotated features]
        self.is_interleaved = rope.is_interleaved
        self.rotated = both.shape[1]
        """The number of features of each head that are rotated: the first ones."""
        self.frequencies = frequencies.to(device)  # [rotated features / 2]
        self.factor = rope.attention_factor
        """What cosines and sines are multiplied by."""

    def at(self, positions: torch.Tensor, *, has_far: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and the sines of the given positions.

        positions: [num_tokens]. Each of the two results is [num_tokens, 1, rotated features], so that it broadcasts over
        heads. With `has_far`, positions may be behind the context, as those of texts with a rolling window.
        """
        if not has_far:
            return self.cosines[positions].unsqueeze(1), self.sines[positions].unsqueeze(1)
        end = len(self.cosines)
        near, is_near = positions.clamp(max=end - 1), (positions < end)[:, None]
        cos, sin = turns(positions, self.frequencies, is_interleaved=self.is_interleaved)
        both = (self.cosines[near], cos * self.factor), (self.sines[near], sin * self.factor)
        cosines, sines = (torch.where(is_near, table, far).unsqueeze(1) for table, far in both)
        return cosines, sines

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates queries or keys by their positions' cosines and sines. Computes in fp32.

        x: [num_tokens, heads, head_dim]. The result has the shape and dtype of x.
        """
        return _turned(x, cos, sin, self.rotated, is_interleaved=self.is_interleaved)


class RotaryTurn:
    """Turns rotated queries back by any number of positions, so that they stand nearer to keys than in the text."""

    def __init__(self, head_dim: int, rope: RopeConfig, context_tokens: int, device: torch.device) -> None:
        self._frequencies = rotary_frequencies(head_dim, rope, context_tokens).to(device)
        self._is_interleaved = rope.is_interleaved

    def back(self, x: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """Returns queries as if they stood `distances` positions earlier. Computes in fp32.

        x: [num_tokens, heads, head_dim], rotated; distances: [num_tokens]. The result is fp32.
        """
        cos, sin = turns(distances, self._frequencies, is_interleaved=self._is_interleaved)
        turned = cos.unsqueeze(1), -sin.unsqueeze(1)
        return _turned(x.float(), *turned, cos.shape[1], is_interleaved=self._is_interleaved)


def turns(
    positions: torch.Tensor, frequencies: torch.Tensor, *, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and the sines of the angles of any positions, fp32 [num_tokens, rotated features].

    Angles are fp64: those of positions in the millions would lose the last digits that distances need.
    """
    angles = torch.outer(positions.double(), frequencies.double())
    both = angles.repeat_interleave(2, dim=1) if is_interleaved else torch.cat([angles, angles], dim=1)
    return both.cos().float(), both.sin().float()


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_rotated: int, *, is_interleaved: bool
) -> torch.Tensor:
    """Rotates the first `num_rotated` features of each head. x: [num_tokens, heads, head_dim]."""
    is_whole = num_rotated == x.shape[-1]
    rotated = x if is_whole else x[..., :num_rotated]
    if is_interleaved:
        turned = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    result = (rotated * cos + turned * sin).to(x.dtype)
    return result if is_whole else torch.cat([result, x[..., num_rotated:]], dim=-1)


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """The rotary tables of a model's layers. Layers with equal settings share one table."""

    by_layer: tuple[RotaryTable | None, ...]
    """None for a layer that rotates nothing."""

    @classmethod
    def of(cls, model: ModelConfig, device: torch.device) -> "RotaryTables":
        tables = {
            rope: RotaryTable(model.head_dim, rope, model.context_tokens, device)
            for rope in dict.fromkeys(model.ropes)
            if rope is not None
        }
        return cls(tuple(None if rope is None else tables[rope] for rope in model.ropes))

    def at(
        self, positions: torch.Tensor, *, has_far: bool = False
    ) -> dict[RotaryTable, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the cosines and the sines of the given positions in each table (see RotaryTable.at)."""
        tables = dict.fromkeys(self.by_layer)
        return {table: table.at(positions, has_far=has_far) for table in tables if table is not None}


def rotary_frequencies(head_dim: int, rope: RopeConfig, context_tokens: int) -> torch.Tensor:
    """Returns the angle, in radians, by which each pair of features is rotated from one position to the next.

    `context_tokens` is the longest context that is served. The result is [rotated features / 2] fp32 on the CPU.
    """
    rotated = rope.rotated_features(head_dim)
    wavelengths = rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)  # in positions / 2 pi
    frequencies = 1.0 / wavelengths
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(wavelengths, rotated, rope.theta, scaling)
        case LongScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.factors(context_tokens), dtype=torch.float32) * wavelengths)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    context = scaling.original_context_tokens
    wavelengths = 2 * math.pi / frequencies  # in positions
    is_low = wavelengths > context / scaling.low_freq_factor
    is_high = wavelengths < context / scaling.high_freq_factor
    smooth = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(is_high, frequencies, torch.where(is_low, frequencies / scaling.factor, between))


def _yarn(wavelengths: torch.Tensor, rotated: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    low, high = _yarn_range(rotated, theta, scaling)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_range(rotated: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """Returns the ramp's bounds: pairs of features below the first are kept, pairs above the second are divided."""

    def pair_with_rotations(rotations: float) -> float:
        """Returns the pair of features that makes `rotations` rotations over the original context."""
        return rotated * math.log(scaling.original_context_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    return low, high + 0.001 if low == high else high  # an empty range would divide by zero
