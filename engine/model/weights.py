"""Reads the weights of a decoder from a model folder onto the device.

Owns the weights. Linear layers with the same input, such as q, k and v, are joined into one matrix. Never ignores a
tensor in the folder: a tensor that the model does not use is an error.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.block import NormKind
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.expert_reader import ExpertReader
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear, DenseWeights, MlpWeights, joined_linear, placed
from graftwork.engine.model.part_weights import (
    LayerStreamWeights,
    RecurrentWeights,
    StreamWeights,
    read_layer_streams,
    read_recurrent_weights,
    read_stream_weights,
)
from graftwork.engine.model.projections import (
    GROUPS,
    HEAD_LAYER,
    MODEL_LAYER,
    ProjectionGroup,
    groups_with,
    joined_projections,
    model_groups,
    stored_inputs,
    stored_width,
)
from graftwork.engine.model.weight_reader import (
    TensorSource,
    WeightReader,
    loading_threads,
    read_as_stored,
    read_plain,
    skip_zero_bias,
)
from graftwork.engine.quantization.linear import LinearWeight, QuantizedLinear, StepKinds
from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Linear layers with the same input, such as q, k and v, are joined into one.

    A norm is None if the layer has none in its place (see block.py). Norms are of the model's dtype or fp32, by NormKind.
    A recurrent layer has its recurrent part in the place of attention.
    """

    attention_norm: torch.Tensor | None  # [hidden], of attention's input
    qkv: AnyLinear  # [query + 2 * kv_width, hidden], or [query, hidden]; in_proj of a recurrent layer
    qk_norm: torch.Tensor | None  # [normalised heads, head_dim]: a row for each head of queries, keys and values
    output: AnyLinear  # [hidden, query]; out_proj of a recurrent layer
    mlp_norm: torch.Tensor | None  # [hidden], of the MLP's input
    mlp: MlpWeights
    attention_post_norm: torch.Tensor | None = None  # [hidden], of attention's output
    mlp_post_norm: torch.Tensor | None = None  # [hidden], of the MLP's output
    wide_qk_norm: tuple[torch.Tensor, torch.Tensor] | None = None  # [query] and [kv_width]
    sinks: torch.Tensor | None = None  # [heads] fp32, one logit of each head (see BlockSpec.has_sinks)
    recurrent: RecurrentWeights | None = None  # None for a layer with attention
    streams: LayerStreamWeights | None = None  # None if the model has one residual stream

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        """All norms of the layer."""
        found = (self.attention_norm, self.qk_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm)
        return (*(norm for norm in found if norm is not None), *(self.wide_qk_norm or ()))

    @property
    def others(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the layer that belong to no linear layer."""
        recurrent = () if self.recurrent is None else self.recurrent.tensors
        streams = () if self.streams is None else self.streams.tensors
        sinks = () if self.sinks is None else (self.sinks,)
        return (*self.norms, *self.mlp.others, *recurrent, *streams, *sinks)

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        """All linear layers of the layer."""
        return self.qkv, self.output, *self.mlp.linears, *(() if self.streams is None else self.streams.linears)

    def group(self, name: str) -> AnyLinear:
        """Returns one joined linear layer by its name, such as "qkv", "o" or "gate_up" (see projections.py)."""
        names = ("qkv", "o") if self.recurrent is None else ("recurrent_in", "recurrent_out")
        own = dict(zip(names, (self.qkv, self.output), strict=True))
        own |= {} if self.streams is None else self.streams.by_group
        return own[name] if name in own else self.mlp.group(name)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, on the device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    layer_shapes: tuple[dict[str, tuple[int, int]], ...]
    """For each layer, the pair (out_features, in_features) of each of its LoRA targets."""
    norm: torch.Tensor  # [hidden]
    head: AnyLinear  # [vocab, hidden]; the embedding itself if the two are tied
    step_kinds: StepKinds = field(default_factory=StepKinds)
    """Which rows of the step decode, for quantised layers."""
    streams: StreamWeights | None = None
    """What is around the layers if there are several residual streams."""
    model_shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The same of LoRA targets beside the layers."""

    def groups(self, layer: int) -> tuple[ProjectionGroup, ...]:
        """Returns the groups of linear layers that a layer has, or that are beside the layers (MODEL_LAYER)."""
        return model_groups(self.model_shapes) if layer == MODEL_LAYER else groups_with(self.layer_shapes[layer])

    def module(self, layer: int, target: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight and the bias of one linear layer that LoRA can change, such as "q_proj" in layer 3.

        The output head has `layer` HEAD_LAYER and `target` "lm_head".
        """
        if layer == HEAD_LAYER:
            return self.head.weight, None
        if layer == MODEL_LAYER:
            assert self.streams is not None
            return self.streams.by_group[target].rows(0, self.model_shapes[target][0])
        group = next(group for group in GROUPS if target in group.targets)
        shapes = self.layer_shapes[layer]
        start = sum(shapes[other][0] for other in group.targets[: group.targets.index(target)])
        weight, bias = self.layers[layer].group(group.name).rows(start, start + shapes[target][0])
        return weight[:, : shapes[target][1]], bias

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        """Returns (out_features, in_features) of one linear layer that LoRA can change, such as "q_proj" in layer 3.

        The output head has `layer` HEAD_LAYER and `target` "lm_head".
        """
        if layer == HEAD_LAYER:
            return self.head.out_features, self.embedding.shape[1]
        return (self.model_shapes if layer == MODEL_LAYER else self.layer_shapes[layer])[target]

    @property
    def sinks(self) -> tuple[torch.Tensor, ...] | None:
        """The attention sinks of each layer. None if the model has none."""
        found = tuple(layer.sinks for layer in self.layers if layer.sinks is not None)
        return found or None

    @property
    def quantized_linears(self) -> list[QuantizedLinear]:
        """The linear layers with quantised weights, those of experts and the output head too."""
        return [linear for linear in (self.head, *self._linears) if isinstance(linear, QuantizedLinear)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights. A head that shares the embedding's memory does not count twice."""
        tensors = [self.embedding, self.norm, *(tensor for layer in self.layers for tensor in layer.others)]
        tensors += [] if self.streams is None else self.streams.tensors
        linears = [*self._linears] if self.head.shares(self.embedding) else [self.head, *self._linears]
        return sum(tensor.nbytes for tensor in tensors) + sum(linear.num_bytes for linear in linears)

    @property
    def _linears(self) -> Iterator[AnyLinear]:
        """All linear layers but the output head."""
        for layer in self.layers:
            yield from layer.linears
        if self.streams is not None:
            yield from self.streams.linears


def open_weights(folder: Path, config: ModelConfig) -> WeightReader:
    """Opens the weight files of a model. `config` is the whole model. Raises InvalidRequest as WeightReader does."""
    renamed = None if config.experts is None else config.experts.file_names
    return WeightReader(folder, joined_projections(config), config.quantization, renamed, config.wrapper)


def load_decoder_weights(
    reader: TensorSource, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Reads all weights of a model onto the device, in `dtype`. Joins linear layers with the same input.

    Several threads read layers at the same time, because one of them copies more slowly than memory can. The weights of
    linear layers are stored in blocks, where that is faster (see Linear.pack): an output head that shares its weight with
    the embedding then has a copy of its own. Products have no more rows at once than keep the bits of a row on this machine.

    Raises InvalidRequest if a tensor is missing, has another shape, or is not part of the model. The error names the
    tensor.
    """
    tensors = _TensorReader(reader, config, device, dtype, StepKinds())
    embedding = tensors.read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    with ThreadPoolExecutor(loading_threads(), thread_name_prefix="weights") as threads:
        try:
            layers = tuple(threads.map(tensors.packed_layer, range(config.num_layers)))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        layer_shapes=tuple(map(config.layer_shapes, range(config.num_layers))),
        norm=tensors.norm("model.norm", config.hidden_size),
        head=joined_linear([tensors.head(embedding)], None, dtype, StepKinds()),
        step_kinds=tensors.step_kinds,
        streams=None if config.streams is None else read_stream_weights(tensors),
        model_shapes=config.model_shapes,
    )
    _refuse_leftovers(reader, config)
    reader.close()
    for linear in (weights.head, *(() if weights.streams is None else weights.streams.linears)):
        _pack(linear)
    return weights


def _pack(linear: AnyLinear) -> None:
    linear.limit_rows(BatchInvariance.of(linear.dtype, linear.device).rows_at_once(linear.in_features))
    linear.pack()


@dataclass(frozen=True, slots=True)
class _TensorReader:
    """Reads tensors with the shapes that the configuration gives them."""

    reader: TensorSource
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    step_kinds: StepKinds

    def read(self, name: str, *shape: int) -> torch.Tensor:
        return self.reader.read(name, shape).to(self.device, self.dtype)

    def fused(self, prefix: str, layer: int, *targets: str) -> AnyLinear:
        """Reads those linear layers of `targets` that a layer has, as one."""
        of_layer = self.config.layer_shapes(layer)
        targets = tuple(target for target in targets if target in of_layer)
        shapes = [of_layer[target] for target in targets]
        weights = [
            placed(self.reader.linear(f"{prefix}.{target}", shape), self.device, self.dtype)
            for target, shape in zip(targets, shapes, strict=True)
        ]
        if not set(targets) & set(self.config.biased_targets):
            if self.config.quantization is not None:
                for target, shape in zip(targets, shapes, strict=True):
                    skip_zero_bias(self.reader, f"{prefix}.{target}", shape[0])
            return joined_linear(weights, None, self.dtype, self.step_kinds)
        biases = [self.read(f"{prefix}.{target}.bias", shape[0]) for target, shape in zip(targets, shapes, strict=True)]
        return joined_linear(weights, torch.cat(biases), self.dtype, self.step_kinds)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Reads the weights of one norm. They are fp32 if the norm rounds only once."""
        weight = self.reader.read(f"{name}.weight", (size,))
        block = self.config.block
        if block.norm is not NormKind.RMS:
            return (weight.float() + block.norm_offset).to(self.device)
        return weight.to(self.device, self.dtype)

    def packed_layer(self, index: int) -> LayerWeights:
        """Reads one layer, with its linear layers in blocks where that is faster."""
        layer = self.layer(index)
        for linear in layer.linears:
            _pack(linear)
        return layer

    def layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, block = f"{prefix}.self_attn", self.config.block

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else self.norm(f"{prefix}.{name}", self.config.hidden_size)

        if self.config.is_recurrent(index):
            return self.recurrent_layer(index, norm)
        return LayerWeights(
            attention_norm=norm(block.norms.before_attention),
            qkv=self.fused(attention, index, "q_proj", "k_proj", "v_proj"),
            qk_norm=self.qk_norm(attention, index) if self.config.has_qk_norm else None,
            output=self.fused(attention, index, "o_proj"),
            mlp_norm=norm(block.norms.before_mlp),
            mlp=self.mlp(index),
            attention_post_norm=norm(block.norms.after_attention),
            mlp_post_norm=norm(block.norms.after_mlp),
            wide_qk_norm=self.wide_qk_norm(attention) if block.has_wide_qk_norm else None,
            sinks=self.read(f"{attention}.sinks", self.config.num_heads).float() if block.has_sinks else None,
            streams=None if self.config.streams is None else read_layer_streams(self, index),
        )

    def recurrent_layer(self, index: int, norm: Callable[[str | None], torch.Tensor | None]) -> LayerWeights:
        """Reads a recurrent layer. `norm` reads one of its norms."""
        config, names = self.config, self.config.block.norms
        assert config.recurrence is not None
        assert config.modules is not None, "an architecture with recurrent layers names its modules"
        prefix = f"model.layers.{index}.{config.modules.recurrent}"
        return LayerWeights(
            attention_norm=norm(names.before_attention),
            qkv=self.fused(prefix, index, "in_proj"),
            qk_norm=None,
            output=self.fused(prefix, index, "out_proj"),
            mlp_norm=norm(names.before_mlp),
            mlp=self.mlp(index),
            attention_post_norm=norm(names.after_attention),
            mlp_post_norm=norm(names.after_mlp),
            recurrent=read_recurrent_weights(self.reader, prefix, config.recurrence, self.device, self.dtype),
        )

    def mlp(self, index: int) -> MlpWeights:
        if self.config.is_routed(index):
            return ExpertReader(self.reader, self.config, self.device, self.dtype, self.step_kinds).layer(index)
        modules = self.config.modules
        prefix = f"model.layers.{index}.{'mlp' if modules is None else modules.mlp}"
        gate_up = self.fused(prefix, index, "gate_proj", "up_proj")
        return DenseWeights(gate_up, self.fused(prefix, index, "down_proj"))

    def qk_norm(self, prefix: str, index: int) -> torch.Tensor:
        config, kv_heads = self.config, self.config.num_kv_heads
        query = self.norm(f"{prefix}.q_norm", config.head_dim)
        rows = [query.expand(config.num_heads, -1)]
        if config.kv_source(index) == index:
            rows.append(self.norm(f"{prefix}.k_norm", config.head_dim).expand(kv_heads, -1))
            rows += [torch.ones_like(query).expand(kv_heads, -1)] if config.block.has_value_norm else []
        return torch.cat(rows)

    def linear(self, module: str, shape: tuple[int, int]) -> AnyLinear:
        weight = placed(read_as_stored(self.reader, self.config.quantization, module, shape), self.device, self.dtype)
        if self.config.quantization is not None:
            skip_zero_bias(self.reader, module, shape[0])
        return joined_linear([weight], None, self.dtype, self.step_kinds)

    def narrow(self, module: str, shape: tuple[int, int]) -> Linear:
        weight, target = read_plain(self.reader, module, shape).to(self.device, self.dtype), module.rpartition(".")[2]
        outputs, inputs = stored_width(target, shape[0]), stored_inputs(target, shape[1])
        return Linear(functional.pad(weight, (0, inputs - shape[1], 0, outputs - shape[0])))

    def wide_qk_norm(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        query = self.norm(f"{prefix}.q_norm", self.config.num_heads * self.config.head_dim)
        return query, self.norm(f"{prefix}.k_norm", self.config.kv_width)

    def head(self, embedding: torch.Tensor) -> LinearWeight:
        """Returns the output head.

        If head and embedding are tied, this is the embedding, although some files store both.
        """
        if self.config.tie_word_embeddings and "lm_head.weight" not in self.reader:
            return embedding
        if not self.config.tie_word_embeddings:
            shape = self.config.vocab_size, self.config.hidden_size
            return placed(self.reader.linear("lm_head", shape), self.device, self.dtype)
        head = self.read("lm_head.weight", self.config.vocab_size, self.config.hidden_size)
        if not torch.equal(head, embedding):
            raise InvalidRequest(
                "The checkpoint ties lm_head.weight to the embedding, but holds another: "
                "set tie_word_embeddings to false in config.json, or remove the tensor.",
                param="model",
            )
        return embedding


def _refuse_leftovers(reader: TensorSource, config: ModelConfig) -> None:
    """Raises InvalidRequest if a tensor was not read, because the output would be wrong without it.

    Ignores the rotary frequencies of older files, second copies of the weights under a vendor's names, layers that are
    for drafts alone, and keys and values that layers have in files but read from other layers.
    """
    drafting = range(config.num_layers, config.num_layers + config.draft_layers)
    known = [f"model.layers.{layer}." for layer in drafting]
    for layer in config.query_layers:
        known += [f"model.layers.{layer}.self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm")]
    left = sorted(
        name
        for name in reader.unread
        if name.startswith(("model.", "lm_head."))
        and not name.endswith("rotary_emb.inv_freq")
        and not name.startswith(tuple(known))
    )
    if left:
        raise InvalidRequest(
            f"The checkpoint holds {len(left)} tensors that its config.json has no use for, {left[0]!r} among them: "
            "one of the two belongs to another model.",
            param="model",
        )
