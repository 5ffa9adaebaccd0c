"""Defines a LoRA adapter as it is read from its files: pairs of matrices by layer and target, with their scales.

Never reads a file. The engine asks an `AdapterSource` for an adapter, by its digest.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The low-rank factors A and B of one linear layer. They add scale * ((x @ A.T) @ B.T + bias) to its output.

    x is the input of the layer. With a `magnitude` (DoRA), each output of the layer is also multiplied by magnitude /
    norm. Here norm is the norm of the output's row in W + scale * B @ A, and W is the base model's weight. The base
    model's own bias is not multiplied.
    """

    A: torch.Tensor  # [rank, in_features]; of an embedding: [rank, vocab]
    B: torch.Tensor  # [out_features, rank]; of an embedding: [hidden, rank]
    scale: float
    """The factor of the delta: alpha / rank, or alpha / sqrt(rank) under rsLoRA."""
    magnitude: torch.Tensor | None = None  # [out_features]
    bias: torch.Tensor | None = None  # [out_features] of lora_B, where the adapter has one (lora_bias)

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.A, self.B, self.magnitude, self.bias) if tensor is not None)


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """The low-rank factors of one group of projections of all experts of a layer. For a row x of one expert, they add
    (scales * (x @ A.T)) @ B.T. Experts that the adapter does not change have zeros.
    """

    A: torch.Tensor  # [experts, ranks, in_features]
    B: torch.Tensor  # [experts, out_features, ranks]; of gate and up together, gates first
    scales: torch.Tensor  # [experts, ranks] fp32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.A, self.B, self.scales


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Everything that one adapter version adds to the base model, or replaces in it."""

    digest: str
    pairs: dict[tuple[int, str], LoraPair]
    """The factors by (layer index, target), beside the layers by MODEL_LAYER. A module that is absent is not changed."""
    biases: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Trained biases [out_features], by (layer index, target). Each replaces a bias of the base model."""
    embedding: LoraPair | None = None
    """LoRA on embed_tokens. A tied output head keeps the base model's weights, as in PEFT."""
    input_embedding: LoraPair | None = None
    """LoRA on embed_tokens_per_layer, the table that gives each layer an input of its own."""
    head: LoraPair | None = None
    """LoRA on lm_head."""
    saved_embedding: torch.Tensor | None = None  # [vocab, hidden], replaces the base's
    saved_head: torch.Tensor | None = None  # [vocab, hidden], replaces the base's
    experts: dict[tuple[int, str], ExpertPair] = field(default_factory=dict)
    """The factors of experts by (layer index, one of EXPERT_GROUPS)."""

    @property
    def max_rank(self) -> int:
        ranks = [pair.rank for pair in self._all_pairs()] + [pair.A.shape[1] for pair in self.experts.values()]
        return max(ranks, default=0)

    @property
    def num_bytes(self) -> int:
        saved = [tensor for tensor in (self.saved_embedding, self.saved_head) if tensor is not None]
        tensors = [*saved, *self.biases.values(), *(tensor for pair in self._all_pairs() for tensor in pair.tensors)]
        tensors += [tensor for pair in self.experts.values() for tensor in pair.tensors]
        return sum(tensor.nbytes for tensor in tensors)

    def _all_pairs(self) -> list[LoraPair]:
        others = (self.embedding, self.input_embedding, self.head)
        return [*self.pairs.values(), *(pair for pair in others if pair is not None)]


class AdapterSource(Protocol):
    """Reads the weights of stored adapters. Each adapter version is named by the digest of its files."""

    def load(self, digest: str) -> AdapterWeights:
        """Reads one adapter version into CPU memory, in the dtype of its file.

        Raises NotFound if no adapter with this digest is stored, and ValidationFailed if the file's content no longer
        matches the digest.
        """
        ...
