"""The types of a validated adapter: where each tensor is in the file, and how it is applied.

The reader of files makes these types, and the builder of matrices uses them. This module reads nothing itself.
Invariant: every tensor of the file is in `AdapterSpec.entries`, as a whole or as all of its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graftwork.adapters.format.safetensors_file import TensorEntry

EMBEDDING, HEAD = "embed_tokens", "lm_head"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", EMBEDDING, HEAD)
"""The targets in the model's order. Lists and hashes keep this order."""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The LoRA of one module: y += scale * ((x @ A.T) @ B.T + bias).

    With `magnitude` (DoRA) the result is renormalised.
    """

    layer: int | None
    """None for the embedding and the head."""
    target: str
    rank: int
    scale: float
    A: TensorEntry  # [rank, in_features]; of the embedding [rank, vocab]
    B: TensorEntry  # [out_features, rank]; of the embedding [hidden, rank]
    magnitude: TensorEntry | None = None  # [out_features]
    bias: TensorEntry | None = None  # [out_features]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in (self.A, self.B, self.magnitude, self.bias) if entry is not None)


@dataclass(frozen=True, slots=True)
class BiasSpec:
    """A trained bias that replaces the base's."""

    layer: int
    target: str
    bias: TensorEntry  # [out_features]


@dataclass(frozen=True, slots=True)
class SavedSpec:
    """A whole matrix that replaces the base's embedding or head."""

    target: str
    matrix: TensorEntry  # [vocab, hidden]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. Its parts are sorted by layer, then by the model's order of targets."""

    r: int
    """The rank in the configuration. `rank_pattern` may give a module another rank."""
    modules: tuple[ModuleSpec, ...]
    """Never empty."""
    biases: tuple[BiasSpec, ...] = ()
    saved: tuple[SavedSpec, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(module.rank for module in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The targets that the adapter changes, by LoRA, by a bias or by a whole matrix."""
        changed = {module.target for module in self.modules} | {part.target for part in self.biases}
        changed |= {part.target for part in self.saved}
        return tuple(target for target in TARGETS if target in changed)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor, in the order in which the digest reads them."""
        for module in self.modules:
            yield from module.entries
        yield from (part.bias for part in self.biases)
        yield from (part.matrix for part in self.saved)
