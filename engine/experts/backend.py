"""Defines what computes the experts of routed layers: one product after another, or kernels.

Owns nothing. Invariant: the bits of a row do not depend on the other rows.
"""

from typing import ClassVar, Protocol

import torch

from graftwork.engine.experts.routes import HostRows
from graftwork.engine.model.mlp_weights import RoutedWeights


class ArrangedRows(Protocol):
    """The rows of a routed layer in one step, arranged by expert. A row is one token at one of its experts."""

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row, padding rows included: int64 [num_rows] on the device."""
        ...

    @property
    def host(self) -> HostRows:
        """The rows on the host, without padding. May wait for the device."""
        ...

    def multiply(self, rows: torch.Tensor, group: str) -> torch.Tensor:
        """Returns each row's product with the weights of its expert: [num_rows, out_features].

        rows: [num_rows, in_features]; `group` is one of EXPERT_GROUPS.
        """
        ...

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns each token's weighted sum of its experts' outputs: [num_tokens, hidden] in the dtype of `outputs`.

        outputs: [num_rows, hidden]. Sums in fp32, from the first choice to the last, and rounds once.
        """
        ...


class ExpertBackend(Protocol):
    """Computes the experts of one routed layer."""

    uses_kernels: ClassVar[bool]
    """Whether kernels compute them, which the host does not wait for."""

    def __init__(self, weights: RoutedWeights) -> None: ...

    def arrange(self, chosen: torch.Tensor, weights: torch.Tensor) -> ArrangedRows:
        """Arranges the choices of a step. chosen: int64 [num_tokens, num_chosen], weights: fp32 likewise."""
        ...
