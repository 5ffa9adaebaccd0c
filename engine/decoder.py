"""The forward pass of a Llama-shaped decoder over a flat batch of tokens.

Rows of all sequences stand behind one another; what belongs to a sequence is known to attention alone, and what
belongs to an adapter to the LoRA segments alone. Every other layer sees [num_tokens, features].
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention import KvCache
from graftwork.engine.batch_tensors import BatchTensors
from graftwork.engine.checkpoint import Checkpoint
from graftwork.engine.lora import LoraBatch
from graftwork.engine.model_config import ModelConfig
from graftwork.engine.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; projections that read the same input are fused along their outputs."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [query + 2 * kv_width, hidden]
    output: torch.Tensor  # [hidden, query]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole checkpoint on the device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied


class Decoder:
    """Weights and the order in which they are applied. Changes nothing but the KV cache."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable) -> None:
        self.config = config
        self._weights = weights
        self._rotary = rotary

    def logits(self, batch: BatchTensors, cache: KvCache, lora: LoraBatch) -> torch.Tensor:
        """Logits of the rows that are sampled, in fp32.  # [num_sampled, vocab]"""
        hidden = functional.embedding(batch.token_ids, self._weights.embedding)  # [num_tokens, hidden]
        cos, sin = self._rotary.at(batch.positions)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attention(hidden, layer, index, batch, cache, lora, cos, sin)
            hidden = hidden + self._mlp(hidden, layer, index, lora)
        last = hidden.index_select(0, batch.sampled_rows)  # [num_sampled, hidden]
        last = self._norm(last, self._weights.norm)
        return functional.linear(last, self._weights.head).float()

    def _attention(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        index: int,
        batch: BatchTensors,
        cache: KvCache,
        lora: LoraBatch,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        x = self._norm(hidden, layer.attention_norm)
        qkv = functional.linear(x, layer.qkv)  # [num_tokens, query + 2 * kv_width]
        lora.add_deltas(qkv, x, index, "qkv")
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [num_tokens, heads + 2 * kv_heads, head_dim]
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        mixed = cache.attend(
            index, self._rotary.rotate(query, cos, sin), self._rotary.rotate(key, cos, sin), value, batch
        )  # [num_tokens, query]
        output = functional.linear(mixed, layer.output)
        lora.add_deltas(output, mixed, index, "o")
        return output

    def _mlp(self, hidden: torch.Tensor, layer: LayerWeights, index: int, lora: LoraBatch) -> torch.Tensor:
        x = self._norm(hidden, layer.mlp_norm)
        gate_up = functional.linear(x, layer.gate_up)  # [num_tokens, 2 * intermediate]
        lora.add_deltas(gate_up, x, index, "gate_up")
        gate, up = gate_up.chunk(2, dim=1)
        inner = functional.silu(gate) * up
        output = functional.linear(inner, layer.down)
        lora.add_deltas(output, inner, index, "down")
        return output

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


def load_decoder_weights(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Read and fuse a Llama checkpoint. Raises InvalidRequest naming a tensor that is missing or misshapen."""

    def read(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.read(name, shape).to(device, dtype)

    def read_fused(prefix: str, *targets: str) -> torch.Tensor:
        return torch.cat([read(f"{prefix}.{target}.weight", *config.target_shapes[target]) for target in targets])

    def read_layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        return LayerWeights(
            attention_norm=read(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=read_fused(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj"),
            output=read_fused(f"{prefix}.self_attn", "o_proj"),
            mlp_norm=read(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=read_fused(f"{prefix}.mlp", "gate_proj", "up_proj"),
            down=read_fused(f"{prefix}.mlp", "down_proj"),
        )

    embedding = read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(read_layer(index) for index in range(config.num_layers)),
        norm=read("model.norm.weight", config.hidden_size),
        head=embedding if config.tie_word_embeddings else read("lm_head.weight", config.vocab_size, config.hidden_size),
    )
