"""A LoRA adapter as the engine holds it: pairs of matrices by layer and target, with their scales.

Reading artifacts is somebody else's work: the engine asks an `AdapterSource` for a digest.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two factors of one module's delta: y += scale * (x @ A.T) @ B.T."""

    A: torch.Tensor  # [rank, in_features]
    B: torch.Tensor  # [out_features, rank]
    scale: float
    """alpha / rank, or alpha / sqrt(rank) under rsLoRA."""

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Everything that one adapter version adds to the base."""

    digest: str
    pairs: dict[tuple[int, str], LoraPair]
    """By (layer index, target); a module that is absent is left as the base has it."""

    @property
    def max_rank(self) -> int:
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.nbytes for pair in self.pairs.values() for matrix in (pair.A, pair.B))


class AdapterSource(Protocol):
    """Where adapter weights come from."""

    def load(self, digest: str) -> AdapterWeights:
        """Read one version, on the CPU, in the dtype of its file.

        Raises NotFound if there is no such artifact and ValidationFailed if its bytes no longer match the digest.
        """
        ...
