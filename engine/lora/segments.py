"""Defines the segments of a step: adjacent rows (tokens) that use the same adapter, or the same mixture of adapters."""

from dataclasses import dataclass
from itertools import pairwise

from graftwork.engine.lora.packs import AdapterMix


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows (tokens) [start, end) of the step, which all use the same adapter or the same mixture of adapters.

    A step samples the next token for some rows only (the sampled rows). In the list of the sampled rows,
    [sampled_start, sampled_end) are those that use this adapter or mixture.
    """

    start: int
    end: int
    mix: AdapterMix
    sampled_start: int = 0
    sampled_end: int = 0
    decoding: tuple[int, ...] = ()
    """The rows that decode, ascending. The other rows are parts of chunks (see input_batch.AdapterRun)."""

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    def of_sampled(self) -> "Segment":
        """Returns the rows of this segment whose next token is sampled, as a segment of the output head's input.

        The output head gets only such rows, so the rows are numbered anew. All of them count as decoding rows, and none
        as part of a prefill chunk.
        """
        rows = range(self.sampled_start, self.sampled_end)
        return Segment(rows.start, rows.stop, self.mix, decoding=tuple(rows))

    def of_chunks(self) -> list["Segment"]:
        """Returns the ranges of rows (tokens) in this segment that belong to prefill chunks, each range as a segment.

        Decoding rows are left out.
        """
        bounds = (self.start - 1, *self.decoding, self.end)
        return [Segment(row + 1, end, self.mix) for row, end in pairwise(bounds) if row + 1 < end]
