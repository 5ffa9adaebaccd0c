"""Defines the types of a validated adapter: where each tensor is in the weights file, and how the tensor is applied.

`module_reader.py` makes these values, and `registry/weights.py` builds matrices from them. Never reads a file.
Invariant: `AdapterSpec.entries` covers every tensor of the file, but those of keys and values that the model's layer does
not have, because it reads those of another layer: they would change nothing. A fused tensor, such as one matrix for q, k and v, has
one entry for each of its modules, and these entries together contain all of its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graftwork.adapters.format.safetensors_file import TensorEntry

EMBEDDING, INPUT_EMBEDDING, HEAD = "embed_tokens", "embed_tokens_per_layer", "lm_head"
JOINED_EXPERTS = ("experts_gate_up", "experts_down")
SINGLE_EXPERTS = ("experts_gate", "experts_up", "experts_down")
"""The projections of experts, as files hold their LoRA: of all experts together, or of each expert alone."""
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", EMBEDDING, HEAD),
    *("router", "shared_gate_proj", "shared_up_proj", "shared_down_proj", "shared_gate"),
    *("experts_gate_up", "experts_gate", "experts_up", "experts_down"),
    *("in_proj", "out_proj"),
    *("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection"),
    *("modality_router", "prediction_coefs", "correction_coefs"),
    *("altup_projections", "altup_unembed_projections", "per_layer_model_projection", INPUT_EMBEDDING),
)
"""The names of the modules that an adapter can change (targets). Lists and hashes keep this order. A name may have a number
behind it, as in `altup_projections.0`.
"""


def target_order(target: str) -> tuple[int, int]:
    """Returns the place of a target in the order of `TARGETS`, as the key of a sort."""
    name, _, number = target.partition(".")
    return TARGETS.index(name), int(number or 0)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """The LoRA of one module: y += scale * ((x @ A.T) @ B.T + bias).

    If `magnitude` is present (DoRA), each row of the merged matrix W + scale * B @ A is scaled until its norm is the
    trained magnitude of this row.
    """

    layer: int | None
    """The index of the layer, from 0; None for a module outside the layers, such as the embedding (embed_tokens) and the
    output head (lm_head).
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
class ExpertSpec:
    """The LoRA of one projection of experts, of all experts together or of one alone."""

    layer: int
    target: str
    """One of JOINED_EXPERTS if `expert` is None, else one of SINGLE_EXPERTS."""
    expert: int | None
    rank: int
    """The rank of each expert."""
    scale: float
    A: TensorEntry  # [rank, in_features]; of all experts [experts * rank, in_features], expert by expert
    B: TensorEntry  # [out_features, rank]; of all experts [out_features, rank * experts], rank by rank

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self.A, self.B


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """All parts of a validated adapter: LoRA modules, biases, saved matrices, and the LoRA of experts.

    Each of the lists is sorted by layer, then by the order of `TARGETS`.
    """

    r: int
    """The field `r` of the configuration, which is the default rank. `rank_pattern` may give a module another rank."""
    modules: tuple[ModuleSpec, ...]
    """The LoRA of each module that has LoRA. Empty only if experts have LoRA."""
    biases: tuple[BiasSpec, ...] = ()
    saved: tuple[SavedSpec, ...] = ()
    experts: tuple[ExpertSpec, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank among the modules of the adapter."""
        return max([module.rank for module in self.modules] + [part.rank for part in self.experts])

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of the modules that the adapter changes, such as `q_proj`.

        The adapter changes a module by LoRA, by a new bias or by a new matrix.
        """
        changed = {module.target for module in self.modules} | {part.target for part in self.biases}
        changed |= {part.target for part in self.saved} | {part.target for part in self.experts}
        return tuple(sorted(changed, key=target_order))

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor of the adapter, in the order in which the digest of the adapter hashes them."""
        for module in self.modules:
            yield from module.entries
        yield from (part.bias for part in self.biases)
        yield from (part.matrix for part in self.saved)
        for expert in self.experts:
            yield from expert.entries
