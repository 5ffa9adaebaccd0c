"""A brute-force sampler in fp64, which also tells how near the noise is to the border between two tokens."""

import torch

from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.rng import uniform
from graftwork.engine.sampling.torch_sampler import edit_logits

ROUNDING = 1e-6
"""What rounding may do to noise, top-p and min-p, in a sampler that sums 3,000 fp32 numbers."""


def tokens_within_rounding(logits: torch.Tensor, spec: SampleSpec) -> set[int]:
    """Every token that the row may get if noise, top-p and min-p are off by at most `ROUNDING`.

    One token if the noise is far from each border. All tokens for a row that forbids all, because any will do.
    """
    row = logits.clone()[None].float()
    if spec.mask is not None:
        allowed = torch.zeros_like(row, dtype=torch.bool)
        allowed[0, list(spec.mask.token_ids)] = True  # type: ignore[attr-defined]
        row[~allowed] = float("-inf")
    edit_logits(row, [spec])
    if spec.params.is_greedy:
        return {int(row.argmax())}
    row = row[0] / torch.tensor(spec.params.temperature)
    if not row.amax().isfinite():
        return set(range(len(row)))
    return {
        _token(row, spec, noise, share) for noise in (-ROUNDING, 0.0, ROUNDING) for share in (-ROUNDING, 0.0, ROUNDING)
    }


def _token(row: torch.Tensor, spec: SampleSpec, noise_off: float, share_off: float) -> int:
    params = spec.params
    weights = (row.double() - row.amax().double()).exp()
    by_rank = params.top_k is not None or params.top_p < 1
    order = torch.arange(len(row))
    if by_rank:
        order = row.sort(descending=True, stable=True).indices
    weights = weights[order]
    kept = torch.ones_like(weights, dtype=torch.bool)
    if params.top_k is not None:
        kept &= torch.arange(len(row)) < params.top_k
    if params.top_p < 1:
        limit = weights[kept].sum() * (torch.tensor(params.top_p).double() * (1 + share_off))
        kept &= weights.cumsum(0) - weights < limit
        kept[0] = True
    kept &= weights >= (torch.tensor(params.min_p).double() * (1 + share_off)).clamp(max=1)
    weights = weights * kept
    noise = min(max(uniform(spec) + noise_off, 0.0), 1 - 2**-53)
    cumulative = weights.cumsum(0)
    place = int(
        torch.searchsorted(cumulative, noise * cumulative[-1:], right=True).clamp(max=int(kept.nonzero().max()))
    )
    return int(order[place])
