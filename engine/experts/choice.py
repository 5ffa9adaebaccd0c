"""Chooses the experts of each token from the router's logits, as RouterSpec says, in fp32.

Owns nothing. Invariant: the choice for a token depends on its own logits alone.
"""

import torch

from graftwork.engine.model.batch_invariance import sigmoid
from graftwork.engine.model.experts import RouterScore, RouterSpec

_BEST_OF_GROUP = 2
"""A group counts by the sum of its best two scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
_LEAST_SUM = 1e-20


def choose(
    logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chosen experts and their weights: int64 and fp32, both [num_tokens, num_chosen].

    logits: fp32 [num_tokens, experts]; correction: fp32 [experts], only with RouterScore.SIGMOID.
    """
    match spec.score:
        case RouterScore.SOFTMAX:
            weights, chosen = torch.topk(logits.softmax(dim=-1), spec.num_chosen, dim=-1)
        case RouterScore.SOFTMAX_OF_CHOSEN:
            best, chosen = torch.topk(logits, spec.num_chosen, dim=-1)
            return chosen, best.softmax(dim=-1)
        case RouterScore.SIGMOID:
            scores = sigmoid(logits)
            ranked = scores if correction is None else scores + correction
            chosen = torch.topk(_in_best_groups(ranked, spec), spec.num_chosen, dim=-1).indices
            weights = scores.gather(1, chosen)
    if spec.normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return chosen, weights * spec.scale


def _in_best_groups(ranked: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """Returns scores [num_tokens, experts] in which all experts outside the best groups have minus infinity."""
    if spec.num_chosen_groups == spec.num_groups:
        return ranked
    groups = ranked.view(len(ranked), spec.num_groups, -1)  # [num_tokens, groups, experts of a group]
    strength = groups.topk(_BEST_OF_GROUP, dim=-1).values.sum(dim=-1)  # [num_tokens, groups]
    best = strength.topk(spec.num_chosen_groups, dim=-1).indices
    is_open = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, best, value=True)
    return groups.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
