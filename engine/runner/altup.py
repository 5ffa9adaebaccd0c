"""Carries several residual streams for each token, and gives each layer an input of its own (see StreamsSpec in block.py).

    begin      streams from the embedding; the inputs of all layers from the embedding and a second table
    enter      predicts all streams from all streams; the layer computes the active one
    add_mixed  adds attention and the low-rank way beside it
    add_mlp    adds the MLP, corrects all streams by what came out, and adds the layer's own input to all but the first
    leave      the mean of the streams

Plain torch on every device; norms, activations and sums with norms are those of RowOps. Coefficients are outputs of linear
layers, which adapters may change for each row; streams are mixed in fp32 and rounded once. Invariant: the bits of a row do
not depend on the other rows: narrow linear layers have inputs and outputs of zeros, and each row has a product of its own.

Source: transformers' Gemma3nTextDecoderLayer and Gemma3nTextAltUp; Baykal et al., "Alternating Updates for Efficient
Transformers" (2023), arXiv 2301.13310.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from graftwork.engine.lora.backend import StepLora
from graftwork.engine.model.block import StreamsSpec
from graftwork.engine.model.mlp_weights import AnyLinear
from graftwork.engine.model.part_weights import LayerStreamWeights
from graftwork.engine.model.projections import MODEL_LAYER
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.runner.row_ops import RowOps

_LEAST_MEAN_SQUARE = 1e-5
_BACK = "altup_unembed_projections"


class AltUpResiduals:
    """Begins steps with several streams for each token."""

    def __init__(self, spec: StreamsSpec, weights: DecoderWeights, rows: RowOps) -> None:
        assert weights.streams is not None, "a model with several streams has weights for them"
        self._spec = spec
        self._weights = weights.streams
        self._layers = weights.layers
        self._rows = rows
        dtype, hidden_size = weights.embedding.dtype, weights.embedding.shape[1]
        self._table_scale = _rounded(spec.input_width**0.5, dtype)
        self._projection_scale = _rounded(hidden_size**-0.5, dtype)
        self._input_scale = _rounded(2.0**-0.5, dtype)

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor, lora: StepLora) -> "AltUpStream":
        size = _root_mean_square(hidden)
        others = [
            _resized(_projected(project, hidden, lora, MODEL_LAYER, f"altup_projections.{number}"), size)
            for number, project in enumerate(self._weights.projections)
        ]
        streams = torch.stack([hidden, *others], dim=1)  # [num_tokens, streams, hidden]
        return AltUpStream(self, streams, self._inputs(hidden, token_ids, lora), lora)

    def _inputs(self, hidden: torch.Tensor, token_ids: torch.Tensor, lora: StepLora) -> torch.Tensor:
        """Returns the inputs of all layers: [layers, num_tokens, input_width]."""
        spec, weights = self._spec, self._weights
        known = token_ids.masked_fill(token_ids >= spec.input_vocab_size, 0)
        looked_up = functional.embedding(known, weights.input_embedding)
        lora.change_inputs(looked_up, known)
        looked_up *= self._table_scale
        projected = _projected(weights.input_projection, hidden, lora, MODEL_LAYER, "per_layer_model_projection")
        projected = projected * self._projection_scale  # [num_tokens, layers * input_width]
        normed = self._rows.norm(projected.view(-1, spec.input_width), weights.input_norm)
        total = (normed.view(projected.shape) + looked_up) * self._input_scale
        return total.view(len(total), -1, spec.input_width).transpose(0, 1).contiguous()

    @property
    def parts(self) -> tuple[StreamsSpec, Sequence[LayerWeights], RowOps]:
        return self._spec, self._layers, self._rows

    def mean(self, streams: torch.Tensor, lora: StepLora) -> torch.Tensor:
        """Returns the hidden states [num_tokens, hidden] of streams after the last layer."""
        first = streams[:, 0]
        size = _root_mean_square(first)
        others = [
            _resized(
                _projected(project, streams[:, number + 1].contiguous(), lora, MODEL_LAYER, f"{_BACK}.{number}"), size
            )
            for number, project in enumerate(self._weights.unembed_projections)
        ]
        return torch.stack([first, *others]).float().mean(dim=0).to(streams.dtype)


class AltUpStream:
    """The streams of one step: [num_tokens, streams, hidden]."""

    def __init__(self, around: AltUpResiduals, streams: torch.Tensor, inputs: torch.Tensor, lora: StepLora) -> None:
        self._around = around
        self._spec, self._layers, self._rows = around.parts
        self._streams = streams
        self._inputs = inputs
        self._lora = lora
        self.hidden = self._active()

    def enter(self, layer: int) -> torch.Tensor:
        own, weights, count = self._layers[layer], self._weights(layer), self._spec.count
        routed = self._routed(weights, self._active(), layer)
        mixing = self._linear(weights.prediction, routed, layer, "prediction_coefs")
        mixing = mixing[:, : count * count].float().view(-1, count, count)
        streams = self._streams.float()
        self._streams = torch.baddbmm(streams, mixing, streams).to(self._streams.dtype)
        self.hidden = self._active()
        x = self.hidden if own.attention_norm is None else self._rows.norm(self.hidden, own.attention_norm)
        inner = self._linear(weights.laurel_left, x, layer, "linear_left")
        low_rank = self._linear(weights.laurel_right, inner, layer, "linear_right")
        self._beside = x + self._rows.norm(low_rank, weights.laurel_norm)
        return x

    def add_mixed(self, layer: int, delta: torch.Tensor) -> torch.Tensor:
        own = self._layers[layer]
        mixed = self._rows.add(self.hidden, delta, own.attention_post_norm)
        self.hidden = (mixed + self._beside) / math.sqrt(2)
        return self.hidden if own.mlp_norm is None else self._rows.norm(self.hidden, own.mlp_norm)

    def add_mlp(self, layer: int, delta: torch.Tensor) -> None:
        weights = self._weights(layer)
        activated = self._rows.add(self.hidden, delta, self._layers[layer].mlp_post_norm)
        routed = self._routed(weights, activated, layer)
        shares = self._linear(weights.correction, routed, layer, "correction_coefs")
        shares = shares[:, : self._spec.count].float() + 1.0  # [num_tokens, streams]
        news = activated.float() - self._active().float()
        corrected = self._streams.float() + shares.unsqueeze(2) * news.unsqueeze(1)
        self._streams = corrected.to(self._streams.dtype)
        self._streams[:, 1:] += self._own_input(layer, weights).unsqueeze(1)
        self.hidden = self._active()

    def leave(self) -> torch.Tensor:
        return self._around.mean(self._streams, self._lora)

    def _own_input(self, layer: int, weights: LayerStreamWeights) -> torch.Tensor:
        """Returns what a layer's own input adds to all streams but the first: [num_tokens, hidden]."""
        active = self._active()
        scaled = active if weights.gate_scale is None else active * weights.gate_scale
        gate = self._linear(weights.input_gate, scaled, layer, "per_layer_input_gate")
        gated = self._rows.activate(torch.cat([gate, self._inputs[layer]], dim=1))
        added = self._linear(weights.input_projection, gated, layer, "per_layer_projection")
        return self._rows.norm(added, weights.input_norm)

    def _routed(self, weights: LayerStreamWeights, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns what the coefficients of all streams follow from: [num_tokens, 16 or more], zeros behind the streams."""
        normed = self._rows.norm(x, weights.router_norm) * x.shape[1] ** -1.0
        routed = self._linear(weights.router, normed, layer, "modality_router")
        return torch.tanh(routed.float()).to(x.dtype)

    def _linear(self, linear: AnyLinear, x: torch.Tensor, layer: int, group: str) -> torch.Tensor:
        return _projected(linear, x, self._lora, layer, group)

    def _active(self) -> torch.Tensor:
        """Returns a copy of the active stream."""
        return self._streams[:, self._spec.active].clone()

    def _weights(self, layer: int) -> LayerStreamWeights:
        own = self._layers[layer].streams
        assert own is not None, "each layer of the model has weights for several streams"
        return own


def _projected(linear: AnyLinear, x: torch.Tensor, lora: StepLora, layer: int, group: str) -> torch.Tensor:
    """Returns a linear layer's output with the deltas of adapters: [num_tokens, out_features]."""
    y = linear(x)
    lora.add_deltas(y, x, layer, group)
    return y


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Returns fp32 [num_tokens, 1] for x [num_tokens, hidden]."""
    return x.float().square().mean(dim=1, keepdim=True).sqrt()


def _resized(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Returns x [num_tokens, hidden] with the root mean square `size` in each row."""
    own = x.float().square().mean(dim=1, keepdim=True).clamp(min=_LEAST_MEAN_SQUARE).sqrt()
    return (x.float() * size / own).to(x.dtype)


def _rounded(factor: float, dtype: torch.dtype) -> float:
    """Returns a factor as transformers keeps it: in the model's dtype."""
    return float(torch.tensor(factor).to(dtype))
