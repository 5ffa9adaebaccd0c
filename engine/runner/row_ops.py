"""Defines the row operations: what a decoder layer computes besides matrix products, LoRA and attention.

A row is one token of a step. The operations are the norms, the rotation of queries and keys, the write of keys and
values into the pages of the KV cache, and the activation of the MLP. RowOps is the interface. TorchRowOps computes them
in torch, on any device; it is the reference of all other implementations.

Never owns the pages: the KV cache does. Never writes KV while the layer's pages are still being copied to the device:
waits for the copy. Invariant: a page is set to zero before its first token is written, so masked positions never hold
old values or NaN.
"""

from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import RotaryTable
from graftwork.engine.runner.input_batch import BatchTensors


class StepRows(Protocol):
    """The row operations that depend on where the rows of one step stand: their positions and their pages."""

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        """Writes the keys and values of a step's tokens into their pages. Returns the queries, ready for attention.

        First normalises each head of queries and keys by `qk_norm`, [heads + kv_heads, head_dim], if the model has such
        norms. Then rotates queries and keys by their positions. Pages that the step begins are zeroed before.

        qkv: [num_tokens, (heads + 2 * kv_heads) * head_dim]. Its rows may have any stride. The operation may overwrite
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
        """Returns the RMS norm of each row of x, multiplied by `weight`, [features]."""
        ...

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden + delta, and its RMS norm multiplied by `weight`, [features].

        May overwrite `hidden`, so the caller must go on with the first result.
        """
        ...

    def add(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Returns hidden + delta. May overwrite either."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up. gate_up: [num_tokens, 2 * intermediate], gates first; rows may have any stride."""
        ...


class TorchRowOps:
    """Computes the row operations in torch."""

    def __init__(self, config: ModelConfig, rotary: RotaryTable, cache: KvCache) -> None:
        self._config = config
        self._rotary = rotary
        self._cache = cache

    def plan(self, batch: BatchTensors) -> "TorchStepRows":
        return TorchStepRows(self._config, self._rotary, self._cache, batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + delta
        return total, self.norm(total, weight)

    def add(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return hidden + delta

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up


class TorchStepRows:
    """Rotates the rows of one step and writes their KV, in torch."""

    def __init__(self, config: ModelConfig, rotary: RotaryTable, cache: KvCache, batch: BatchTensors) -> None:
        self._config = config
        self._rotary = rotary
        self._cache = cache
        self._batch = batch
        self._begins_pages = len(batch.begun_pages) > 0
        self._cos, self._sin = rotary.at(batch.positions)  # each [num_tokens, 1, head_dim]

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [num_tokens, heads + 2 * kv_heads, head_dim]
        num_rotated = config.num_heads + config.num_kv_heads
        queries_and_keys, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if qk_norm is not None:
            queries_and_keys = rms_norm(queries_and_keys, qk_norm, config.rms_norm_eps)
        rotated = self._rotary.rotate(queries_and_keys, self._cos, self._sin)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        self._cache.gates.wait(layer)
        keys, values = self._cache.layer(layer)  # each [frames, page_tokens, kv_heads, head_dim]
        self._write(keys, key)
        self._write(values, value)
        return query

    def _write(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        if self._begins_pages:
            pages.index_fill_(0, self._batch.begun_pages, 0)
        pages.index_put_((self._batch.row_pages, self._batch.row_offsets), rows)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides x by the root mean square of its last dimension, and multiplies it by `weight`. Keeps the dtype of x.

    Rounds to the dtype of x before the multiplication, as transformers does. torch's function, if it gets the weight
    too, rounds after the multiplication; then a quarter of all bf16 values would differ.
    """
    return functional.rms_norm(x, (x.shape[-1],), eps=epsilon) * weight
