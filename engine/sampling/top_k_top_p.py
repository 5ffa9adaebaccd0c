"""Keeps only the likeliest tokens of each row of logits, by top-k, top-p and min-p.

Owns the rule that decides which tokens are kept. Never sorts a whole vocabulary: it takes the top few hundred tokens,
and more only for rows that need them.
Invariant: equal logits are ordered by token id, so the kept tokens do not depend on other rows. Many logits are equal,
because bf16 has few values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.core.step import SampleSpec

_FIRST_WIDTH = 256
"""The number of tokens to look at first in a row without a top-k."""
_SLACK = 32
"""The number of tokens to look at beyond top-k, to see all logits that are equal to the last one."""
_WIDER = 8
"""The factor by which the width grows when it was too small."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that top-k, top-p and min-p keep for some rows of logits."""

    token_ids: torch.Tensor  # [rows, width] likeliest first
    weights: torch.Tensor  # [rows, width] in fp64, not normalised; 0 for dropped tokens
    is_whole: torch.Tensor  # [rows] whether `width` was enough to hold all kept tokens


def truncates(spec: SampleSpec) -> bool:
    """Returns whether a row needs its tokens in sorted order, because it uses top-k or top-p. Min-p alone needs no
    order.
    """
    return spec.params.top_k is not None or spec.params.top_p < 1


def first_width(specs: Sequence[SampleSpec]) -> int:
    """Returns how many of the likeliest tokens of each row to look at in the first attempt."""
    return max(_FIRST_WIDTH if spec.params.top_k is None else spec.params.top_k + _SLACK for spec in specs)


def wider(width: int) -> int:
    """Returns how many of the likeliest tokens of a row to look at next, if the first `width` tokens were too few."""
    return width * _WIDER


def keep_likeliest(logits: torch.Tensor, specs: Sequence[SampleSpec], width: int) -> Kept:
    """Applies top-k to each row of logits, then top-p to the tokens that are left, then min-p.

    The likeliest token is always kept. logits: [rows, vocab], divided by the temperature. `specs` has one entry for
    each row. `width` is how many of the likeliest tokens to look at. It is at least every row's top-k, or the whole
    vocabulary.
    """
    width = min(width, logits.shape[-1])
    ordered, token_ids = _top(logits, width)  # 2 × [rows, width]
    weights = (ordered - ordered[:, :1]).double().exp()
    cumulative = weights.cumsum(dim=-1)
    top_k = _column([min(spec.params.top_k or width, width) for spec in specs], logits)  # [rows, 1]
    kept = torch.arange(width, device=logits.device) < top_k
    kept &= cumulative - weights < _mass_to_keep(logits, specs, cumulative, top_k)
    kept &= (weights > 0) & (weights >= _column([spec.params.min_p for spec in specs], logits))
    least = ordered.gather(1, kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0))  # [rows, 1]
    is_whole = (ordered[:, -1:] < least).squeeze(1) | (width == logits.shape[-1])
    return Kept(token_ids, weights * kept, is_whole)


def _top(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the largest logits and their tokens; equal logits are ordered by ascending token id."""
    token_ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = logits.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ordered, token_ids.gather(1, order)


def _mass_to_keep(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    cumulative: torch.Tensor,
    top_k: torch.Tensor,
) -> torch.Tensor:
    """Returns a limit for each row: a token is kept while the tokens before it weigh less than the limit.

    # [rows, 1] in fp64
    """
    share = [spec.params.top_p if spec.params.top_p < 1 else float("inf") for spec in specs]
    total = cumulative.gather(1, top_k - 1)  # [rows, 1]; the likeliest weighs 1
    if any(spec.params.top_k is None for spec in specs):
        unlimited = _column([spec.params.top_k is None for spec in specs], logits)
        # Not by logsumexp: with several threads its last bits depend on the number of rows.
        of_all = 1 / logits.softmax(dim=-1).amax(dim=-1, keepdim=True).double()
        total = torch.where(unlimited, of_all, total)
    return total * _column(share, logits).double()


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)[:, None]
