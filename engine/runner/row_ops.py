"""Defines the row operations: what a decoder layer computes besides matrix products, LoRA and attention.

A row is one token of a step. The operations are the norms, the rotation of queries and keys, the write of keys and
values into the pages of the KV cache, and the activation of the MLP. RowOps is the interface. TorchRowOps computes them
in torch, on any device; it is the reference of all other implementations.

Never owns the pages: the KV cache does. Never writes KV while the layer's pages are still being copied to the device:
waits for the copy. Invariant: a page is set to zero before its first token is written, so masked positions never hold
old values or NaN.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.kv_format import StoredKv
from graftwork.engine.model.block import Activation, NormKind
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.runner.input_batch import BatchTensors


class StepRows(Protocol):
    """The row operations that depend on where the rows of one step stand: their positions and their pages."""

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Writes the keys and values of a step's tokens into their pages. Returns the queries, ready for attention.

        First normalises each head of queries and keys by `qk_norm`, [heads + kv_heads, head_dim], if the model has such
        norms, and those of the values if it has rows of ones for them. Then rotates queries and keys by their positions,
        if the layer rotates. Pages that the step begins are zeroed before.

        qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim]. A layer that reads the keys and values of another one has
        queries alone, in qkv and in `qk_norm`, and nothing is written. Its rows may have any stride. The operation may overwrite
        it. Returns [num_tokens, heads, head_dim] in the dtype of qkv.

        Waits for the layer's copies to the device. Raises LoadFailed if a KV page could not be copied.
        """
        ...


class RowOps(Protocol):
    """The row operations of one model on one device. Inputs and results are [num_tokens, features] in one dtype."""

    def plan(self, batch: BatchTensors) -> StepRows:
        """Prepares one step. The result is used for all layers of this step."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the norm of each row of x, of the model's kind. weight: [features]."""
        ...

    def norm_wide(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Normalises all queries of a token together, and all its keys, in place.

        qkv: [num_tokens, query + 2 * kv_width]; weights: [query] and [kv_width]. If other ranks have further heads,
        `average` replaces mean squares, fp32 [num_tokens, 2], by their means over the ranks.
        """
        ...

    def add_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden + delta, and the norm of this sum by `weight`, [features]. Without a weight, the sum twice.

        With `post_weight`, [features], the norm of delta is added instead of delta. If the model scales what is added,
        it is scaled. May overwrite `hidden`, so the caller must go on with the first result.
        """
        ...

    def add(self, hidden: torch.Tensor, delta: torch.Tensor, post_weight: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the first result of `add_norm`. May overwrite either tensor."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns activation(gate) * up, with the model's activation.

        gate_up: [num_tokens, 2 * intermediate], gates first; rows may have any stride.
        """
        ...


class TorchRowOps:
    """Computes the row operations in torch."""

    def __init__(self, config: ModelConfig, rotary: RotaryTables, cache: KvCache) -> None:
        self._config = config
        self._rotary = rotary
        self._cache = cache
        self._norm = NORMS[config.block.norm]
        self._activation = _ACTIVATIONS[config.activation]
        self._scale = None if config.scales.residual == 1.0 else config.scales.residual

    def plan(self, batch: BatchTensors) -> "TorchStepRows":
        return TorchStepRows(self._config, self._rotary, self._cache, batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._norm(x, weight, self._config.rms_norm_eps)

    def norm_wide(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        norm_wide(qkv, weights, self._config.rms_norm_eps, average)

    def add_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if post_weight is not None or self._scale is not None:
            total = self.add(hidden, delta, post_weight)
        else:
            total = hidden + delta
        return total, total if weight is None else self._norm(total, weight, self._config.rms_norm_eps)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor, post_weight: torch.Tensor | None = None) -> torch.Tensor:
        if post_weight is not None:
            delta = self.norm(delta, post_weight)
        if self._scale is not None:
            delta = delta * self._scale
        return hidden + delta

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return self._activation(gate) * up


class TorchStepRows:
    """Rotates the rows of one step and writes their KV, in torch."""

    def __init__(self, config: ModelConfig, rotary: RotaryTables, cache: KvCache, batch: BatchTensors) -> None:
        self._config = config
        self._tables = rotary.by_layer
        self._cache = cache
        self._batch = batch
        self._begins_pages = len(batch.begun_pages) > 0
        self._row_pages, self._begun_pages = batch.row_pages_by_group, batch.begun_pages_by_group
        has_far = batch.last_position >= config.context_tokens
        self._angles = rotary.at(batch.positions, has_far=has_far)  # by table, [num_tokens, 1, rotated features] twice
        self._query_layers = frozenset(config.query_layers)

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [num_tokens, heads + 2 * kv_heads, head_dim]
        has_keys = layer not in self._query_layers
        num_rotated = config.num_heads + config.num_kv_heads if has_keys else config.num_heads
        if config.block.has_value_norm:
            assert qk_norm is not None, "a model that normalises values normalises queries and keys"
            heads, qk_norm = NORMS[config.block.norm](heads, qk_norm, config.rms_norm_eps), None
        queries_and_keys, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if qk_norm is not None:
            queries_and_keys = NORMS[config.block.norm](queries_and_keys, qk_norm, config.rms_norm_eps)
        table = self._tables[layer]
        if table is not None:
            queries_and_keys = table.rotate(queries_and_keys, *self._angles[table])
        if not has_keys:
            return queries_and_keys
        query, key = queries_and_keys[:, : config.num_heads], queries_and_keys[:, config.num_heads :]
        self._cache.gates.wait(layer)
        keys, values = self._cache.stored(layer)
        group = self._cache.group_of[layer]
        self._write(keys, key, group)
        self._write(values, value, group)
        return query

    def _write(self, pages: StoredKv, rows: torch.Tensor, group: int) -> None:
        if self._begins_pages:
            pages.zero(self._begun_pages[group])
        pages.put((self._row_pages[group], self._batch.row_offsets), self._cache.format.encode(rows))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides x by the root mean square of its last dimension, and multiplies it by `weight`. Keeps the dtype of x.

    Rounds to the dtype of x before the multiplication, as transformers does. torch's function, if it gets the weight
    too, rounds after the multiplication; then a quarter of all bf16 values would differ.
    """
    return functional.rms_norm(x, (x.shape[-1],), eps=epsilon) * weight


def rms_norm_rounded_once(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides x by the root mean square of its last dimension, and multiplies it by `weight`, fp32. Rounds at the end."""
    return (functional.rms_norm(x.float(), (x.shape[-1],), eps=epsilon) * weight).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Subtracts from x the mean of its last dimension, divides it by the deviation, and multiplies it by `weight`, fp32.
    Rounds at the end.
    """
    return functional.layer_norm(x.float(), (x.shape[-1],), weight, eps=epsilon).to(x.dtype)


NORMS: dict[NormKind, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    NormKind.RMS: rms_norm,
    NormKind.RMS_ROUNDED_ONCE: rms_norm_rounded_once,
    NormKind.LAYER: layer_norm,
}
"""The function of each kind of norm: of x, the weight and the epsilon."""


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: _gelu_tanh,
}


def norm_wide(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    epsilon: float,
    average: Callable[[torch.Tensor], None] | None,
) -> None:
    """Computes RowOps.norm_wide in torch. Rounds at the end."""
    width, whole = len(weights[0]), sum(map(len, weights))
    parts = qkv[:, :width], qkv[:, width:whole]
    if average is None:
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(rms_norm_rounded_once(part, weight, epsilon))
        return
    squares = torch.stack([part.float().square().mean(dim=1) for part in parts], dim=1)  # [num_tokens, 2]
    average(squares)
    factors = torch.rsqrt(squares + epsilon)
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        part.copy_(part.float() * factors[:, index, None] * weight)
