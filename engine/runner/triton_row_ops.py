"""Computes the row operations by Triton kernels, for CUDA devices: one launch for each operation.

The kernels and what is exact in them are described in engine/kernels: norm.py, rotary.py and activation.py. Rounds
where TorchRowOps rounds.
"""

import torch

from graftwork.engine.kernels.activation import activate_launch
from graftwork.engine.kernels.norm import add_norm_launch
from graftwork.engine.kernels.rotary import HeadNorm, RowPlaces, rotate_and_store_launch
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import RotaryTable
from graftwork.engine.runner.input_batch import BatchTensors


class TritonRowOps:
    """Computes the row operations by Triton kernels."""

    def __init__(self, config: ModelConfig, rotary: RotaryTable, cache: KvCache) -> None:
        self._config = config
        self._rotary = rotary
        self._cache = cache

    def plan(self, batch: BatchTensors) -> "TritonStepRows":
        if self._cache.device.type == "cuda":
            torch.cuda.set_device(self._cache.device)  # Triton launches on the thread's current device
        rows = RowPlaces(batch.positions, batch.row_pages, batch.row_offsets)
        return TritonStepRows(self._config, self._rotary, self._cache, rows)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        add_norm_launch(x, None, weight, normed, self._config.rms_norm_eps).run()
        return normed

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        add_norm_launch(hidden, delta, weight, normed, self._config.rms_norm_eps).run()
        return hidden, normed

    def add(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return hidden + delta

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens, width = gate_up.shape
        inner = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        activate_launch(gate_up, inner, "silu").run()
        return inner


class TritonStepRows:
    """Rotates the rows of one step and writes their KV, by one kernel."""

    def __init__(self, config: ModelConfig, rotary: RotaryTable, cache: KvCache, rows: RowPlaces) -> None:
        self._config = config
        self._table = (rotary.cosines, rotary.sines)
        self._cache = cache
        self._rows = rows

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        query = torch.empty((len(qkv), config.num_heads, config.head_dim), dtype=qkv.dtype, device=qkv.device)
        norm = None if qk_norm is None else HeadNorm(qk_norm, config.rms_norm_eps)
        self._cache.gates.wait(layer)
        rotate_and_store_launch(qkv, query, self._cache.layer(layer), self._table, self._rows, norm).run()
        return query
