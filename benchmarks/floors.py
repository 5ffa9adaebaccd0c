"""What this core could do at best: the bytes and the multiplications that a cell cannot do without."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cells import PROMPT_TOKENS, Cell
from yardstick_model import VOCAB_SIZE, rank_of

_LAYERS = 8
_LINEARS = ((512, 768), (512, 512), (512, 2816), (1408, 512))
"""(in, out) of qkv, o, gate and up, down."""
_TARGETS = ((512, 512), (512, 128), (512, 128), (512, 512), (512, 1408), (512, 1408), (1408, 512))
"""(in, out) of what an adapter has factors for."""
_BASE_WEIGHTS = _LAYERS * sum(rows * columns for rows, columns in _LINEARS)
_HEAD_WEIGHTS = 512 * VOCAB_SIZE
_KV_BYTES = 2 * _LAYERS * 128 * 2
"""Of one token."""
_ITEM_BYTES = 2  # bf16
_DECODE_ROWS = 32
_PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Of one core, as torch reaches them."""

    read_bytes_per_s: float
    decode_flops_per_s: float
    """A bf16 product of 32 rows."""
    prefill_flops_per_s: float
    """A bf16 product of 512 rows."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds, by bytes and by multiplications; neither can be had without the other."""

    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.flops_s)


def measure_rates() -> MachineRates:
    """About a second of one core."""
    torch.set_num_threads(1)
    many = torch.ones(2**26)  # 256 MiB: beyond every cache
    return MachineRates(
        read_bytes_per_s=many.nbytes / _least_s(many.sum),
        decode_flops_per_s=_flops_per_s(_DECODE_ROWS),
        prefill_flops_per_s=_flops_per_s(_PREFILL_ROWS),
    )


def _flops_per_s(rows: int) -> float:
    size = 2048
    x = torch.randn(rows, size, dtype=torch.bfloat16)
    weight = torch.randn(size, size, dtype=torch.bfloat16)
    return 2 * rows * size * size / _least_s(lambda: torch.nn.functional.linear(x, weight))


def _least_s(call: Callable[[], object]) -> float:
    """Processor time, the least of nine: a rate is what can be reached, so disturbances do not count."""
    seconds = []
    for _ in range(9):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return min(seconds)


def decode_floor(cell: Cell, output_tokens: int, rates: MachineRates) -> Floor:
    """Of one step at the mean context of the run."""
    context = PROMPT_TOKENS + output_tokens / 2
    num_weights = _BASE_WEIGHTS + _HEAD_WEIGHTS + sum(adapter_weights(index) for index in range(cell.adapters))
    num_bytes = _ITEM_BYTES * num_weights + cell.batch * context * _KV_BYTES
    flops = 2 * cell.batch * (_BASE_WEIGHTS + _HEAD_WEIGHTS) + _lora_flops(cell)
    return Floor(num_bytes / rates.read_bytes_per_s, flops / rates.decode_flops_per_s)


def prefill_floor(cell: Cell, rates: MachineRates) -> Floor:
    """Of all prompts, and the head of their last tokens."""
    num_weights = _BASE_WEIGHTS + _HEAD_WEIGHTS + sum(adapter_weights(index) for index in range(cell.adapters))
    flops = PROMPT_TOKENS * (2 * cell.batch * _BASE_WEIGHTS + _lora_flops(cell)) + 2 * cell.batch * _HEAD_WEIGHTS
    return Floor(_ITEM_BYTES * num_weights / rates.read_bytes_per_s, flops / rates.prefill_flops_per_s)


def _lora_flops(cell: Cell) -> int:
    """Of one token in every row."""
    return sum(2 * adapter_weights(adapter) for adapter in cell.adapter_of_row if adapter is not None)


def adapter_weights(adapter: int) -> int:
    """Numbers in the factors of one adapter."""
    return _LAYERS * rank_of(adapter) * sum(rows + columns for rows, columns in _TARGETS)


def median_rates(rates: list[MachineRates]) -> MachineRates:
    return MachineRates(
        statistics.median(one.read_bytes_per_s for one in rates),
        statistics.median(one.decode_flops_per_s for one in rates),
        statistics.median(one.prefill_flops_per_s for one in rates),
    )
