"""Holds the weights of a recurrent layer that belong to no linear layer, and reads them from a checkpoint.

All are fp32, whatever the model's dtype is, because the state is.
"""

from dataclasses import dataclass

import torch

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
