"""Makes the factors of all experts of a layer from the tensors of an adapter's files.

A file holds them in one of two forms (see adapters/format/expert_reader.py). Owns nothing, and never reads a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.lora.weights import ExpertPair


@dataclass(frozen=True, slots=True)
class SingleFactors:
    """The factors of one projection of one expert, and which outputs of its group they change."""

    expert: int
    A: torch.Tensor  # [rank, in_features]
    B: torch.Tensor  # [out_features, rank]
    scale: float
    out_start: int = 0


def joined_pair(A: torch.Tensor, B: torch.Tensor, scale: float, num_experts: int, *, interleaves: bool) -> ExpertPair:
    """Returns the factors of a parameter that holds all experts.

    A: [experts * rank, in_features], expert by expert; B: [out_features, rank * experts], rank by rank. `interleaves`
    says that gates and ups take turns among the outputs.
    """
    own_A = A.reshape(num_experts, -1, A.shape[1])  # [experts, rank, in_features]
    own_B = B.reshape(len(B), -1, num_experts).permute(2, 0, 1)  # [experts, out_features, rank]
    if interleaves:
        own_B = torch.cat([own_B[:, 0::2], own_B[:, 1::2]], dim=1)
    return ExpertPair(own_A, own_B, torch.full(own_A.shape[:2], scale))


def stacked_pair(parts: Sequence[SingleFactors], num_experts: int, out_features: int) -> ExpertPair:
    """Returns the factors of experts that stand alone. The ranks of an expert's projections lie behind one another.

    `out_features` counts the outputs of the whole group. Experts without factors get zeros.
    """
    ranks = [0] * num_experts
    for part in parts:
        ranks[part.expert] += len(part.A)
    first, most = parts[0].A, max(ranks)
    A, B = first.new_zeros(num_experts, most, first.shape[1]), first.new_zeros(num_experts, out_features, most)
    scales, ends = torch.ones(num_experts, most), [0] * num_experts
    for part in parts:
        start, end = ends[part.expert], ends[part.expert] + len(part.A)
        A[part.expert, start:end] = part.A
        B[part.expert, part.out_start : part.out_start + len(part.B), start:end] = part.B
        scales[part.expert, start:end] = part.scale
        ends[part.expert] = end
    return ExpertPair(A, B, scales)
