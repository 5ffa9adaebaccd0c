"""Computes the forward pass of a decoder over a flat batch: the tokens of all requests of a step, one after another.

Owns the order of operations in a layer. Only attention and the write of KV know which tokens belong to one request, and
only LoRA knows which tokens use one adapter. All other operations see [num_tokens, features]. Never branches by
architecture or by device: models differ in their weights and their configuration, devices in their RowOps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import StepAttention
from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.runner.input_batch import BatchTensors
from graftwork.engine.runner.row_ops import RowOps, StepRows


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of one step that all layers use."""

    rows: StepRows
    attention: StepAttention
    lora: StepLora


class Decoder:
    """Holds a model's weights and computes its forward pass. A forward pass changes only the KV cache."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rows: RowOps, on_layer: Callable[[], None]
    ) -> None:
        """`on_layer` is called before each layer, so that others can see that a long step advances."""
        self.config = config
        self.weights = weights
        self.rows = rows
        self._on_layer = on_layer

    def hidden(self, batch: BatchTensors, attention: StepAttention, lora: StepLora) -> torch.Tensor:
        """Computes the forward pass up to the last layer. Returns the hidden states: [num_tokens, hidden].

        A row is one token of the step.
        """
        rows, layers = self.rows, self.weights.layers
        hidden = functional.embedding(batch.token_ids, self.weights.embedding)  # [num_tokens, hidden]
        lora.change_embedding(hidden, batch.token_ids)
        step = _Step(rows.plan(batch), attention, lora)
        x = rows.norm(hidden, layers[0].attention_norm)
        for index, layer in enumerate(layers):
            self._on_layer()
            hidden, x = rows.add_norm(hidden, self._attention(x, layer, index, step), layer.mlp_norm)
            delta = self._mlp(x, layer, index, lora)
            if index + 1 < len(layers):
                hidden, x = rows.add_norm(hidden, delta, layers[index + 1].attention_norm)
        return rows.add(hidden, delta)

    def logits(self, hidden: torch.Tensor, lora: StepLora | None) -> torch.Tensor:
        """Returns the logits of some rows of `hidden`: [num_rows, vocab] in the model's dtype.

        hidden: [num_rows, hidden]. The sampled rows of `lora` must be these rows; None applies no adapter.
        """
        last = self.rows.norm(hidden, self.weights.norm)
        logits = self.weights.head(last)
        if lora is not None:
            lora.change_logits(logits, last)
        return logits

    def _attention(self, x: torch.Tensor, layer: LayerWeights, index: int, step: _Step) -> torch.Tensor:
        qkv = layer.qkv(x)  # [num_tokens, query + 2 * kv_width]
        step.lora.add_deltas(qkv, x, index, "qkv")
        query = step.rows.rotate_and_store(qkv, index, layer.qk_norm)  # [num_tokens, heads, head_dim]
        mixed = step.attention.attend(index, query)  # [num_tokens, query]
        output = layer.output(mixed)
        step.lora.add_deltas(output, mixed, index, "o")
        return output

    def _mlp(self, x: torch.Tensor, layer: LayerWeights, index: int, lora: StepLora) -> torch.Tensor:
        gate_up = layer.gate_up(x)  # [num_tokens, 2 * intermediate]
        lora.add_deltas(gate_up, x, index, "gate_up")
        inner = self.rows.activate(gate_up)  # [num_tokens, intermediate]
        output = layer.down(inner)
        lora.add_deltas(output, inner, index, "down")
        return output
