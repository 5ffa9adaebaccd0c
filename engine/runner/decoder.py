"""Computes the forward pass of a decoder over a flat batch: the tokens of all requests of a step, one after another.

Owns the order of operations in a layer. Only attention, recurrence and the write of KV know which tokens belong to one
request, and only LoRA knows which tokens use one adapter. All other operations see [num_tokens, features]. Never branches by
architecture or by device: models differ in their weights and their configuration, devices in their RowOps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import AttentionHook, StepAttention
from graftwork.engine.experts.backend import ExpertBackend
from graftwork.engine.experts.expert_loop import ExpertLoop
from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.recurrence.layers import RecurrentLayers, StepRecurrence
from graftwork.engine.runner.altup import AltUpResiduals
from graftwork.engine.runner.hidden_taps import HiddenTaps
from graftwork.engine.runner.input_batch import BatchTensors
from graftwork.engine.runner.mlp import build_mlp
from graftwork.engine.runner.residual import PlainResiduals, Residuals
from graftwork.engine.runner.row_ops import RowOps, StepRows


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of one step that all layers use."""

    rows: StepRows
    attention: StepAttention
    lora: StepLora
    recurrence: StepRecurrence | None
    """None if the model has no recurrent layers."""


class Decoder:
    """Holds a model's weights and computes its forward pass. A forward pass changes only the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rows: RowOps,
        on_layer: Callable[[], None],
        recurrent: RecurrentLayers | None = None,
        experts: type[ExpertBackend] = ExpertLoop,
        taps: HiddenTaps | None = None,
        hooks: Sequence[AttentionHook] = (),
    ) -> None:
        """`on_layer` is called before each layer, so that others can see that a long step advances. `recurrent` computes
        the recurrent layers, and `experts` the experts of routed layers, if the model has some. `taps` keep hidden states
        for a draft head. `hooks` add to the attention of some steps, the first one first.
        """
        self.config = config
        self.weights = weights
        self.rows = rows
        self._on_layer = on_layer
        self._recurrent = recurrent
        self._taps = taps
        self._hooks = hooks
        self._mixers = [self._attention if one.recurrent is None else self._recurrence for one in weights.layers]
        self.experts = None if config.experts is None else experts
        self._mlps = [build_mlp(config, layer.mlp, index, rows, experts) for index, layer in enumerate(weights.layers)]
        self._residuals = build_residuals(config, weights, rows)
        self._is_parallel = config.block.is_parallel
        self._embedding_scale = _embedding_scale(config, weights.embedding.dtype)
        self._changes_logits = config.scales.logits != 1.0 or config.scales.logits_cap is not None

    def hidden(self, batch: BatchTensors, attention: StepAttention, lora: StepLora) -> torch.Tensor:
        """Computes the forward pass up to the last layer. Returns the hidden states: [num_tokens, hidden].

        A row is one token of the step.
        """
        layers = self.weights.layers
        self.weights.step_kinds.prompt_rows = batch.attention.prompt_rows
        hidden = functional.embedding(batch.token_ids, self.weights.embedding)  # [num_tokens, hidden]
        lora.change_embedding(hidden, batch.token_ids)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        for hook in self._hooks:
            attention = hook.around(attention, batch.attention.placed)
        recurrence = None if self._recurrent is None else self._recurrent.plan(batch.attention)
        step = _Step(self.rows.plan(batch), attention, lora, recurrence)
        stream = self._residuals.begin(hidden, batch.token_ids, lora)
        for index, layer in enumerate(layers):
            self._on_layer()
            if self._taps is not None:
                self._taps.take(index, stream.hidden)
            x = stream.enter(index)
            after = stream.add_mixed(index, self._mixers[index](x, layer, index, step))
            stream.add_mlp(index, self._mlps[index](x if self._is_parallel else after, lora))
        hidden = stream.leave()
        if self._taps is not None:
            self._taps.take(len(layers), hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, lora: StepLora | None) -> torch.Tensor:
        """Returns the logits of some rows of `hidden`: [num_rows, vocab] in the model's dtype.

        hidden: [num_rows, hidden]. The sampled rows of `lora` must be these rows; None applies no adapter.
        """
        last = self.rows.norm(hidden, self.weights.norm)
        logits = self.weights.head(last)
        if lora is not None:
            lora.change_logits(logits, last)
        return self._scaled(logits) if self._changes_logits else logits

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits with the model's factor and cap."""
        scales = self.config.scales
        if scales.logits != 1.0:
            logits = logits * scales.logits
        if scales.logits_cap is not None:
            logits = torch.tanh(logits / scales.logits_cap) * scales.logits_cap
        return logits

    def _attention(self, x: torch.Tensor, layer: LayerWeights, index: int, step: _Step) -> torch.Tensor:
        qkv = layer.qkv(x)  # [num_tokens, query + 2 * kv_width]
        step.lora.add_deltas(qkv, x, index, "qkv")
        if layer.wide_qk_norm is not None:
            self.rows.norm_wide(qkv, layer.wide_qk_norm)
        query = step.rows.rotate_and_store(qkv, index, layer.qk_norm)  # [num_tokens, heads, head_dim]
        mixed = step.attention.attend(index, query)  # [num_tokens, query]
        output = layer.output(mixed)
        step.lora.add_deltas(output, mixed, index, "o")
        return output

    def _recurrence(self, x: torch.Tensor, layer: LayerWeights, index: int, step: _Step) -> torch.Tensor:
        assert step.recurrence is not None
        projected = layer.qkv(x)  # [num_tokens, input_width]
        step.lora.add_deltas(projected, x, index, "recurrent_in")
        mixed = step.recurrence.mix(index, projected)  # [num_tokens, width]
        output = layer.output(mixed)
        step.lora.add_deltas(output, mixed, index, "recurrent_out")
        return output


def build_residuals(config: ModelConfig, weights: DecoderWeights, rows: RowOps) -> Residuals:
    """Returns what carries the hidden states of a model's steps."""
    if config.streams is None:
        return PlainResiduals(rows, weights.layers)
    return AltUpResiduals(config.streams, weights, rows)


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float | None:
    """Returns the factor of the embeddings; None for 1."""
    scale = config.scales.embedding
    if config.scales.rounds_embedding_scale:
        scale = float(torch.tensor(scale).to(dtype))
    return None if scale == 1.0 else scale
