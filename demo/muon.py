"""Muon in fp32: momentum whose update is made orthogonal, for the matrices inside the layers.

`torch.optim.Muon` works in bfloat16, which a processor without bfloat16 arithmetic emulates at a fifteenth of the
speed of fp32.
Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are made orthogonal together."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(matrices), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                by_shape[weight.shape].append(weight)
            for weights in by_shape.values():
                self.update(weights, **{name: group[name] for name in ("lr", "momentum", "weight_decay")})

    def update(self, weights: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        directions = orthogonal(torch.stack([self.direction(weight, momentum) for weight in weights]))
        rows, columns = weights[0].shape
        rate = lr * max(1.0, rows / columns) ** 0.5
        for weight, direction in zip(weights, directions, strict=True):
            weight.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-rate)

    def direction(self, weight: Tensor, momentum: float) -> Tensor:
        """Nesterov's look ahead of the running mean of the gradient."""
        assert weight.grad is not None
        mean: Tensor = self.state[weight].setdefault("mean", torch.zeros_like(weight))
        mean.lerp_(weight.grad, 1.0 - momentum)
        return weight.grad.lerp(mean, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, about, by Newton and Schulz; [num_matrices, rows, columns]."""
    tall = matrices.size(1) > matrices.size(2)
    found: Tensor = matrices.mT if tall else matrices
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, second, third = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = found @ found.mT
        found = first * found + (second * square + third * square @ square) @ found
    return found.mT if tall else found
