"""Fills the grammar masks of one step on a thread while the forward pass runs, and applies them to the logits.

Never ends a request. If a row's grammar is complete or has failed, the row is not masked but reported, and the token
that is sampled for it is not used.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.core.step import SampleSpec
from graftwork.platform.errors import GraftworkError, InternalFailure

_log = logging.getLogger(__name__)
_NEVER = float("-inf")
_ALL = -1  # a word with all bits set


@dataclass(slots=True)
class FilledMasks:
    """The grammar masks of one step. The rows are rows of the logits."""

    rows: list[int]
    barred: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None
    """The mask, [len(rows), vocab]: True for each forbidden token."""
    ends: dict[int, GraftworkError | None] = field(default_factory=dict)
    """The rows for which the grammar allows no token. The value is None if the row's answer is complete, else the
    error.
    """


class MaskFiller:
    """Fills the grammar masks of a step on its own thread, and applies them to the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")

    def begin(self, specs: Sequence[SampleSpec]) -> "Future[FilledMasks] | None":
        """Starts to fill the masks of a step, and returns at once. Each spec belongs to one row of the logits.

        Returns None if no spec has a mask.
        """
        if all(spec.mask is None for spec in specs):
            return None
        return self._thread.submit(self._fill, list(specs))

    def begin_words(
        self, specs: Sequence[SampleSpec], words: NDArray[np.int32]
    ) -> "Future[dict[int, GraftworkError | None]]":
        """Starts to fill the masks of a step as bits, and returns at once. Each spec belongs to one row of the logits.

        The specs with a mask get the rows of `words`, in their order. A set bit allows a token, and a word has the bits
        of 32 tokens. The result is as that of `apply`; the rows in it are not masked.

        words: [number of specs with a mask, ceil(vocab / 32)].
        """
        return self._thread.submit(self._fill_words, list(specs), words)

    def apply(self, masks: "Future[FilledMasks] | None", logits: torch.Tensor) -> dict[int, GraftworkError | None]:
        """Waits for the masks, and sets the logits of forbidden tokens to -inf, in place. logits: [num_sampled, vocab].

        Returns the rows for which the grammar allows no token. The value is None if the row's answer is complete, else
        the error that ends the request.
        """
        if masks is None:
            return {}
        filled = masks.result()
        if filled.barred is not None:
            barred = torch.from_numpy(filled.barred).to(logits.device)
            if len(filled.rows) == len(logits):
                logits.masked_fill_(barred, _NEVER)
            else:
                rows = torch.tensor(filled.rows, device=logits.device)
                logits[rows] = logits[rows].masked_fill_(barred, _NEVER)
        return filled.ends

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fill(self, specs: list[SampleSpec]) -> FilledMasks:
        words = np.zeros((len(specs), -(-self._vocab_size // 32)), dtype=np.int32)
        filled = FilledMasks([], None)
        for row, spec in enumerate(specs):
            if spec.mask is None:
                continue
            error = self._fill_row(spec, words[row])
            if error is not None or not words[row].any():
                filled.ends[row] = error
            else:
                filled.rows.append(row)
        if filled.rows:
            masked = words if len(filled.rows) == len(words) else words[filled.rows]
            np.invert(masked, out=masked)
            bits = np.unpackbits(masked.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
            filled.barred = bits.view(np.bool_)
        return filled

    def _fill_words(self, specs: list[SampleSpec], words: NDArray[np.int32]) -> dict[int, GraftworkError | None]:
        ends: dict[int, GraftworkError | None] = {}
        masked = (row for row, spec in enumerate(specs) if spec.mask is not None)
        for row, own in zip(masked, words, strict=True):
            own.fill(0)
            error = self._fill_row(specs[row], own)
            if error is not None or not own.any():
                ends[row] = error
                own.fill(_ALL)
        return ends

    def _fill_row(self, spec: SampleSpec, words: NDArray[np.int32]) -> GraftworkError | None:
        assert spec.mask is not None
        try:
            return spec.mask.fill(words)
        except Exception:  # noqa: BLE001 - whatever a grammar engine does, it is the end of that request alone
            _log.exception("grammar_mask_failed")
            return InternalFailure("The grammar of this request failed; the engine's log says why.")
