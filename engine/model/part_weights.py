"""Holds the weights of what only some architectures have in their layers: recurrence, and several residual streams.

The weights of a recurrent layer are fp32, whatever the model's dtype is, because the state is. Never opens a file: a
TensorSource reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear
from graftwork.engine.model.recurrence import RecurrenceConfig
from graftwork.engine.model.weight_reader import TensorSource


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """What a recurrent layer computes with between in_proj and out_proj (see recurrence.py)."""

    conv: torch.Tensor  # [conv_tokens, conv_width], the weight of the oldest token first
    conv_bias: torch.Tensor | None  # [conv_width]
    dt_bias: torch.Tensor  # [heads]
    decay: torch.Tensor  # [heads], -exp(A_log): the state decays by exp(dt * decay)
    skip: torch.Tensor  # [heads, 1], the factor D of what passes by the state
    norm: torch.Tensor  # [width], in the model's dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        found = (self.conv, self.dt_bias, self.decay, self.skip, self.norm)
        return found if self.conv_bias is None else (*found, self.conv_bias)


def read_recurrent_weights(
    reader: TensorSource, prefix: str, config: RecurrenceConfig, device: torch.device, dtype: torch.dtype
) -> RecurrentWeights:
    """Reads the weights of one layer. `prefix` is the name of its recurrent part, such as "model.layers.0.mamba".

    Raises InvalidRequest if a tensor is missing or has another shape. The error names the tensor.
    """

    def read(name: str, *shape: int) -> torch.Tensor:
        return reader.read(f"{prefix}.{name}", shape).to(device, torch.float32)

    heads, width = config.num_heads, config.conv_width
    conv = read("conv1d.weight", width, 1, config.conv_tokens)
    return RecurrentWeights(
        conv=conv[:, 0].t().contiguous(),
        conv_bias=read("conv1d.bias", width) if config.has_conv_bias else None,
        dt_bias=read("dt_bias", heads),
        decay=-torch.exp(read("A_log", heads)),
        skip=read("D", heads)[:, None],
        norm=read("norm.weight", config.width).to(dtype),
    )


@dataclass(frozen=True, slots=True)
class LayerStreamWeights:
    """What a layer computes with for the residual streams and its own input (see StreamsSpec)."""

    router_norm: torch.Tensor  # [hidden]
    router: Linear  # [16 or more, hidden]: an output for each stream, and outputs of zeros
    prediction: Linear  # [16 or more, 16 or more]: streams * streams outputs and an input for each stream, and zeros
    correction: Linear  # [16 or more, 16 or more]: an output and an input for each stream, and zeros
    gate_scale: torch.Tensor | None  # [hidden]
    laurel_left: AnyLinear  # [rank, hidden]
    laurel_right: AnyLinear  # [hidden, rank]
    laurel_norm: torch.Tensor  # [hidden]
    input_gate: AnyLinear  # [input_width, hidden]
    input_projection: AnyLinear  # [hidden, input_width]
    input_norm: torch.Tensor  # [hidden]

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        return tuple(self.by_group.values())

    @property
    def by_group(self) -> dict[str, AnyLinear]:
        """The linear layers, by the names of their groups."""
        return {
            "modality_router": self.router,
            "prediction_coefs": self.prediction,
            "correction_coefs": self.correction,
            "linear_left": self.laurel_left,
            "linear_right": self.laurel_right,
            "per_layer_input_gate": self.input_gate,
            "per_layer_projection": self.input_projection,
        }

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that belong to no linear layer."""
        yield from (self.router_norm, self.laurel_norm, self.input_norm)
        if self.gate_scale is not None:
            yield self.gate_scale


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """What turns embeddings into residual streams and inputs of layers, and streams into hidden states."""

    projections: tuple[AnyLinear, ...]  # [hidden, hidden], of each stream but the first
    unembed_projections: tuple[AnyLinear, ...]  # [hidden, hidden], the way back
    input_embedding: torch.Tensor  # [input_vocab, layers * input_width]
    input_projection: AnyLinear  # [layers * input_width, hidden]
    input_norm: torch.Tensor  # [input_width]

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        return *self.projections, *self.unembed_projections, self.input_projection

    @property
    def by_group(self) -> dict[str, AnyLinear]:
        """The linear layers, by the names of their groups."""
        found = {f"altup_projections.{number}": one for number, one in enumerate(self.projections)}
        found |= {f"altup_unembed_projections.{number}": one for number, one in enumerate(self.unembed_projections)}
        return found | {"per_layer_model_projection": self.input_projection}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that belong to no linear layer."""
        return self.input_embedding, self.input_norm


class ModelTensors(Protocol):
    """Reads the tensors of a model onto its device, in its dtype.

    Raises InvalidRequest, as TensorSource does, with the name of a wrong tensor.
    """

    @property
    def config(self) -> ModelConfig: ...

    def read(self, name: str, *shape: int) -> torch.Tensor: ...

    def norm(self, name: str, size: int) -> torch.Tensor: ...

    def linear(self, module: str, shape: tuple[int, int]) -> AnyLinear:
        """Reads a linear layer without a bias that shares its input with no other."""
        ...

    def narrow(self, module: str, shape: tuple[int, int]) -> Linear:
        """Reads a narrow linear layer, and gives it inputs and outputs of zeros. It is never rounded."""
        ...


def read_layer_streams(tensors: ModelTensors, index: int) -> LayerStreamWeights:
    """Reads what a layer has for several residual streams."""
    config = tensors.config
    assert config.streams is not None, "the model has several residual streams"
    prefix, hidden, shapes = f"model.layers.{index}", config.hidden_size, config.layer_shapes(index)
    altup, laurel = f"{prefix}.altup", f"{prefix}.laurel"
    scale = tensors.read(f"{altup}.correct_output_scale", hidden)
    return LayerStreamWeights(
        router_norm=tensors.norm(f"{altup}.router_norm", hidden),
        router=tensors.narrow(f"{altup}.modality_router", shapes["modality_router"]),
        prediction=tensors.narrow(f"{altup}.prediction_coefs", shapes["prediction_coefs"]),
        correction=tensors.narrow(f"{altup}.correction_coefs", shapes["correction_coefs"]),
        gate_scale=scale if config.streams.scales_gates else None,
        laurel_left=tensors.linear(f"{laurel}.linear_left", shapes["linear_left"]),
        laurel_right=tensors.linear(f"{laurel}.linear_right", shapes["linear_right"]),
        laurel_norm=tensors.norm(f"{laurel}.post_laurel_norm", hidden),
        input_gate=tensors.linear(f"{prefix}.per_layer_input_gate", shapes["per_layer_input_gate"]),
        input_projection=tensors.linear(f"{prefix}.per_layer_projection", shapes["per_layer_projection"]),
        input_norm=tensors.norm(f"{prefix}.post_per_layer_input_norm", hidden),
    )


def read_stream_weights(tensors: ModelTensors) -> StreamWeights:
    """Reads what is around the layers for several residual streams."""
    config = tensors.config
    assert config.streams is not None, "the model has several residual streams"
    spec, others = config.streams, range(config.streams.count - 1)
    linears = {name: tensors.linear(f"model.{name}", shape) for name, shape in config.model_shapes.items()}
    return StreamWeights(
        projections=tuple(linears[f"altup_projections.{number}"] for number in others),
        unembed_projections=tuple(linears[f"altup_unembed_projections.{number}"] for number in others),
        input_embedding=tensors.read("model.embed_tokens_per_layer.weight", *spec.table_shape(config.num_layers)),
        input_projection=linears["per_layer_model_projection"],
        input_norm=tensors.norm("model.per_layer_projection_norm", spec.input_width),
    )
