"""Describes what a decoder layer computes, as data: norms and their places, the activation, scales and caps.

The default of each field is Llama. architectures.py lists the values of each architecture. Never imports torch.

    hidden  = embedding * scales.embedding
    x       = norm(hidden, before_attention)                      hidden itself, where the layer has no such norm
    hidden += scales.residual * norm(attention(x), after_attention)
    x       = norm(hidden, before_mlp)                            the same x as attention, in a parallel layer
    hidden += scales.residual * norm(mlp(x), after_mlp)
    logits  = cap(scales.logits * head(norm(hidden)))

With several streams (see StreamsSpec), `hidden` above is the active one of [count, hidden] streams:

    streams[i] += sum of router(streams[active])[i, j] * streams[j]                            prediction
    x           = norm(streams[active], before_attention)
    laurel      = x + norm(right(left(x)))
    hidden      = (streams[active] + norm(attention(x), after_attention) + laurel) / sqrt(2)
    hidden     += norm(mlp(norm(hidden, before_mlp)), after_mlp)
    streams[i] += (1 + router(hidden)[i]) * (hidden - streams[active])                         correction
    streams[1:] += norm(projection(activation(gate(scale * streams[active])) * layer_input))
"""

from dataclasses import dataclass
from enum import StrEnum

from graftwork.engine.core.layer_modules import LayerModules


class NormKind(StrEnum):
    """How a norm computes, and where it rounds to the model's dtype. The values name them in kernels too."""

    RMS = "rms"
    """x / rms(x), rounded, and then multiplied by the weight."""
    RMS_ROUNDED_ONCE = "rms_rounded_once"
    """x / rms(x) times the weight, rounded once. The weight is fp32."""
    LAYER = "layer"
    """(x - mean(x)) / deviation(x) times the weight, rounded once. The weight is fp32; there is no bias."""


class Activation(StrEnum):
    """The function that the MLP applies to its gates. The values name them in kernels too."""

    SILU = "silu"
    GELU = "gelu"
    """GELU by the error function."""
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh."""


@dataclass(frozen=True, slots=True)
class NormTensors:
    """The names of a layer's norms in a checkpoint. None means that the layer has no norm in this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name is not None)


LLAMA_NORMS = NormTensors()


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The parts of a decoder layer, which follow from the architecture alone."""

    norm: NormKind = NormKind.RMS
    """The kind of all norms of the model."""
    norm_offset: float = 0.0
    """What is added to the stored weights of all norms."""
    norms: NormTensors = LLAMA_NORMS
    has_wide_qk_norm: bool = False
    """Whether all queries of a token are normalised together before rotation, and so are all its keys."""
    has_value_norm: bool = False
    """Whether each head of the values is normalised, without a weight."""
    has_sinks: bool = False
    """Whether each head has a sink: a learned logit that takes part in the softmax of attention and has no value."""
    is_parallel: bool = False
    """Whether the MLP has the same input as attention."""
    joined_groups: tuple[str, ...] = ()
    """The groups of projections that the checkpoint holds as one tensor, such as "qkv" for `qkv_proj`."""
    modules: LayerModules | None = None
    """The names of the layers' modules, where they are not those of Llama. Which layers have which follows later."""


LLAMA_BLOCK = BlockSpec()


@dataclass(frozen=True, slots=True)
class Scales:
    """The factors and caps of a model. A cap c turns a value x into c * tanh(x / c); None leaves it as it is."""

    embedding: float = 1.0
    rounds_embedding_scale: bool = False
    """Whether the embedding's factor is rounded to the model's dtype before it is applied."""
    residual: float = 1.0
    """The factor of what attention and the MLP add to the hidden states."""
    attention: float | None = None
    """The factor of a query's product with a key; None means 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    logits: float = 1.0
    logits_cap: float | None = None


NO_SCALES = Scales()


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several residual streams of each token, and what each layer adds to them besides attention and MLP.

    A layer computes one stream and predicts the others (AltUp: Baykal et al. 2023, arXiv 2301.13310), has a low-rank way
    beside attention (LAuReL: Menghani et al. 2024, arXiv 2411.07501), and takes an input of its own from a second table
    of embeddings.
    """

    count: int
    active: int
    """The stream that layers compute."""
    scales_gates: bool
    """Whether what gates a layer's input is multiplied by a vector first."""
    laurel_rank: int
    input_width: int
    """The features of a layer's own input."""
    input_vocab_size: int
    """The rows of the second table. Tokens beyond it have the inputs of token 0."""

    def target_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer of a layer that LoRA can change."""
        return {
            "modality_router": (self.count, hidden_size),
            "prediction_coefs": (self.count**2, self.count),
            "correction_coefs": (self.count, self.count),
            "linear_left": (self.laurel_rank, hidden_size),
            "linear_right": (hidden_size, self.laurel_rank),
            "per_layer_input_gate": (self.input_width, hidden_size),
            "per_layer_projection": (hidden_size, self.input_width),
        }

    def table_shape(self, num_layers: int) -> tuple[int, int]:
        """The shape [input_vocab, features] of the second table: the inputs of all layers, one after another."""
        return self.input_vocab_size, num_layers * self.input_width

    def model_shapes(self, hidden_size: int, num_layers: int) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer beside the decoder layers, by its name in the model."""
        others, square = range(self.count - 1), (hidden_size, hidden_size)
        names = [
            f"{module}.{number}" for module in ("altup_projections", "altup_unembed_projections") for number in others
        ]
        return dict.fromkeys(names, square) | {
            "per_layer_model_projection": (num_layers * self.input_width, hidden_size)
        }


STREAM_SETTINGS = (
    *("altup_num_inputs", "altup_active_idx", "altup_correct_scale", "laurel_rank"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
"""The settings of config.json that StreamsSpec is read from."""
