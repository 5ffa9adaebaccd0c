"""Defines the types of a validated adapter: where each tensor is in the weights file, and how the tensor is applied.

`module_reader.py` makes these values, and `registry/weights.py` builds matrices from them. Never reads a file.
Invariant: `AdapterSpec.entries` covers every tensor of the file. A fused tensor, such as one matrix for q, k and v, has
one entry for each of its modules, and these entries together contain all of its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graftwork.adapters.format.safetensors_file import TensorEntry

EMBEDDING, HEAD = "embed_tokens", "lm_head"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", EMBEDDING, HEAD)
"""The names of the modules that an adapter can change (targets), in the model's order. Lists and hashes keep this
order.
"""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The LoRA of one module: y += scale * ((x @ A.T) @ B.T + bias).

    If `magnitude` is present (DoRA), each row of the merged matrix W + scale * B @ A is scaled until its norm is the
    trained magnitude of this row.
    """

    layer: int | None
    """The index of the layer, from 0; None for the embedding (embed_tokens) and the output head (lm_head), which are
    outside the layers.
    """
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
    """A trained bias of one module. The bias replaces the base model's bias of the same module."""

    layer: int
    target: str
    bias: TensorEntry  # [out_features]


@dataclass(frozen=True, slots=True)
class SavedSpec:
    """A complete trained matrix that replaces the base model's embedding (embed_tokens) or output head (lm_head)."""

    target: str
    matrix: TensorEntry  # [vocab, hidden]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """All parts of a validated adapter: LoRA modules, biases and saved matrices.

    Each of the three lists is sorted by layer, then by the order of `TARGETS`.
    """

    r: int
    """The field `r` of the configuration, which is the default rank. `rank_pattern` may give a module another rank."""
    modules: tuple[ModuleSpec, ...]
    """The LoRA of each module that has LoRA. The list is never empty."""
    biases: tuple[BiasSpec, ...] = ()
    saved: tuple[SavedSpec, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank among the modules of the adapter."""
        return max(module.rank for module in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of the modules that the adapter changes, such as `q_proj`.

        The adapter changes a module by LoRA, by a new bias or by a new matrix.
        """
        changed = {module.target for module in self.modules} | {part.target for part in self.biases}
        changed |= {part.target for part in self.saved}
        return tuple(target for target in TARGETS if target in changed)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor of the adapter, in the order in which the digest of the adapter hashes them."""
        for module in self.modules:
            yield from module.entries
        yield from (part.bias for part in self.biases)
        yield from (part.matrix for part in self.saved)
