"""Computes the forward pass of a decoder over a flat batch: the tokens of all requests of a step, one after another.

Owns the order of operations in a layer. Only attention knows which tokens belong to one request, and only LoRA knows
which tokens use one adapter. All other operations see [num_tokens, features]. Never branches by architecture: models
differ only in their weights and their configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import RotaryTable
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.runner.attention import PagedAttention
from graftwork.engine.runner.input_batch import BatchTensors, VisibleKeys


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of one step that all layers use."""

    batch: BatchTensors
    attention: PagedAttention
    lora: StepLora
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim]
    visible_by_window: dict[int | None, VisibleKeys]


class Decoder:
    """Holds a model's weights and computes its forward pass. A forward pass changes only the KV cache."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rotary: RotaryTable, on_layer: Callable[[], None]
    ) -> None:
        """`on_layer` is called before each layer, so that others can see that a long step advances."""
        self.config = config
        self.weights = weights
        self._rotary = rotary
        self._on_layer = on_layer
        self._windows = tuple(dict.fromkeys(config.windows))

    def hidden(self, batch: BatchTensors, attention: PagedAttention, lora: StepLora) -> torch.Tensor:
        """Computes the forward pass up to the last layer. Returns the hidden states: [num_tokens, hidden].

        A row is one token of the step.
        """
        hidden = functional.embedding(batch.token_ids, self.weights.embedding)  # [num_tokens, hidden]
        lora.change_embedding(hidden, batch.token_ids)
        cos, sin = self._rotary.at(batch.positions)
        step = _Step(batch, attention, lora, cos, sin, {window: batch.visible_keys(window) for window in self._windows})
        for index, layer in enumerate(self.weights.layers):
            self._on_layer()
            hidden = hidden + self._attention(hidden, layer, index, step)
            hidden = hidden + self._mlp(hidden, layer, index, lora)
        return hidden

    def logits(self, hidden: torch.Tensor, lora: StepLora | None) -> torch.Tensor:
        """Returns the logits of some rows of `hidden`: [num_rows, vocab] in the model's dtype.

        hidden: [num_rows, hidden]. The sampled rows of `lora` must be these rows; None applies no adapter.
        """
        last = self._norm(hidden, self.weights.norm)
        logits = self.weights.head(last)
        if lora is not None:
            lora.change_logits(logits, last)
        return logits

    def _attention(self, hidden: torch.Tensor, layer: LayerWeights, index: int, step: _Step) -> torch.Tensor:
        config = self.config
        x = self._norm(hidden, layer.attention_norm)
        qkv = layer.qkv(x)  # [num_tokens, query + 2 * kv_width]
        step.lora.add_deltas(qkv, x, index, "qkv")
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [num_tokens, heads + 2 * kv_heads, head_dim]
        queries_and_keys, value = torch.split(
            heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if layer.qk_norm is not None:
            queries_and_keys = self._norm(queries_and_keys, layer.qk_norm)
        rotated = self._rotary.rotate(queries_and_keys, step.cos, step.sin)
        query, key = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
        visible = step.visible_by_window[config.windows[index]]
        mixed = step.attention.attend(index, query, key, value, step.batch, visible)  # [num_tokens, query]
        output = layer.output(mixed)
        step.lora.add_deltas(output, mixed, index, "o")
        return output

    def _mlp(self, hidden: torch.Tensor, layer: LayerWeights, index: int, lora: StepLora) -> torch.Tensor:
        x = self._norm(hidden, layer.mlp_norm)
        gate_up = layer.gate_up(x)  # [num_tokens, 2 * intermediate]
        lora.add_deltas(gate_up, x, index, "gate_up")
        gate, up = gate_up.chunk(2, dim=1)
        inner = functional.silu(gate) * up
        output = layer.down(inner)
        lora.add_deltas(output, inner, index, "down")
        return output

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides x by the root mean square of its last dimension, and multiplies it by `weight`. Keeps the dtype of x.

    Rounds to the dtype of x before the multiplication, as transformers does. torch's function, if it gets the weight
    too, rounds after the multiplication; then a quarter of all bf16 values would differ.
    """
    return functional.rms_norm(x, (x.shape[-1],), eps=epsilon) * weight
