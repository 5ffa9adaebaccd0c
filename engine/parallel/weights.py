"""Reads one rank's part of a model's weights, and reads whole layers for adapters that need them.

Reads only the rank's own part from the memory-mapped files, so that starting takes no memory for the other parts.
"""

import re

import torch

from graftwork.engine.lora.fuse import Module
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import HEAD_LAYER, ProjectionGroup, layer_groups
from graftwork.engine.model.weight_reader import WeightReader
from graftwork.engine.parallel.ranks import Rank, part_of
from graftwork.engine.quantization.linear import LinearWeight
from graftwork.engine.quantization.weight import QuantizedWeight
from graftwork.platform.errors import InvalidRequest

_HEAD_MODULE = "lm_head"
_HEAD = f"{_HEAD_MODULE}.weight"
_PROJECTION = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+_proj)\.(weight|bias)")
_WIDE_NORM = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_norm\.weight")
_BLOCK_BY_TARGET = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn")


class RankReader:
    """Gives one rank its parts of the tensors of a checkpoint, as a TensorSource.

    The rank asks with the shapes of its own part. A bias of a row-parallel projection is added once, by rank 0: the other
    ranks get zeros. Only rank 0 has an output head: that of the others has no rows, unless it is the embedding.
    """

    def __init__(self, reader: WeightReader, model: ModelConfig, rank: Rank) -> None:
        """`model` is the whole model."""
        self._reader = reader
        self._model = model
        self._rank = rank

    def __contains__(self, name: str) -> bool:
        return name in self._reader and (self._rank.leads or name != _HEAD)

    @property
    def unread(self) -> frozenset[str]:
        unread = self._reader.unread
        if self._rank.leads:
            return unread
        return frozenset(name for name in unread if name.rpartition(".")[0] != _HEAD_MODULE)

    def linear(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        """Reads the rank's part of a linear layer's weight.

        Raises InvalidRequest if a group of quantised weights would be divided.
        """
        if not self._reader.quantizes(module) or (module == _HEAD_MODULE and not self._rank.leads):
            return self.read(f"{module}.weight", shape)
        if module == _HEAD_MODULE:
            return self._reader.linear(module, shape)
        target = module.rpartition(".")[2]
        part, whole = part_of(target, self._model, self._rank), self._model.target_shapes[target]
        weight = self._reader.linear(module, whole)
        assert isinstance(weight, QuantizedWeight)
        own = weight.rows(part.start, part.end) if part.dim == 0 else weight.columns(part.start, part.end)
        if own is None:
            raise InvalidRequest(
                f"--tensor-parallel {self._rank.size} divides the {whole[1]} input features of {module} within a group of "
                "quantised weights: give fewer devices, or take a checkpoint without desc_act and with smaller groups.",
                param="tensor_parallel",
            )
        return own

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == _HEAD and not self._rank.leads:
            return torch.empty(0, *shape[1:], dtype=torch.float32)
        found = _PROJECTION.fullmatch(name)
        if found is None:
            return self._read_norm(name, shape)
        target, kind = found.groups()
        part = part_of(target, self._model, self._rank)
        whole = self._model.target_shapes[target]
        if kind == "weight":
            return self._reader.read(name, whole, part)
        if part.dim == 0:
            return self._reader.read(name, whole[:1], part)
        bias = self._reader.read(name, whole[:1])
        return bias if self._rank.leads else torch.zeros_like(bias)

    def close(self) -> None:
        self._reader.close()

    def read_bytes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._reader.read_bytes(name, shape)

    def _read_norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads a tensor that is whole on each rank, or the rank's part of a norm over all queries or keys."""
        found = _WIDE_NORM.fullmatch(name)
        if found is None or not self._model.block.has_wide_qk_norm:
            return self._reader.read(name, shape)
        target = f"{found[1]}_proj"
        return self._reader.read(name, self._model.target_shapes[target][:1], part_of(target, self._model, self._rank))


class CheckpointModules:
    """Reads whole linear layers of the base model from its files, as BaseModules. No rank has them in memory.

    Any thread may use it. Only adapters with DoRA or trained biases, and the check of an upload, need it.
    """

    def __init__(self, reader: WeightReader, model: ModelConfig, dtype: torch.dtype) -> None:
        """`dtype` is the dtype in which the engine holds its weights."""
        self._reader = reader
        self._model = model
        self._dtype = dtype

    def groups(self, layer: int) -> tuple[ProjectionGroup, ...]:
        return layer_groups(self._model, layer)

    def module(self, layer: int, target: str) -> Module:
        if layer == HEAD_LAYER and self._model.tie_word_embeddings:
            return self._read("model.embed_tokens.weight", *self.shape(layer, target)), None
        if layer == HEAD_LAYER:
            return self._linear(_HEAD_MODULE, self.shape(layer, target)), None
        prefix = f"model.layers.{layer}.{_BLOCK_BY_TARGET.get(target, 'mlp')}.{target}"
        shape = self.shape(layer, target)
        bias = self._read(f"{prefix}.bias", shape[0]) if target in self._model.biased_targets else None
        return self._linear(prefix, shape), bias

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        if layer == HEAD_LAYER:
            return self._model.vocab_size, self._model.hidden_size
        return self._model.target_shapes[target]

    def _linear(self, module: str, shape: tuple[int, int]) -> torch.Tensor:
        weight = self._reader.linear(module, shape)
        return weight.to(self._dtype) if isinstance(weight, torch.Tensor) else weight.dense(self._dtype)

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader.read(name, shape).to(self._dtype)
