"""Computes the row operations by Triton kernels, for CUDA devices: one launch for each operation.

The kernels and what is exact in them are described in engine/kernels: norm.py, rotary.py, angles.py and activation.py.
Rounds where TorchRowOps rounds.
"""

from collections.abc import Callable

import torch

from graftwork.engine.kernels.activation import activate_launch
from graftwork.engine.kernels.angles import Rotation, RowAngles, step_angles_launch
from graftwork.engine.kernels.norm import NormRules, add_norm_launch, norm_launch
from graftwork.engine.kernels.rotary import HeadNorm, KvPages, RotaryAngles, RowPlaces, rotate_and_store_launch
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rotary import RotaryTable, RotaryTables
from graftwork.engine.runner.input_batch import BatchTensors
from graftwork.engine.runner.row_ops import norm_wide


class TritonRowOps:
    """Computes the row operations by Triton kernels."""

    def __init__(self, config: ModelConfig, rotary: RotaryTables, cache: KvCache) -> None:
        self._config = config
        self._tables = rotary.by_layer
        self._angles = [
            None if table is None else RotaryAngles(table.cosines, table.sines, table.is_interleaved)
            for table in rotary.by_layer
        ]
        self._cache = cache
        self._rules = NormRules(config.rms_norm_eps, config.block.norm.value, config.scales.residual)
        self._activation = config.activation.value

    def plan(self, batch: BatchTensors) -> "TritonStepRows":
        if self._cache.device.type == "cuda":
            torch.cuda.set_device(self._cache.device)  # Triton launches on the thread's current device
        angles, positions = self._angles, batch.positions
        if batch.last_position >= self._config.context_tokens:
            angles = self._angles_of_rows(positions)
            positions = torch.arange(len(positions), dtype=positions.dtype, device=positions.device)
        rows = [RowPlaces(positions, pages, batch.row_offsets) for pages in batch.row_pages_by_group]
        return TritonStepRows(self._config, angles, self._cache, rows)

    def _angles_of_rows(self, positions: torch.Tensor) -> list[RotaryAngles | None]:
        """Returns tables of the layers for the rows of one step, whose positions may be behind the context. One launch for each
        rotary embedding.
        """
        made: dict[RotaryTable, RotaryAngles] = {}
        for table in dict.fromkeys(self._tables):
            if table is not None:
                rotation = Rotation(table.frequencies, table.is_interleaved, table.factor)
                angles = RowAngles.empty(rotation, len(positions))
                step_angles_launch(angles, rotation, positions, (table.cosines, table.sines)).run()
                made[table] = RotaryAngles(angles.cosines, angles.sines, table.is_interleaved)
        return [None if table is None else made[table] for table in self._tables]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm_launch(x, weight, normed, self._rules).run()
        return normed

    def norm_wide(
        self,
        qkv: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if average is not None:
            norm_wide(qkv, weights, self._rules.epsilon, average)
            return
        start = 0
        for weight in weights:
            part = qkv[:, start : start + len(weight)]
            norm_launch(part, weight, part, self._rules).run()
            start += len(weight)

    def add_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor | None,
        post_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = None if weight is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        add_norm_launch(hidden, delta, (post_weight, weight), normed, self._rules).run()
        return hidden, hidden if normed is None else normed

    def add(self, hidden: torch.Tensor, delta: torch.Tensor, post_weight: torch.Tensor | None = None) -> torch.Tensor:
        if post_weight is None and self._rules.scale == 1.0:
            return hidden + delta
        return self.add_norm(hidden, delta, None, post_weight)[0]

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens, width = gate_up.shape
        inner = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        activate_launch(gate_up, inner, self._activation).run()
        return inner


class TritonStepRows:
    """Rotates the rows of one step and writes their KV, by one kernel."""

    def __init__(
        self, config: ModelConfig, angles: list[RotaryAngles | None], cache: KvCache, rows: list[RowPlaces]
    ) -> None:
        """`angles` are the tables of the layers, and `rows` the places in each layer group."""
        self._config = config
        self._angles = angles
        self._cache = cache
        self._rows = rows

    def rotate_and_store(self, qkv: torch.Tensor, layer: int, qk_norm: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        query = torch.empty((len(qkv), config.num_heads, config.head_dim), dtype=qkv.dtype, device=qkv.device)
        norm = None if qk_norm is None else HeadNorm(qk_norm, config.rms_norm_eps, config.block.norm.value)
        self._cache.gates.wait(layer)
        rows = self._rows[self._cache.group_of[layer]]
        rotate_and_store_launch(qkv, query, self._pages(layer), self._angles[layer], rows, norm).run()
        return query

    def _pages(self, layer: int) -> KvPages:
        keys, values = self._cache.stored(layer)
        return KvPages(keys.codes, values.codes, keys.scales, values.scales, self._cache.format.name or None)
