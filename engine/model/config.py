"""Reads the sizes and settings of a decoder from a Hugging Face config.json.

Turns config.json into a ModelConfig; engine/model/architectures.py lists how architectures differ. Never imports torch,
because the gateway reads configurations too. Never ignores an unsupported setting: raises an error that names the
setting.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graftwork.engine.core.layer_modules import LayerModules
from graftwork.engine.model.architectures import COMMON_DEFAULTS, ModelVariant, WrapperRules
from graftwork.engine.model.block import LLAMA_BLOCK, NO_SCALES, Activation, BlockSpec, Scales, StreamsSpec
from graftwork.engine.model.expert_architectures import SERVED_VARIANTS
from graftwork.engine.model.expert_settings import read_experts
from graftwork.engine.model.experts import ExpertsConfig
from graftwork.engine.model.layer_kinds import (
    read_kinds,
    read_kv_sources,
    read_mlp_widths,
    read_recurrence,
    read_ropes,
    read_sparsity,
    read_streams,
    read_windows,
)
from graftwork.engine.model.recurrence import RecurrenceConfig
from graftwork.engine.model.rope_config import LongScaling, RopeConfig
from graftwork.engine.model.settings import positive, refuse_unknown, refused, unwrapped, whole
from graftwork.engine.quantization.published import read_quantization
from graftwork.engine.quantization.scheme import Quantization
from graftwork.platform.errors import InvalidRequest

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


_PAGE_TOKENS, _MOST_PAGE_TOKENS = 16, 512


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings of a model that the forward pass needs, besides the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The width of dense MLPs, or of the widest."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    """The epsilon of all norms."""
    ropes: tuple[RopeConfig | None, ...]
    """The rotary embedding of each layer; None for a layer that rotates nothing."""
    biased_targets: tuple[str, ...]
    """LoRA targets that have a bias."""
    has_qk_norm: bool
    """Whether each head of queries and keys is normalised before rotation."""
    windows: tuple[int | None, ...]
    """The window of each layer.

    A query at position p sees the keys from p - window + 1 to p; with None, all keys up to p.
    """
    tie_word_embeddings: bool
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block: BlockSpec = LLAMA_BLOCK
    activation: Activation = Activation.SILU
    scales: Scales = NO_SCALES
    experts: ExpertsConfig | None = None
    """The routed layers; None if all layers have a dense MLP."""
    recurrence: RecurrenceConfig | None = None
    """The recurrent layers; None if all layers have attention."""
    draft_layers: int = 0
    """Layers of the checkpoint behind those of the model, which transformers and this engine leave out."""
    quantization: Quantization | None = None
    """How linear layers are quantised. None: not at all."""
    streams: StreamsSpec | None = None
    """The residual streams of a token; None if it has one."""
    kv_sources: tuple[int, ...] = ()
    """For each layer the layer whose keys and values it reads. Empty if each reads its own."""
    intermediate_sizes: tuple[int, ...] = ()
    """The width of each layer's dense MLP, where they differ. Empty if all are `intermediate_size`."""
    sparsity: tuple[float, ...] = ()
    """For each layer the share of its MLP's gates that is set to zero. Empty if none is."""
    wrapper: WrapperRules | None = None
    """How the checkpoint holds the model within another one; None if it does not."""

    @property
    def kv_variant(self) -> str:
        """Names what besides the files decides the content of KV pages: whether LongRoPE is that of long contexts."""
        scalings = [rope.scaling for rope in self.ropes if rope is not None]
        is_long = any(isinstance(one, LongScaling) and one.is_long(self.context_tokens) for one in scalings)
        return "/long rope" if is_long else ""

    @property
    def score_scale(self) -> float:
        """The factor of a query's product with a key."""
        return self.head_dim**-0.5 if self.scales.attention is None else self.scales.attention

    @property
    def kv_width(self) -> int:
        """The number of features of one token's key in one layer, over all KV heads. A value has the same number."""
        return self.num_kv_heads * self.head_dim

    def kv_page_bytes(self, page_tokens: int, item_bytes: int) -> int:
        """Returns the size in bytes of one KV page: the keys and values of `page_tokens` tokens in all layers, and the
        recurrent state after them.
        """
        layer_bytes = 2 * page_tokens * self.kv_width * item_bytes
        return (self.state_parts(layer_bytes) + len(self.kv_layers)) * layer_bytes

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        layers = range(self.num_layers)
        return tuple(layer for layer in layers if self.kv_source(layer) == layer and not self.is_recurrent(layer))

    @property
    def query_layers(self) -> tuple[int, ...]:
        """The layers with queries alone, which read the keys and values of earlier layers."""
        return tuple(layer for layer, source in enumerate(self.kv_sources) if source != layer)

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: itself, or an earlier one."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def page_tokens(self) -> int:
        """The number of tokens in a KV page, if nobody chooses another.

        With recurrent layers it is a power of two for which the state that a page holds is no larger than its keys and values
        in bf16, but at most 512: a prompt continues only from whole pages.
        """
        if self.recurrence is None:
            return _PAGE_TOKENS
        token_bytes = 4 * len(self.kv_layers) * self.kv_width
        sizes = (_PAGE_TOKENS << doubled for doubled in range(5))
        return next((size for size in sizes if size * token_bytes >= self.recurrence.state_bytes), _MOST_PAGE_TOKENS)

    def state_parts(self, layer_bytes: int) -> int:
        """Returns how many parts of `layer_bytes` hold the recurrent state after one token. A part has two halves, for
        keys and for values, and each layer's state is in one half.
        """
        if self.recurrence is None:
            return 0
        most_in_a_half = -(-len(self.recurrence.layers) // 2) * self.recurrence.layer_state_bytes
        return -(-2 * most_in_a_half // layer_bytes)

    @property
    def modules(self) -> LayerModules | None:
        """The names of the layers' modules; None if they are those of Llama."""
        found = self.block.modules
        if found is None:
            return None
        recurrent = () if self.recurrence is None else self.recurrence.layers
        of_layers = replace(found, query_layers=self.query_layers, mlp_widths=self.intermediate_sizes)
        table = None if self.streams is None else self.streams.table_shape(self.num_layers)
        return replace(of_layers, recurrent_layers=recurrent, beside=tuple(self.model_shapes), input_table=table)

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer that LoRA can change, by name, such as "q_proj".

        Those of the MLP are absent if no layer has them, and those of the widest if they differ. The experts' own are not
        among them.
        """
        found = self._attention_shapes
        if self.recurrence is not None:
            found |= self.recurrence.target_shapes(self.hidden_size)
        if self.streams is not None:
            found |= self.streams.target_shapes(self.hidden_size) | self.model_shapes
        if self.experts is None or len(self.experts.shapes.layers) < self.num_layers:
            found |= self._dense_shapes(self.intermediate_size)
        return found if self.experts is None else found | self.experts.target_shapes

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The widths of the activations of all MLPs: dense ones, experts and shared experts."""
        if self.experts is None:
            return tuple(dict.fromkeys(self.intermediate_sizes or (self.intermediate_size,)))
        shapes, shared = self.experts.shapes, self.experts.shared
        widths = [self.intermediate_size] if len(shapes.layers) < self.num_layers else []
        widths += [shapes.intermediate_size] if self.experts.clamped is None else []
        widths += [] if shared is None else [shared.intermediate_size]
        return tuple(dict.fromkeys(widths))

    @property
    def model_shapes(self) -> dict[str, tuple[int, int]]:
        """Those of `target_shapes` that are beside the decoder layers, such as "altup_projections.0"."""
        return {} if self.streams is None else self.streams.model_shapes(self.hidden_size, self.num_layers)

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Returns those of `target_shapes` that one layer has."""
        found = self._attention_shapes
        if self.recurrence is not None and self.is_recurrent(layer):
            found = self.recurrence.target_shapes(self.hidden_size)
        if self.kv_source(layer) != layer:
            found = {target: shape for target, shape in found.items() if target not in ("k_proj", "v_proj")}
        if self.streams is not None:
            found |= self.streams.target_shapes(self.hidden_size)
        if self.experts is not None and self.is_routed(layer):
            return found | self.experts.target_shapes
        widths = self.intermediate_sizes
        return found | self._dense_shapes(widths[layer] if widths else self.intermediate_size)

    def is_recurrent(self, layer: int) -> bool:
        """Returns whether a layer has a recurrent state in place of keys and values."""
        return self.recurrence is not None and layer in self.recurrence.layers

    def is_routed(self, layer: int) -> bool:
        """Returns whether a layer has experts in place of a dense MLP."""
        return self.experts is not None and layer in self.experts.shapes.layers

    @property
    def _attention_shapes(self) -> dict[str, tuple[int, int]]:
        query = self.num_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden_size),
            "k_proj": (self.kv_width, self.hidden_size),
            "v_proj": (self.kv_width, self.hidden_size),
            "o_proj": (self.hidden_size, query),
        }

    def _dense_shapes(self, width: int) -> dict[str, tuple[int, int]]:
        hidden = self.hidden_size
        return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json from a model folder.

    Raises InvalidRequest if the file is missing, or if the model is not supported.
    """
    return parse_model_config(read_config_json(folder), folder)


def parse_model_config(found: dict[str, Any], folder: Path) -> ModelConfig:
    """Returns the configuration that the content of a config.json gives. `folder` may have a generation_config.json.

    Raises InvalidRequest if the model is not supported.
    """
    try:
        return _parse_model_config(found, folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refused(f"a setting has a value of the wrong kind ({error}): take the model's own file.") from error


def read_config_json(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json. Raises InvalidRequest if there is none."""
    return _read_json(folder / "config.json")


def _parse_model_config(found: dict[str, Any], folder: Path) -> ModelConfig:
    variant = _variant(found)
    found = unwrapped(found, variant)
    refuse_unknown(found, variant)
    raw = {**COMMON_DEFAULTS, **variant.defaults, **found}
    recurrence = read_recurrence(raw, variant.recurrence)
    raw |= {} if variant.recurrence is None else {"layer_types": None}
    _refuse_unsupported(raw, variant)
    heads = whole(raw, "num_attention_heads")
    sizes = {
        name: whole(raw, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    }
    kinds, widths = read_kinds(raw, variant.window_rule), read_mlp_widths(raw, variant)
    experts = read_experts(raw, variant.experts)
    is_mxfp4 = experts is not None and experts.is_mxfp4
    config = ModelConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=max(widths),
        intermediate_sizes=widths if len(set(widths)) > 1 else (),
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else whole(raw, "num_key_value_heads"),
        head_dim=raw["hidden_size"] // heads if raw.get("head_dim") is None else whole(raw, "head_dim"),
        rms_norm_eps=float(raw[variant.epsilon_setting]),
        ropes=read_ropes(raw, kinds, variant),
        biased_targets=_biased_targets(raw, variant),
        has_qk_norm=variant.has_qk_norm or bool(variant.qk_norm_setting and raw.get(variant.qk_norm_setting)),
        windows=read_windows(raw, kinds, variant.window_rule),
        tie_word_embeddings=raw["tie_word_embeddings"],
        context_tokens=sizes["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(folder, raw),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        block=variant.block,
        activation=_ACTIVATIONS[raw[variant.activation_setting]],
        scales=_scales(raw, variant),
        experts=experts,
        recurrence=recurrence,
        draft_layers=next((whole(raw, name, 0) for name in variant.draft_layers_settings if raw.get(name)), 0),
        quantization=None if is_mxfp4 else read_quantization(found, variant.inner_prefix),
        streams=read_streams(raw, has_streams=variant.has_streams),
        kv_sources=read_kv_sources(raw, kinds, variant.kv_sharing_setting),
        sparsity=read_sparsity(raw, variant.sparsity_setting),
        wrapper=variant.wrapper,
    )
    _check_heads(config)
    if config.recurrence is not None and config.quantization is not None:
        raise refused("quantized weights of a model with recurrent layers are not served: take its plain weights.")
    return config


def _check_heads(config: ModelConfig) -> None:
    """Raises InvalidRequest if the heads cannot be grouped or rotated."""
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise refused("num_attention_heads must be a multiple of num_key_value_heads, and head_dim even.")
    for rope in dict.fromkeys(config.ropes):
        if rope is None:
            continue
        rotated = rope.rotated_features(config.head_dim)
        if rotated % 2 or not rotated:
            raise refused(f"partial_rotary_factor {rope.share} rotates {rotated} features: the number must be even.")
        if isinstance(rope.scaling, LongScaling):
            lengths = {len(rope.scaling.short_factors), len(rope.scaling.long_factors)}
            if lengths != {rotated // 2}:
                raise refused(f"short_factor and long_factor must have {rotated // 2} numbers each.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_without_float_objects)
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path} does not exist: --model must name a Hugging Face folder.", param="model"
        ) from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", param="model") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} holds no JSON object: take the model's own file.", param="model")
    return content


def _without_float_objects(found: dict[str, Any]) -> Any:
    """Returns the number that an object of transformers stands for, such as {"__float__": "Infinity"}, which JSON lacks."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _variant(found: dict[str, Any]) -> ModelVariant:
    """Returns the architecture that config.json names."""
    architectures = found.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in SERVED_VARIANTS:
        raise refused(f"architectures {architectures} is not served; served is one of {', '.join(SERVED_VARIANTS)}.")
    variant = SERVED_VARIANTS[architectures[0]]
    expected = variant.model_type if variant.wrapper is None else variant.wrapper.model_type
    model_type = found.get("model_type", expected)
    if model_type != expected:
        raise refused(f"model_type {model_type!r} does not belong to {architectures[0]}: one of the two is wrong.")
    return variant


def _refuse_unsupported(raw: dict[str, Any], variant: ModelVariant) -> None:
    activation = raw[variant.activation_setting]
    problems = {
        f"{variant.activation_setting} {activation!r}": activation not in _ACTIVATIONS,
        "is_causal false": raw.get("is_causal", True) is False,
    }
    found = [name for name, applies in problems.items() if applies]
    if found:
        raise refused(f"this checkpoint uses what is not served: {'; '.join(found)}.")


def _scales(raw: dict[str, Any], variant: ModelVariant) -> Scales:
    """Reads the factors and caps of a model. A cap that is null is none."""
    found = {
        field: positive(raw, setting.name) ** setting.power
        for field, setting in variant.scales.items()
        if not (field.endswith("_cap") and raw.get(setting.name) is None)
    }
    return Scales(**found, rounds_embedding_scale=variant.rounds_embedding_scale)


def _biased_targets(raw: dict[str, Any], variant: ModelVariant) -> tuple[str, ...]:
    chosen = (targets for setting, targets in variant.biased_by_setting.items() if raw.get(setting))
    return variant.biased_targets + tuple(target for targets in chosen for target in targets)


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens: of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    token_ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise refused(f"eos_token_id must be a token id or a list of them, not {eos!r}.")
    return tuple(token_ids)
