"""Chooses the token of each sampled row: the likeliest, or one drawn at random.

Owns the order of the steps: bans and biases, penalties, temperature, top-k, top-p, min-p, then one random number that
picks a token. Each step is one operation over all rows that need it.
Invariant: a row's token depends on its own logits and its own spec alone, never on other rows.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.logits_processors import edit_logits
from graftwork.engine.sampling.rng import uniform
from graftwork.engine.sampling.top_k_top_p import first_width, keep_likeliest, truncates, wider

_BLOCK = 128
_BELOW_ONE = 1 - 2**-53


def choose_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Choose one token for each row. logits: [rows, vocab] in fp32; changed in place."""
    edit_logits(logits, specs)
    drawn = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if not drawn:
        return _as_ints(logits.argmax(dim=-1))
    if len(drawn) == len(specs):
        return _as_ints(_draw(logits, specs))
    chosen = logits.argmax(dim=-1)
    chosen[drawn] = _draw(logits[drawn], [specs[row] for row in drawn])
    return _as_ints(chosen)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Draw a token for each row.  # [rows]"""
    scaled = logits / torch.tensor([spec.params.temperature for spec in specs], device=logits.device)[:, None]
    uniforms = torch.tensor([uniform(spec) for spec in specs], dtype=torch.float64, device=logits.device)
    cut = [row for row, spec in enumerate(specs) if truncates(spec)]
    if not cut:
        return _draw_of_all(scaled, specs, uniforms)
    if len(cut) == len(specs):
        return _draw_of_likeliest(scaled, specs, uniforms)
    others = [row for row, spec in enumerate(specs) if not truncates(spec)]
    chosen = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
    chosen[cut] = _draw_of_likeliest(scaled[cut], [specs[row] for row in cut], uniforms[cut])
    chosen[others] = _draw_of_all(scaled[others], [specs[row] for row in others], uniforms[others])
    return chosen


def _draw_of_all(scaled: torch.Tensor, specs: Sequence[SampleSpec], uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary, except what min-p drops."""
    weights = scaled.softmax(dim=-1)
    if any(spec.params.min_p > 0 for spec in specs):
        least = torch.tensor([spec.params.min_p for spec in specs], device=scaled.device)[:, None]
        weights *= weights >= weights.amax(dim=-1, keepdim=True) * least
    return _pick_in_blocks(weights, uniforms)


def _draw_of_likeliest(scaled: torch.Tensor, specs: Sequence[SampleSpec], uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from what top-k, top-p and min-p keep. Rows that keep more than the first `width` tokens are repeated wider."""
    chosen = torch.empty(len(specs), dtype=torch.int64, device=scaled.device)
    rows = torch.arange(len(specs), device=scaled.device)
    width = first_width(specs)
    while len(rows):
        own = specs if len(rows) == len(specs) else [specs[row] for row in rows.tolist()]
        kept = keep_likeliest(scaled[rows], own, width)
        drawn = kept.token_ids.gather(1, _pick(kept.weights.cumsum(dim=-1), uniforms[rows])[:, None])
        chosen[rows] = drawn.squeeze(1)
        rows, width = rows[~kept.is_whole], wider(width)
    return chosen


def _pick_in_blocks(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Pick a token by its weight: first the block, then the token in the block.  # [rows]

    A cumulative sum over the whole vocabulary would take five times as long.
    """
    padded = functional.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = padded.view(len(weights), -1, _BLOCK)  # [rows, blocks, _BLOCK]
    sums = blocks.sum(dim=-1).double()  # [rows, blocks]
    cumulative = sums.cumsum(dim=-1)
    block = _pick(cumulative, uniforms)[:, None]
    own, upto = sums.gather(1, block), cumulative.gather(1, block)
    rest = (uniforms[:, None] * cumulative[:, -1:] - (upto - own)) / own  # in [0, 1), except for rounding
    within = blocks.take_along_dim(block[:, :, None], dim=1).squeeze(1).double()  # [rows, _BLOCK]
    place = _pick(within.cumsum(dim=-1), rest.squeeze(1).clamp_(0, _BELOW_ONE))
    return (block.squeeze(1) * _BLOCK + place).clamp_(max=weights.shape[-1] - 1)


def _pick(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index in each row's cumulative weights that its number falls on, never one of weight 0.  # [rows]

    A row of NaN gets some valid index; its request ends with an error elsewhere.
    """
    aims = uniforms[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, aims, right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[-1] - 1)


def _as_ints(token_ids: torch.Tensor) -> list[int]:
    return [int(token) for token in token_ids.tolist()]
