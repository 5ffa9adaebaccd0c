"""Reads the weights of a draft head from its folder onto the device.

Owns them. Never ignores a tensor of the folder: one that the head does not use is an error. The embedding is that of the
served model, unless the folder has its own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from graftwork.engine.draft_head.head_config import HeadConfig, head_refused
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.weight_reader import WeightReader
from graftwork.platform.errors import InvalidRequest

_LAYER = "midlayer"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """All weights of a draft head. Linear layers with the same input are joined."""

    embedding: torch.Tensor  # [vocab, hidden]
    owns_embedding: bool
    """Whether the embedding is the head's own, and not that of the served model."""
    states: Linear  # [hidden, 3 * target_hidden]
    input_norm: torch.Tensor  # [hidden], of the token's embedding
    states_norm: torch.Tensor  # [hidden], of the projected hidden states
    qkv: Linear  # [query + 2 * kv_width, 2 * hidden]
    output: Linear  # [hidden, query]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]
    norm: torch.Tensor  # [hidden]
    head: Linear  # [draft_vocab, hidden]
    guessed_token_ids: torch.Tensor | None  # [draft_vocab] int64: the token of each logit; None if they are the same

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that the head adds to those of the served model."""
        linears = (self.states, self.qkv, self.output, self.gate_up, self.down, self.head)
        others = [self.input_norm, self.states_norm, self.mlp_norm, self.norm]
        others += [self.embedding] if self.owns_embedding else []
        others += [] if self.guessed_token_ids is None else [self.guessed_token_ids]
        return sum(one.num_bytes for one in linears) + sum(one.nbytes for one in others)


def load_head_weights(
    folder: Path, config: HeadConfig, embedding: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> HeadWeights:
    """Reads all weights of a draft head onto the device, in `dtype`. `embedding` is that of the served model.

    Raises InvalidRequest if a tensor is missing, has another shape, or is not part of a head.
    """
    try:
        return _HeadReader(WeightReader(folder), config, device, dtype).read(embedding)
    except InvalidRequest as error:
        if not list(folder.glob("*.safetensors")) and list(folder.glob("*.bin")):
            raise head_refused(
                folder, "its weights are a pickle (.bin), which may hold code: convert them to safetensors."
            ) from error
        raise head_refused(folder, error.message) from error


@dataclass(frozen=True, slots=True)
class _HeadReader:
    reader: WeightReader
    config: HeadConfig
    device: torch.device
    dtype: torch.dtype

    def read(self, embedding: torch.Tensor) -> HeadWeights:
        layer, attention, mlp = self.config.layer, f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
        query, hidden, wide = layer.num_heads * layer.head_dim, layer.hidden_size, layer.intermediate_size
        owns_embedding = "embed_tokens.weight" in self.reader
        if owns_embedding:
            embedding = self._tensor("embed_tokens.weight", layer.vocab_size, hidden)
        elif embedding.shape[1] != hidden:
            raise InvalidRequest(
                f"it has no embed_tokens.weight, and its layer of {hidden} features cannot take the embedding of the "
                f"served model, which has {embedding.shape[1]}."
            )
        weights = HeadWeights(
            embedding=embedding,
            owns_embedding=owns_embedding,
            states=self._linear(hidden, self.config.states_width, "fc"),
            input_norm=self._tensor(f"{_LAYER}.input_layernorm.weight", hidden),
            states_norm=self._tensor(f"{_LAYER}.hidden_norm.weight", hidden),
            qkv=self._joined(attention, 2 * hidden, q_proj=query, k_proj=layer.kv_width, v_proj=layer.kv_width),
            output=self._linear(hidden, query, f"{attention}.o_proj"),
            mlp_norm=self._tensor(f"{_LAYER}.post_attention_layernorm.weight", hidden),
            gate_up=self._joined(mlp, hidden, gate_proj=wide, up_proj=wide),
            down=self._linear(hidden, wide, f"{mlp}.down_proj"),
            norm=self._tensor("norm.weight", hidden),
            head=self._linear(self.config.draft_vocab_size, hidden, "lm_head"),
            guessed_token_ids=self._guessed_tokens(),
        )
        if self.reader.unread:
            raise InvalidRequest(f"it holds tensors that no EAGLE-3 head has, {min(self.reader.unread)!r} among them.")
        self.reader.close()
        return weights

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.reader.read(name, shape).to(self.device, self.dtype)

    def _linear(self, out_features: int, in_features: int, name: str) -> Linear:
        linear = Linear(self._tensor(f"{name}.weight", out_features, in_features))
        linear.pack()
        return linear

    def _joined(self, prefix: str, in_features: int, **rows: int) -> Linear:
        """Joins projections with the same input. `rows` has the number of outputs of each, by name."""
        parts = [self._tensor(f"{prefix}.{name}.weight", count, in_features) for name, count in rows.items()]
        linear = Linear(torch.cat(parts))
        linear.pack()
        return linear

    def _guessed_tokens(self) -> torch.Tensor | None:
        """Reads which token each logit stands for. The file has the difference between the token's id and the logit's."""
        config, vocab_size = self.config, self.config.layer.vocab_size
        if "t2d" in self.reader:
            self.reader.take("t2d")  # the same the other way round: which tokens can be guessed
        if "d2t" not in self.reader:
            if config.draft_vocab_size != vocab_size:
                raise InvalidRequest(
                    f"it guesses {config.draft_vocab_size} of {vocab_size} tokens, and has no d2t to say which."
                )
            return None
        offsets = self.reader.take("d2t")
        if offsets.dtype != torch.int64 or offsets.shape != (config.draft_vocab_size,):
            raise InvalidRequest(f"d2t must be int64 [{config.draft_vocab_size}], not {tuple(offsets.shape)}.")
        token_ids = torch.arange(len(offsets)) + offsets
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(set(token_ids.tolist())) < len(token_ids):
            raise InvalidRequest(f"d2t names a token twice, or one outside the vocabulary of {vocab_size}.")
        return token_ids.to(self.device)
