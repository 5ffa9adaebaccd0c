"""Describes the recurrent layers of a model, as data: sizes, settings, and how files name them.

A recurrent layer has a state of constant size in place of keys and values. It computes Mamba-2 (Dao and Gu,
"Transformers are SSMs", 2024, arXiv 2405.21060, section 6), for each token in turn:

    gate, u, dt   = in_proj(x)                                     u: the inputs of the convolution
    v, B, C       = silu(sum of weight[k] * u[t - k] + bias)       over the last `conv_tokens` tokens
    dt            = softplus(dt + dt_bias)                         for each head
    state         = exp(-dt * exp(A_log)) * state + dt * B v       for each head, [state_size, head_dim]
    y             = C state + D * v
    output        = out_proj(norm(y * silu(gate)))                 a norm for each group of heads

Never imports torch.
"""

from dataclasses import dataclass

_STATE_BYTES = 4
"""Bytes of a number of the state, which is fp32 whatever the model's dtype is."""


@dataclass(frozen=True, slots=True)
class RecurrenceRules:
    """How an architecture describes its recurrent layers in config.json. Fields that end in `setting` name a setting."""

    heads_setting: str = "mamba_n_heads"
    head_dim_setting: str = "mamba_d_head"
    groups_setting: str = "mamba_n_groups"
    state_setting: str = "mamba_d_state"
    conv_setting: str = "mamba_d_conv"
    conv_bias_setting: str = "mamba_conv_bias"
    expansion_setting: str = "mamba_expand"

    @property
    def settings(self) -> frozenset[str]:
        """The names of all settings that are read, besides `layer_types`."""
        sizes = {self.heads_setting, self.head_dim_setting, self.groups_setting, self.state_setting}
        return frozenset(sizes | {self.conv_setting, self.conv_bias_setting, self.expansion_setting})


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """The sizes of a model's recurrent layers. They are the same in all of them."""

    layers: tuple[int, ...]
    """The recurrent layers, ascending. The others have attention."""
    num_heads: int
    head_dim: int
    num_groups: int
    """Heads of one group share B and C, and are normalised together."""
    state_size: int
    conv_tokens: int
    """How many tokens the convolution sees, the present one included."""
    has_conv_bias: bool

    @property
    def width(self) -> int:
        """The features of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """The features that the convolution mixes over time: those of all heads, and B and C of all groups."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def input_width(self) -> int:
        """The outputs of in_proj: the gate, the inputs of the convolution, and a step size for each head."""
        return self.width + self.conv_width + self.num_heads

    @property
    def layer_state_bytes(self) -> int:
        """Bytes of one layer's state after any token: of all heads, and the convolution's last inputs."""
        heads = self.num_heads * self.state_size * self.head_dim
        return _STATE_BYTES * (heads + (self.conv_tokens - 1) * self.conv_width)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all recurrent layers after any token."""
        return len(self.layers) * self.layer_state_bytes

    def target_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer of a recurrent layer's own part."""
        return {"in_proj": (self.input_width, hidden_size), "out_proj": (hidden_size, self.width)}
