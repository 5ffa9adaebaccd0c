"""Launches the sampling kernels, and owns the memory that they work in.

Four kernels sample one step, whatever its rows ask for: edit, weigh, gather, choose. Each reads what a row asks for
from the step's parameters, on the device. No launch depends on the requests, so the launches can be captured in a CUDA
graph. There are no atomics, and no sum depends on the number of rows or blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.sampling.device.choose_kernel import choose_kernel
from graftwork.engine.sampling.device.columns import StepColumns
from graftwork.engine.sampling.device.edit_kernel import edit_kernel
from graftwork.engine.sampling.device.weigh_kernels import NUM_LEVELS, gather_kernel, weigh_kernel

_TOP_LANES = triton.next_power_of_2(MAX_TOP_LOGPROBS)
_LIST_BLOCK = 128
OUTPUT_ROWS = 2 + 2 * MAX_TOP_LOGPROBS
"""The numbers that choose_kernel writes for one row."""


@dataclass(frozen=True, slots=True)
class SamplerSizes:
    """How the work is cut. The numbers change no token."""

    block: int = 2048
    """The tokens of one program of the first three kernels."""
    room: int = 8192
    """The most likely tokens of a row that are gathered."""
    chunk: int = 2048
    """The tokens that one pass of the last kernel's search takes at a time."""
    digits: int = 4
    """The values of one digit of the keys that are searched: 4 or 16. More digits are fewer and longer passes."""

    @property
    def passes(self) -> int:
        """The number of digits of a key of 32 bits."""
        return 32 // (self.digits.bit_length() - 1)


class SamplerMemory:
    """The memory on the device in which the rows of one step are sampled. Only kernels read and write it, in the order
    of the stream, so the next step may use it before the host has seen this one's tokens.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, sizes: SamplerSizes) -> None:
        """`max_rows` is the most rows of a step, a multiple of 4."""
        self.columns = StepColumns(max_rows)
        self.vocab_size = vocab_size
        self.sizes = sizes
        self.num_blocks = -(-vocab_size // sizes.block)
        self._device = device
        by_block = (max_rows, self.num_blocks)
        by_level = (max_rows, NUM_LEVELS.value, self.num_blocks)
        self._work = self._empty((max_rows, -(-vocab_size // 4) * 4 + sizes.room), torch.float32)
        self._near_tokens = self._empty((max_rows, sizes.room), torch.int32)
        self._bests = self._empty(by_block, torch.int64)
        self._totals = self._empty(by_block, torch.int64)
        self._kept = self._empty(by_block, torch.int64)
        self._level_counts = self._empty(by_level, torch.int32)
        self._level_masses = self._empty(by_level, torch.int64)
        self._raw_bests = self._empty(by_block, torch.float32)
        self._raw_sums = self._empty(by_block, torch.float32)
        self._raw_tops = self._empty((*by_block, MAX_TOP_LOGPROBS), torch.int64)
        self.output = self._empty((OUTPUT_ROWS, max_rows), torch.int32)
        """[OUTPUT_ROWS, max_rows] the token of each row, then its log probabilities, as choose_kernel writes them."""

    @property
    def mask_words(self) -> int:
        """The number of int32 words of one grammar mask."""
        return -(-self.vocab_size // 32)

    def launches(
        self,
        logits: torch.Tensor,
        counts: torch.Tensor,
        parameters: torch.Tensor,
        masks: torch.Tensor | None,
        awaited: torch.Tensor | None = None,
    ) -> Iterator[Launch]:
        """Yields the launches that sample the tokens of a step, in order. They write `output`.

        logits: [rows, vocab], which are only read; counts: int16 [slots, vocab], which are updated; parameters: int32,
        as `columns` lays them out; masks: int32 [masks, mask_words] on the device or in pinned host memory, or None if
        no row has a mask; awaited: int32, the tokens of the step before, or None if no row's counts lack one. Masks,
        parameters and tokens begin at a multiple of 16 bytes.
        """
        grid = (len(logits), self.num_blocks)
        blocks = {"BLOCK": self.sizes.block, "BLOCKS": triton.next_power_of_2(self.num_blocks)}
        rows = {
            "ints": parameters,
            "floats": parameters[self.columns.floats_at :].view(torch.float32),
            "work": self._work,
            "bests": self._bests,
            "vocab": self.vocab_size,
            "columns": self.columns.capacity,
            "work_stride": self._work.stride(0),
            "num_blocks": self.num_blocks,
        }
        raw = {
            "logits": logits,
            "logits_stride": logits.stride(0),
            "raw_bests": self._raw_bests,
            "raw_sums": self._raw_sums,
            "raw_tops": self._raw_tops,
            "NUM_TOPS": MAX_TOP_LOGPROBS,
        }
        edits = self._edits(parameters, masks, awaited) | {"counts": counts}
        weights = {
            "totals": self._totals,
            "level_counts": self._level_counts,
            "level_masses": self._level_masses,
            **blocks,
        }
        near = {"near_tokens": self._near_tokens, "room": self.sizes.room}
        chosen = {
            "longs": parameters[self.columns.longs_at : self.columns.lists_at].view(torch.int64),
            "kept": self._kept,
            "output": self.output,
            "CHUNK": self.sizes.chunk,
            "DIGITS": self.sizes.digits,
            "PASSES": self.sizes.passes,
            "TOP_LANES": _TOP_LANES,
        }
        edit_options = _options(4)
        if logits.dtype == torch.float32:
            edit_options["maxnreg"] = 112  # without it, ptxas takes 96 on sm_100, and spills
        yield Launch(edit_kernel, grid, {**rows, **raw, **edits}, edit_options)
        yield Launch(weigh_kernel, grid, {**rows, **weights, "kept": self._kept}, _options(4))
        yield Launch(gather_kernel, grid, {**rows, **weights, **near}, _options(4))
        yield Launch(choose_kernel, grid[:1], {**rows, **raw, **weights, **near, **chosen}, _options(16))

    def _edits(
        self, parameters: torch.Tensor, masks: torch.Tensor | None, awaited: torch.Tensor | None
    ) -> dict[str, Any]:
        """Returns what only the first kernel takes, without the counts. What no row needs is not read."""
        return {
            "lists": parameters[self.columns.lists_at :],
            "masks": parameters if masks is None else masks,
            "mask_stride": self.mask_words,
            "awaited": parameters if awaited is None else awaited,
            "BLOCK": self.sizes.block,
            "LIST_BLOCK": _LIST_BLOCK,
        }

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _options(num_warps: int) -> dict[str, Any]:
    """Returns the options of the compiler. Products and sums are not fused, so they round as torch's do."""
    return {"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": False}
