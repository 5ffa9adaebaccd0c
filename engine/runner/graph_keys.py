"""Enumerates the CUDA graphs of an engine: which steps share a graph.

A graph is captured for a number of rows, for decoding rows alone or for a mixed step (rows of prompts beside decoding
rows), and for what the step's adapters ask of the kernels. It serves all steps that need no more. In steps of decoding
rows a rank has its own graphs, because the launches of LoRA follow from the largest rank: with too large a rank, few
programs would have most of the work. A mixed step takes tiles of LoRA, whose programs share the work, so one rank
suffices. Steps with rolling windows have graphs of their own, so that others do not launch what only these need; to keep
them few, they serve every rank and every kind of adapter. The same enumeration captures the graphs at start and finds the
graph of a step, so no step meets a graph that is not there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from graftwork.engine.lora.triton.fused_lora import LoraNeeds
from graftwork.engine.lora.triton.launch_plan import GROUPED_TILE_ROWS, ROW_WISE, LaunchBounds, StepShape, tile_rows_for
from graftwork.engine.lora.triton.tiles import MAX_PARTS, SegmentCapacity

_SMALLEST_RANK = 16
_SMALLEST_MIXED = 16
_MOST_WEIGHTS_ALONE = 256
"""With up to so many rows, a step takes the time in which the weights are read, and padding costs little."""


class EagerReason(StrEnum):
    """Why no graph computes a step. The values are the fields of StepPaths that count such steps."""

    CHUNKS = "eager_chunk_steps"
    """Some rows are of a prompt, and no graph of mixed steps has room for all rows."""
    SCORES = "eager_score_steps"
    """The step scores or embeds a prompt, for which it needs the hidden states, or evicts one."""
    WINDOWS = "eager_window_steps"
    """A row has a rolling window, and the engine has no graphs for such steps."""
    ADAPTERS = "eager_adapter_steps"
    """Torch applies an adapter of the step."""
    ROWS = "eager_row_steps"
    """The step has more rows than any graph."""
    OFF = "eager_steps"
    """The engine has no graphs."""


@dataclass(frozen=True, slots=True)
class LoraKey:
    """What a graph's launches of LoRA can serve."""

    rank: int
    """The largest rank."""
    tile_rows: int
    """ROW_WISE, or the smallest size of a tile of several rows; larger ones give the same bits."""
    is_general: bool
    """Whether rows may use mixtures, and adapters may scale and shift columns."""

    @property
    def bounds(self) -> LaunchBounds:
        return LaunchBounds(self.rank, has_columns=self.is_general)

    def capacity(self, num_rows: int, num_requests: int) -> SegmentCapacity:
        """Returns the capacity of the tiles for `num_rows` rows of up to `num_requests` requests, whose adapters may all
        differ.
        """
        num_parts = MAX_PARTS if self.is_general else 1
        most_slots = num_requests * num_parts
        return SegmentCapacity(num_rows, most_slots, self.tile_rows, self.is_general, num_owners=num_requests)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The steps that one graph serves: up to `num_rows` rows, and their adapters."""

    num_rows: int
    lora: LoraKey | None
    """None if all rows are of the base model."""
    is_mixed: bool = False
    """Whether rows may belong to prompts. If not, all rows decode and are sampled."""
    has_rolling: bool = False
    """Whether rows may have a rolling window, and may stand behind the context."""


@dataclass(frozen=True, slots=True)
class GraphKeys:
    """All graphs of an engine."""

    max_rows: int
    """The most decoding rows of a step that a graph serves; a mixed step may have more rows, but not more requests."""
    max_rank: int
    """The largest rank of an adapter in the kernels' tables."""
    min_rows: int = 1
    """The fewest rows of a step; smaller ones are padded (see BatchInvariance)."""
    max_mixed_rows: int = 0
    """The most rows of a mixed step that a graph serves; 0 for none."""
    serves_rolling: bool = False
    """Whether requests may have a rolling window."""

    @property
    def row_counts(self) -> list[int]:
        """The numbers of rows: powers of two, and the largest number."""
        most = max(self.max_rows, self.min_rows)
        return [*(1 << power for power in range(most.bit_length()) if self.min_rows <= 1 << power < most), most]

    @property
    def mixed_row_counts(self) -> list[int]:
        """The numbers of rows of mixed steps: powers of two, and four sizes to each doubling where padding costs time."""
        if not self.max_mixed_rows:
            return []
        most, sizes, size = max(self.max_mixed_rows, self.min_rows), list[int](), _SMALLEST_MIXED
        while size < most:
            sizes.append(size)
            size += size if size < _MOST_WEIGHTS_ALONE else (1 << size.bit_length() - 1) // 4
        return [*(one for one in sizes if one >= self.min_rows), most]

    @property
    def ranks(self) -> list[int]:
        """The ranks: powers of two from 16 on, and the largest rank."""
        first = _SMALLEST_RANK.bit_length() - 1
        powers = [1 << power for power in range(first, self.max_rank.bit_length()) if 1 << power < self.max_rank]
        return [*powers, self.max_rank]

    def __iter__(self) -> Iterator[GraphKey]:
        """Yields every key, those of the largest steps first: the memory of their graphs then serves all others."""
        for num_rows in reversed(self.mixed_row_counts):
            if self.serves_rolling:
                yield from self._rolling(num_rows, [GROUPED_TILE_ROWS[0]], is_mixed=True)
            for is_general in (True, False):
                yield GraphKey(num_rows, LoraKey(self.max_rank, GROUPED_TILE_ROWS[0], is_general), is_mixed=True)
            yield GraphKey(num_rows, None, is_mixed=True)
        for num_rows in reversed(self.row_counts):
            if self.serves_rolling:
                tile_choices = _tile_choices(num_rows, self.max_rank, is_general=True)
                yield from self._rolling(num_rows, tile_choices, is_mixed=False)
            for rank in reversed(self.ranks):
                for is_general in (True, False):
                    for tile_rows in _tile_choices(num_rows, rank, is_general):
                        yield GraphKey(num_rows, LoraKey(rank, tile_rows, is_general))
            yield GraphKey(num_rows, None)

    def _rolling(self, num_rows: int, tile_choices: Iterable[int], *, is_mixed: bool) -> Iterator[GraphKey]:
        """Yields the keys of steps of so many rows that have rolling windows."""
        for tile_rows in tile_choices:
            yield GraphKey(num_rows, LoraKey(self.max_rank, tile_rows, is_general=True), is_mixed, has_rolling=True)
        yield GraphKey(num_rows, None, is_mixed, has_rolling=True)

    def find(
        self, num_rows: int, needs: LoraNeeds, *, is_mixed: bool = False, has_rolling: bool = False
    ) -> GraphKey | None:
        """Returns the key of the smallest graph that serves a step. None if the step has too many rows.

        The adapters of a mixed step must be in tiles.
        """
        counts = self.mixed_row_counts if is_mixed else self.row_counts
        rows = next((count for count in counts if count >= num_rows), None)
        if rows is None:
            return None
        if not needs.slots:
            return GraphKey(rows, None, is_mixed, has_rolling)
        is_general = has_rolling or needs.has_mixtures or needs.bounds.has_columns
        if is_mixed:
            lora = LoraKey(self.max_rank, GROUPED_TILE_ROWS[0], is_general)
            return GraphKey(rows, lora, is_mixed, has_rolling)
        rank = self.max_rank if has_rolling else next(rank for rank in self.ranks if rank >= needs.bounds.rank)
        tile_rows = ROW_WISE if needs.tile_rows == ROW_WISE else GROUPED_TILE_ROWS[0]
        return GraphKey(rows, LoraKey(rank, tile_rows, is_general), has_rolling=has_rolling)


def _tile_choices(num_rows: int, rank: int, is_general: bool) -> Iterator[int]:
    """Yields the sizes of tiles that a step of up to so many rows, and adapters of up to this rank, may have.

    Tiles of several rows pay least for one adapter; where they do not pay for one, no step has them.
    """
    yield ROW_WISE
    rows = num_rows * (MAX_PARTS if is_general else 1)
    if tile_rows_for(StepShape(rows, 1, rank)) != ROW_WISE:
        yield GROUPED_TILE_ROWS[0]
