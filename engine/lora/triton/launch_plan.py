"""Plans how the LoRA deltas of a step are computed.

The plan depends on shapes alone, so it is the same in every process. There are two ways. Grouped: one program takes a
tile (up to 32 rows of one adapter) and multiplies on matrix units. Row-wise: one program takes one row and sums
products in fp32, without matrix units. A row is one token. `tile_rows_for` chooses the way once in each step.

The bits of a row must not depend on the other rows of the batch:

- The input features are cut into spans, and each span is summed on its own. The sizes of spans and blocks (`num_spans`,
  `block_in`, `block_rank`) follow from the layer and its table alone. The batch decides only whether the spans are
  computed in one program or in several (`parallel_spans`). Both add the spans in the same order.
- Tiles have at most 32 rows, so that every architecture uses the same matrix instruction (mma.sync). From 64 rows on,
  the compiler would use wgmma or tcgen05, which add in another order.
- Grouped and row-wise give different bits. Both sum in fp32 and round once, but a matrix unit has its own order of
  additions and its own inner precision. With `in_tiles` a step is always grouped: then the bits are equal, but small
  steps take longer. So are steps with rows of prompts, so that fewer CUDA graphs serve them.
"""

from dataclasses import dataclass

ROW_WISE = 1
"""The value of `tile_rows` if each row is its own tile and is computed by the row-wise kernels."""
GROUPED_TILE_ROWS = (16, 32)
"""The numbers of rows of a tile for the grouped kernels, which compute several rows together.

Larger tiles would change the matrix instruction, and so the bits of a row.
"""
TILE_ROWS = (ROW_WISE, *GROUPED_TILE_ROWS)

_SPAN_FEATURES = 1024  # the least features for which a program is worth its launch
_MAX_SPANS = 8  # the expand kernel reads one plane of scratch for each
_BUSY_PROGRAMS = 1024  # with more, a large device is full without parallel spans
_ROW_BLOCK_RANK = 16
_ROW_BLOCK_IN = 512
_ROW_BLOCK_OUT = 512
_PRECISE_BLOCK = 32  # ranks and columns that expand multiplies at once in fp32: registers hold them, not matrix units
_ROWS_AN_ADAPTER = 1  # with two, tiles are faster already, although most of their rows are empty
_FREE_RANKS = 128  # up to this sum of ranks over rows, row-wise is as fast


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amount of LoRA work in one step."""

    num_rows: int
    """The number of rows with an adapter. A row of a mixture counts once for each of its adapters."""
    num_adapters: int
    """The number of distinct adapters of these rows."""
    total_ranks: int
    """The sum, over the distinct adapters, of each adapter's largest rank."""


def tile_rows_for(step: StepShape, *, in_tiles: bool = False) -> int:
    """Returns the number of rows of a tile: ROW_WISE for the row-wise kernels, or one of GROUPED_TILE_ROWS.

    A row is one token, and a tile is a group of rows with the same adapters. Row-wise kernels load an adapter once for
    each row, grouped kernels once for each tile. Repeated loads come from the L2 cache and not from memory. Row-wise is
    chosen if adapters have so few rows that tiles would be almost empty, or if the repeated loads are small. On an H200
    the two take equally long for eight rows of eight adapters of rank 16; tiles take 0.69 times as long for 32 rows of 16
    adapters, and 0.25 times for 128 rows of 16 (benchmarks/results/gpu_day-2026-11-28.json).

    The two kinds of kernel give different bits. With `in_tiles` the result is never ROW_WISE.
    """
    if not in_tiles and _is_better_by_row(step):
        return ROW_WISE
    return grouped_tile_rows(step.num_rows, step.num_adapters)


def _is_better_by_row(step: StepShape) -> bool:
    ranks_over_rows = step.total_ranks * step.num_rows // max(step.num_adapters, 1)
    return step.num_rows <= _ROWS_AN_ADAPTER * step.num_adapters or ranks_over_rows <= _FREE_RANKS


def grouped_tile_rows(num_rows: int, num_adapters: int) -> int:
    """Returns how many rows a tile has for the grouped kernels.

    A tile is a group of rows (tokens) with the same adapters. There are two sizes. If adapters have many rows each,
    tiles are large, so that fewer tiles read the same weights. Otherwise they are small.
    """
    small, large = GROUPED_TILE_ROWS
    return large if num_adapters and num_rows // num_adapters >= 2 * large else small


@dataclass(frozen=True, slots=True)
class LaunchBounds:
    """Upper bounds for the adapters of a step. No adapter has a rank above `rank`.

    If `has_columns` is False, no adapter scales or shifts output columns. The bounds decide how many programs are
    launched. They do not change any bits of the result.
    """

    rank: int
    has_columns: bool


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes of one fused layer (such as qkv) in one step. The launch plan follows from them."""

    num_tiles: int
    tile_rows: int
    num_slices: int
    in_features: int
    max_rank: int
    """The largest rank that the layer's table allows.

    The bits of a result depend on this value, so it must not be the largest rank of the batch.
    """
    launched_rank: int
    """The largest rank for which programs are launched. This changes only the number of programs."""
    element_bytes: int
    """Bytes of one element of x or of the weights, whichever is larger."""


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The block sizes and counts for launching the shrink and expand kernels for one fused layer in one step."""

    block_in: int
    """Input features that a shrink program loads at once."""
    block_rank: int
    block_out: int
    expanded_ranks: int
    """Ranks that an expand program loads at once. A divisor of block_rank."""
    num_spans: int
    """The number of spans: equal parts of the input features, each of which is summed separately."""
    parallel_spans: bool
    """Whether each span (part of the input features) has its own program and plane of scratch memory. If False, one
    program computes all spans.
    """
    num_stages: int

    @property
    def num_planes(self) -> int:
        return self.num_spans if self.parallel_spans else 1

    def rank_blocks(self, rank: int) -> int:
        return -(-rank // self.block_rank)

    def span_features(self, in_features: int) -> int:
        """Returns the number of input features in one span, rounded up to whole blocks.

        The input features are cut into spans, and each span is summed on its own.
        """
        per_span = -(-in_features // self.num_spans)
        return -(-per_span // self.block_in) * self.block_in


def plan_for(shape: LaunchShape) -> LoraPlan:
    """Returns the block sizes and counts for launching the kernels for one fused layer (such as qkv) in one step."""
    is_row_wise = shape.tile_rows == ROW_WISE
    is_narrow = shape.element_bytes <= 2
    if is_row_wise:
        block_in, block_rank, block_out = _ROW_BLOCK_IN, _ROW_BLOCK_RANK, _ROW_BLOCK_OUT
    else:
        block_in = 128 if is_narrow else 64
        block_rank = min(max(16, 1 << (shape.max_rank - 1).bit_length()), 64)
        block_out = 128 if is_narrow else _PRECISE_BLOCK
    num_spans = min(max(shape.in_features // _SPAN_FEATURES, 1), _MAX_SPANS)
    programs = shape.num_tiles * shape.num_slices * -(-shape.launched_rank // block_rank)
    return LoraPlan(
        block_in=block_in,
        block_rank=block_rank,
        block_out=block_out,
        expanded_ranks=16 if is_row_wise or is_narrow else min(block_rank, _PRECISE_BLOCK),
        num_spans=num_spans,
        parallel_spans=num_spans > 1 and programs < _BUSY_PROGRAMS,
        num_stages=3 if is_narrow else 2,
    )
