"""Tests of the launch plan: blocks, spans, and the choice between row-wise and grouped kernels."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.lora.triton.launch_plan import (
    GROUPED_TILE_ROWS,
    ROW_WISE,
    TILE_ROWS,
    LaunchShape,
    LoraPlan,
    StepShape,
    plan_for,
    tile_rows_for,
)

sizes = st.integers(1, 1000)
features = st.integers(1, 40_000)
ranks = st.integers(1, 128)
tile_sizes = st.sampled_from(TILE_ROWS)


def plan(num_tiles: int, in_features: int, max_rank: int, tile_rows: int, launched_rank: int | None = None) -> LoraPlan:
    return plan_for(LaunchShape(num_tiles, tile_rows, 3, in_features, max_rank, launched_rank or max_rank, 2))


@given(sizes, sizes, features, ranks, ranks, tile_sizes)
def test_how_sums_are_made_is_not_the_batchs(
    tiles: int, other_tiles: int, in_features: int, max_rank: int, launched_rank: int, tile_rows: int
) -> None:
    """The batch and its adapters do not change the order in which features and ranks are added."""
    first = plan(tiles, in_features, max_rank, tile_rows)
    other = plan(other_tiles, in_features, max_rank, tile_rows, min(launched_rank, max_rank))

    assert (first.num_spans, first.block_in, first.block_rank) == (other.num_spans, other.block_in, other.block_rank)


@given(sizes, features, ranks, tile_sizes)
def test_spans_cover_all_features(tiles: int, in_features: int, max_rank: int, tile_rows: int) -> None:
    """Spans are whole blocks and cover all features, and blocks of ranks cover all ranks."""
    found = plan(tiles, in_features, max_rank, tile_rows)

    assert found.span_features(in_features) % found.block_in == 0
    assert found.span_features(in_features) * found.num_spans >= in_features
    assert found.rank_blocks(max_rank) * found.block_rank >= max_rank


def test_spans_run_in_parallel_only_while_the_device_has_room() -> None:
    """A few decode rows spread each sum over programs, and a large prefill does not."""
    decode = plan(4, 4096, 16, 16)
    prefill = plan(512, 4096, 16, 16)

    assert decode.num_planes == decode.num_spans > 1
    assert prefill.num_planes == 1
    assert prefill.num_spans == decode.num_spans


def test_programs_for_ranks_that_are_absent_do_not_count_as_work() -> None:
    """The largest rank that a table allows does not change how widely a step of rank 8 is spread."""
    assert not plan(80, 4096, 128, ROW_WISE).parallel_spans
    assert plan(80, 4096, 128, ROW_WISE, launched_rank=8).parallel_spans


def test_decode_goes_row_by_row_and_prefill_in_tiles() -> None:
    """Rows with an adapter each are computed row-wise, and many rows of one adapter in tiles."""
    assert tile_rows_for(StepShape(num_rows=64, num_adapters=64, total_ranks=64 * 16)) == ROW_WISE
    assert tile_rows_for(StepShape(num_rows=64, num_adapters=32, total_ranks=32 * 64)) == 16
    assert tile_rows_for(StepShape(num_rows=64, num_adapters=8, total_ranks=8 * 16)) == 16
    assert tile_rows_for(StepShape(num_rows=2048, num_adapters=4, total_ranks=4 * 16)) == 32


def test_few_rows_of_one_adapter_go_row_by_row_too() -> None:
    """Eight rows of a small adapter are computed row-wise, and eight rows of a large one in tiles."""
    assert tile_rows_for(StepShape(num_rows=8, num_adapters=1, total_ranks=16)) == ROW_WISE
    assert tile_rows_for(StepShape(num_rows=8, num_adapters=1, total_ranks=128)) == 16


@given(sizes, sizes, st.integers(1, 10_000))
def test_batch_invariance_is_grouped(num_rows: int, num_adapters: int, total_ranks: int) -> None:
    """With batch invariance every batch is computed in tiles."""
    step = StepShape(num_rows, min(num_adapters, num_rows), total_ranks)

    assert tile_rows_for(step, in_tiles=True) in GROUPED_TILE_ROWS


def test_a_step_without_adapters_has_a_plan() -> None:
    """A step without rows or adapters has a plan."""
    assert tile_rows_for(StepShape(0, 0, 0)) in TILE_ROWS
    assert tile_rows_for(StepShape(0, 0, 0), in_tiles=True) == 16
