"""Holds the weights of what only some architectures have in their layers: recurrence, and several residual streams.

The weights of a recurrent layer are fp32, whatever the model's dtype is, because the state is. Never opens a file: a
TensorSource reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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
    prediction: torch.Tensor  # fp32 [streams * streams, streams]
    correction: torch.Tensor  # fp32 [streams, streams]
    gate_scale: torch.Tensor | None  # [hidden]
    laurel_left: AnyLinear  # [rank, hidden]
    laurel_right: AnyLinear  # [hidden, rank]
    laurel_norm: torch.Tensor  # [hidden]
    input_gate: AnyLinear  # [input_width, hidden]
    input_projection: AnyLinear  # [hidden, input_width]
    input_norm: torch.Tensor  # [hidden]

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        return self.router, *self.by_group.values()

    @property
    def by_group(self) -> dict[str, AnyLinear]:
        """The linear layers that adapters can change, by the names of their groups."""
        names = ("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection")
        own = (self.laurel_left, self.laurel_right, self.input_gate, self.input_projection)
        return dict(zip(names, own, strict=True))

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that belong to no linear layer."""
        yield from (self.router_norm, self.prediction, self.correction, self.laurel_norm, self.input_norm)
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
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that belong to no linear layer."""
        return self.input_embedding, self.input_norm
