"""Adds up what each rank has computed of a layer's output, before the output joins the hidden states.

A row-parallel projection (o, down) gives each rank a part of a sum. LoRA deltas and DoRA's changes are linear in that
sum, so each rank adds its own part of them first, and one sum over the ranks serves base and adapters.
"""

from collections.abc import Callable

import torch

from graftwork.engine.parallel.collectives import Collectives
from graftwork.engine.runner.input_batch import BatchTensors
from graftwork.engine.runner.row_ops import RowOps, StepRows


class SummingRowOps:
    """The row operations of one rank. Whatever is added to the hidden states is first summed over all ranks."""

    def __init__(self, own: RowOps, ranks: Collectives, num_ranks: int) -> None:
        """`own` computes the row operations on this rank's device."""
        self._own = own
        self._ranks = ranks
        self._num_ranks = num_ranks

    def plan(self, batch: BatchTensors) -> StepRows:
        return self._own.plan(batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._own.norm(x, weight)

    def norm_wide(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._own.norm_wide(qkv, weights, self._average)

    def add_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ranks.all_reduce(delta)
        return self._own.add_norm(hidden, delta, weight, post_weight)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor, post_weight: torch.Tensor | None = None) -> torch.Tensor:
        self._ranks.all_reduce(delta)
        return self._own.add(hidden, delta, post_weight)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._own.activate(gate_up)

    def _average(self, squares: torch.Tensor) -> None:
        """Replaces mean squares of the rank's heads by those of all heads.

        All ranks have as many heads. A KV head that several ranks have counts several times in sum and number.
        """
        self._ranks.all_reduce(squares)
        squares /= self._num_ranks
