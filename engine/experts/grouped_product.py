"""Multiplies rows that are arranged by expert, each with the weights of its expert.

On a CPU and on a GPU without a kernel for it, one product is made for each expert that has rows. Owns how long a run
must be, so that the bits of a row do not depend on how many other rows chose the same expert.
"""

from collections.abc import Callable, Sequence

import torch

from graftwork.engine.experts.routes import ExpertRun
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.layers import Linear, usual_rows


def run_length(rules: BatchInvariance, *, is_packed: bool) -> Callable[[int], int]:
    """Returns a function that gives the length of a run of so many rows, with padding.

    With weights in blocks, lengths are those for which products are prepared anyway (see `usual_rows`).
    """

    def padded(num_rows: int) -> int:
        least = rules.rows(num_rows)
        return usual_rows(least) if is_packed else least

    return padded


def grouped_product(rows: torch.Tensor, linears: Sequence[Linear], runs: Sequence[ExpertRun]) -> torch.Tensor:
    """Returns each row's product with the weights of its expert: [num_rows, out_features].

    rows: [num_rows, in_features]; `linears` has one layer for each expert of the model.
    """
    return torch.cat([linears[run.expert](rows[run.start : run.end]) for run in runs])
