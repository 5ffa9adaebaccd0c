"""Computes the bytes of a model, of its KV and of its adapters from config.json alone.

Owns no formula of the KV cache: `request_bytes` is the engine's own. Never reads weights, never imports
torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from graftwork.engine.kv.transfer.layer_groups import request_bytes
from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.experts import MXFP4_BLOCK, RouterScore
from graftwork.engine.model.projections import NARROW_TARGETS
from graftwork.engine.quantization.scheme import Quantization
from graftwork.platform.errors import InvalidRequest

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MXFP4_BITS = 4 + 8 / MXFP4_BLOCK
"""The bits of a weight with its share of a scale."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one model as it is served in one dtype."""

    model: ModelConfig
    dtype: str

    @classmethod
    def read(cls, folder: Path, dtype: str | None = None) -> "ModelSizes":
        """Reads config.json. `dtype` of None is the dtype of the model's files. Raises InvalidRequest."""
        model = read_model_config(folder)
        chosen = dtype or model.dtype
        if chosen not in _ITEM_BYTES:
            raise InvalidRequest(
                f"dtype {chosen!r} is not served: choose one of {', '.join(_ITEM_BYTES)}.", param="dtype"
            )
        return cls(model, chosen)

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """All weights: embeddings, output head, projections, biases and norms."""
        model = self.model
        layers = sum(self._layer_parameters(layer) for layer in range(model.num_layers))
        tables = 1 if model.tie_word_embeddings else 2
        around = self._stream_products + self._stream_tables
        return layers + around + tables * model.vocab_size * model.hidden_size + model.hidden_size

    def _layer_parameters(self, layer: int) -> int:
        model = self.model
        shapes = model.layer_shapes(layer)
        found = sum(out * width for out, width in shapes.values())
        found += len(model.block.norms.names) * model.hidden_size
        found += sum(shapes[name][0] for name in model.biased_targets if name in shapes)
        num_norms = 2 if model.kv_source(layer) == layer else 1
        found += num_norms * model.head_dim if model.has_qk_norm else 0
        found += shapes["q_proj"][0] + model.kv_width if model.block.has_wide_qk_norm else 0
        found += model.num_heads if model.block.has_sinks else 0
        if model.streams is not None:
            found += 4 * model.hidden_size  # three norms and a scale
        return found + self._expert_parameters(layer) + self._recurrent_parameters(layer)

    @property
    def _stream_products(self) -> int:
        """The weights around the layers that each token is multiplied by, if there are several residual streams."""
        return sum(out * width for out, width in self.model.model_shapes.values())

    @property
    def _stream_tables(self) -> int:
        """The table of the layers' own inputs, and its norm."""
        streams = self.model.streams
        if streams is None:
            return 0
        return (streams.input_vocab_size * self.model.num_layers + 1) * streams.input_width

    def _recurrent_parameters(self, layer: int) -> int:
        """Returns the weights of a recurrent layer that belong to no linear layer."""
        own = self.model.recurrence
        if own is None or not self.model.is_recurrent(layer):
            return 0
        conv = (own.conv_tokens + own.has_conv_bias) * own.conv_width
        return conv + 3 * own.num_heads + own.width

    def _expert_parameters(self, layer: int) -> int:
        """Returns the weights, biases and corrections of all experts of a layer."""
        experts = self.model.experts
        if experts is None or not self.model.is_routed(layer):
            return 0
        shapes = experts.shapes
        biases = shapes.gate_up[0] + shapes.down[0] if experts.has_biases else 0
        corrections = shapes.num_experts if experts.router.score is RouterScore.SIGMOID else 0
        return shapes.num_experts * (math.prod(shapes.gate_up) + math.prod(shapes.down) + biases) + corrections

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are served on a GPU: the linear layers of a quantised checkpoint as codes and scales."""
        quantization = self.model.quantization
        if quantization is None:
            plain = self.parameters - self._mxfp4_products
            return plain * self.item_bytes + int(self._mxfp4_products * _MXFP4_BITS / 8)
        quantised = sum(self._quantised_products(layer, quantization) for layer in range(self.model.num_layers))
        quantised += sum(
            out * width
            for name, (out, width) in self.model.model_shapes.items()
            if not quantization.excludes(f"model.{name}")
        )
        plain = (self.parameters - quantised) * self.item_bytes
        return plain + int(quantised * quantization.bits_per_weight / 8)

    @property
    def _mxfp4_products(self) -> int:
        """The weights of all experts, if they are MXFP4; else 0."""
        experts = self.model.experts
        if experts is None or not experts.is_mxfp4:
            return 0
        products = math.prod(experts.shapes.gate_up) + math.prod(experts.shapes.down)
        return len(experts.shapes.layers) * experts.shapes.num_experts * products

    def _quantised_products(self, layer: int, quantization: Quantization) -> int:
        """Returns the weights of a layer that are served as codes: none of narrow layers, which are never rounded."""
        found = sum(
            out * width
            for name, (out, width) in self.model.layer_shapes(layer).items()
            if name not in NARROW_TARGETS and not quantization.excludes(f"layers.{name}")
        )
        experts = self.model.experts
        if experts is None or not self.model.is_routed(layer):
            return found
        shapes, prefix = experts.shapes, f"model.layers.{layer}.{experts.shapes.names.blocks[-1]}.experts.0"
        projections = [shapes.gate_up, shapes.down]
        names = (shapes.names.projections[0], shapes.names.projections[-1])
        chosen = [
            shape
            for name, shape in zip(names, projections, strict=True)
            if not quantization.excludes(f"{prefix}.{name}")
        ]
        return found + shapes.num_experts * sum(out * width for out, width in chosen)

    @property
    def token_flops(self) -> int:
        """Floating point operations for one token, without attention: two for each weight that multiplies."""
        model = self.model
        products = sum(self._layer_products(layer) for layer in range(model.num_layers))
        return 2 * (products + self._stream_products + model.vocab_size * model.hidden_size)

    def _layer_products(self, layer: int) -> int:
        """Returns the weights of a layer that one token is multiplied by: of experts, only those that are chosen."""
        experts = self.model.experts
        found = sum(out * width for out, width in self.model.layer_shapes(layer).values())
        if experts is None or not self.model.is_routed(layer):
            return found
        shapes = experts.shapes
        return found + experts.router.num_chosen * (math.prod(shapes.gate_up) + math.prod(shapes.down))

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of whole KV pages for one request's tokens, with the recurrent states in them, and of layers
        with a window only what they keep.
        """
        return request_bytes(self.model, tokens, self.item_bytes)

    def adapter_bytes(self, rank: int) -> int:
        """Returns the bytes of an adapter of all linear layers but those of experts."""
        everywhere = [self.model.model_shapes, *map(self.model.layer_shapes, range(self.model.num_layers))]
        return sum(rank * (out + width) for shapes in everywhere for out, width in shapes.values()) * self.item_bytes
