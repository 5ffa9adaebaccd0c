"""Defines the types of a validated adapter: where each tensor is in the file, and how the tensor is applied.

`module_reader.py` makes these values, and `registry/weights.py` builds matrices from them. Never reads a file.
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

    If `magnitude` is present (DoRA), each row of the merged matrix is scaled to the trained magnitude.
    """

    layer: int | None
    """The index of the layer, from 0; None for the embedding and the head, which are outside the layers."""
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
    """A trained bias that replaces the base model's bias of one module."""

    layer: int
    target: str
    bias: TensorEntry  # [out_features]


@dataclass(frozen=True, slots=True)
class SavedSpec:
    """A whole matrix that replaces the base model's embedding or head."""

    target: str
    matrix: TensorEntry  # [vocab, hidden]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. Each of its lists is sorted by layer, then by the order of `TARGETS`."""

    r: int
    """The rank in the configuration. `rank_pattern` may give a module another rank."""
    modules: tuple[ModuleSpec, ...]
    """The LoRA of each module that has one; never empty."""
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
