"""How a step's deltas are computed, by shape: plain functions, so that a plan is the same in every process.

There are two ways. Grouped: a program takes a tile of up to 32 rows of one adapter and multiplies on matrix units.
Row-wise: a program takes one row and sums products in fp32, without matrix units. `tile_rows_for` chooses once a step.

The bits of a row must not depend on its neighbours. What they depend on is therefore kept apart from what the batch
decides:

- How the input features are summed (`num_spans`, `block_in`) and the ranks (`block_rank`) follows from the layer and
  its table alone. Whether the spans run in one program or in several (`parallel_spans`) follows from the batch; either
  way they are summed in the same order.
- Tiles have at most 32 rows, so that every architecture uses the same matrix instruction (mma.sync) for all of them;
  from 64 rows on the compiler would turn to wgmma or tcgen05, which accumulate differently.
- The two ways do differ in bits: both sum in fp32 and round once, but a matrix unit adds products in an order, and
  with an inner precision, of its own. Where a row's bits matter more than the time of small batches,
  `batch_invariant` takes the grouped way for every batch.
"""

from dataclasses import dataclass

ROW_WISE = 1
"""`tile_rows` of the row-wise way: a tile is one row."""
GROUPED_TILE_ROWS = (16, 32)
"""What a tile of the grouped way may hold. More would change the matrix instruction, and with it the bits of a row."""
TILE_ROWS = (ROW_WISE, *GROUPED_TILE_ROWS)

_SPAN_FEATURES = 512  # what one program should sum at least, to be worth its launch
_MAX_SPANS = 8  # the expand kernel reads one plane of scratch for each
_BUSY_PROGRAMS = 256  # about two a multiprocessor: above this the device is full without parallel spans
_ROW_BLOCK_RANK = 16
_ROW_BLOCK_IN = 256  # one row of A to a warp: 32 lanes of 16 bytes
_ROW_BLOCK_OUT = 256
_ROWS_AN_ADAPTER = 2  # above this, row-wise re-reads would take longer from L2 than the weights from memory
_FREE_RANKS = 512  # ranks summed over rows whose re-reads, 20 KB each, stay under the two microseconds of a launch


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step asks of the kernels."""

    num_rows: int
    """Rows that have an adapter, each counted once for every part of its mixture."""
    num_adapters: int
    """Distinct adapters among them."""
    total_ranks: int
    """Sum over the distinct adapters of their largest ranks."""


def tile_rows_for(step: StepShape, batch_invariant: bool = False) -> int:
    """Rows to a tile: ROW_WISE, or one of GROUPED_TILE_ROWS.

    Row-wise, each row reads its adapter for itself; grouped, a tile does. From memory both read an adapter once, for a
    layer's part of it stays in L2; so row-wise is chosen while rows are few to an adapter (the tile would be 15/16
    empty, and the matrix unit's staging in shared memory buys nothing), or while all re-reads together are trifling.
    The limits are arithmetic on published bandwidths; they have not been measured.

    A row's bits differ between the two ways, so with `batch_invariant` false they depend on the make-up of the batch;
    with `batch_invariant` true every batch is grouped, and they do not.
    """
    if not batch_invariant and _is_better_by_row(step):
        return ROW_WISE
    return grouped_tile_rows(step.num_rows, step.num_adapters)


def _is_better_by_row(step: StepShape) -> bool:
    ranks_over_rows = step.total_ranks * step.num_rows // max(step.num_adapters, 1)
    return step.num_rows <= _ROWS_AN_ADAPTER * step.num_adapters or ranks_over_rows <= _FREE_RANKS


def grouped_tile_rows(num_rows: int, num_adapters: int) -> int:
    """Small tiles while an adapter has few rows (no program idles), larger ones when its weights would be re-read."""
    small, large = GROUPED_TILE_ROWS
    return large if num_adapters and num_rows // num_adapters >= 2 * large else small


@dataclass(frozen=True, slots=True)
class LaunchBounds:
    """What programs are launched for: at least what any adapter of the step has. It decides how many, and no bits."""

    rank: int
    has_columns: bool


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """One fused layer in one step: what its plan follows from."""

    num_tiles: int
    tile_rows: int
    num_slices: int
    in_features: int
    max_rank: int
    """The largest that the layer's table allows, not the largest of the batch: bits follow from it."""
    launched_rank: int
    """The largest that programs are launched for; it decides only how many there are."""
    element_bytes: int
    """Of the wider operand."""


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """How the pair of kernels is launched for one fused layer and one step."""

    block_in: int
    """Input features that a shrink program loads at once."""
    block_rank: int
    block_out: int
    num_spans: int
    """Parts that the input features are summed in."""
    parallel_spans: bool
    """One program a span, and one plane of scratch each, rather than one program for all."""
    num_stages: int

    @property
    def num_planes(self) -> int:
        return self.num_spans if self.parallel_spans else 1

    def rank_blocks(self, rank: int) -> int:
        return -(-rank // self.block_rank)

    def span_features(self, in_features: int) -> int:
        """Input features of a span: whole blocks."""
        per_span = -(-in_features // self.num_spans)
        return -(-per_span // self.block_in) * self.block_in


def plan_for(shape: LaunchShape) -> LoraPlan:
    """The plan of a layer in a step."""
    is_row_wise = shape.tile_rows == ROW_WISE
    is_narrow = shape.element_bytes <= 2
    if is_row_wise:
        block_in, block_rank, block_out = _ROW_BLOCK_IN, _ROW_BLOCK_RANK, _ROW_BLOCK_OUT
    else:
        block_in = 128 if is_narrow else 64
        block_rank = min(max(16, 1 << (shape.max_rank - 1).bit_length()), 64)
        block_out = 128 if block_rank <= 32 else 64
    num_spans = min(max(shape.in_features // _SPAN_FEATURES, 1), _MAX_SPANS)
    programs = shape.num_tiles * shape.num_slices * -(-shape.launched_rank // block_rank)
    return LoraPlan(
        block_in=block_in,
        block_rank=block_rank,
        block_out=block_out,
        num_spans=num_spans,
        parallel_spans=num_spans > 1 and programs < _BUSY_PROGRAMS,
        num_stages=3 if is_narrow else 2,
    )
