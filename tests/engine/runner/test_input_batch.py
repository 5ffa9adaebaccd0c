"""The tensors of a plan: the order of rows, and where their KV is written."""

import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.layers import usual_rows
from graftwork.engine.runner.input_batch import AdapterRun, BatchBuilder
from graftwork.platform.ids import RequestId

NULL_PAGE = 99
FREE = BatchInvariance(1, 1)


def uses(adapter: str | None) -> tuple[AdapterUse, ...]:
    return () if adapter is None else (AdapterUse(adapter),)


def piece(name: str, start: int, count: int, pages: list[int], adapter: str | None = None) -> RequestSlice:
    tokens = tuple(range(100 * len(name), 100 * len(name) + count))
    return RequestSlice(RequestId(name), tokens, start, tuple(map(PageId, pages)), uses(adapter), ())


def builder(rules: BatchInvariance = FREE) -> BatchBuilder:
    return BatchBuilder(page_tokens=4, null_page=NULL_PAGE, device=torch.device("cpu"), rules=rules)


def test_each_adapter_has_one_run_of_rows_however_the_requests_arrive() -> None:
    """Interleaved slices of two adapters and the base give one run for each adapter and none for the base."""
    plan = StepPlan(
        (
            piece("a", 5, 1, [1, 2], "x"),
            piece("b", 0, 2, [3]),
            piece("c", 0, 3, [4], "y"),
            piece("d", 8, 1, [5, 6, 7], "x"),
        )
    )

    batch = builder().build(plan)

    assert batch.adapter_runs == (AdapterRun(uses("x"), 2, 4, 0, 0, (2, 3)), AdapterRun(uses("y"), 4, 7, 0, 0, ()))
    assert [piece.request_id for piece in batch.slices] == ["b", "a", "d", "c"]


def test_a_row_is_written_where_its_position_lies_in_its_pages() -> None:
    """Positions 3 to 6 over pages 7 and 2, of four tokens each, go to the last slot of page 7 and the first three of 2."""
    batch = builder().build(StepPlan((piece("a", 3, 4, [7, 2]),)))

    assert batch.row_pages.tolist() == [7, 2, 2, 2]
    assert batch.row_offsets.tolist() == [3, 0, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 6]


def test_a_page_is_zeroed_when_its_first_token_is_written() -> None:
    """Only pages whose first token is written are zeroed; pages begun before or only read are not."""
    batch = builder().build(StepPlan((piece("a", 3, 6, [7, 2, 5]), piece("b", 2, 1, [8]))))

    assert batch.begun_pages.tolist() == [2, 5]


def test_a_small_batch_is_padded_with_unused_rows() -> None:
    """Two rows are padded to four; the padding rows write to the page after the null page and are not sampled."""
    batch = builder(BatchInvariance(4, 16)).build(StepPlan((piece("a", 0, 2, [1]),)))

    assert len(batch.token_ids) == len(batch.positions) == 4
    assert batch.row_pages.tolist() == [1, 1, NULL_PAGE + 1, NULL_PAGE + 1]
    assert batch.row_offsets.tolist() == [0, 1, 0, 0]
    assert batch.num_sampled == 0


def test_steps_have_few_sizes_for_weights_in_blocks() -> None:
    """Every number of rows is padded by at most an eighth, and all up to 2,048 to 164 sizes."""
    sizes = [usual_rows(rows) for rows in range(1, 2049)]
    own_sizes = [
        len(
            BatchBuilder(4, NULL_PAGE, torch.device("cpu"), FREE, usual_sizes=usual)
            .build(StepPlan((piece("a", 0, 37, list(range(10))),)))
            .token_ids
        )
        for usual in (False, True)
    ]

    assert all(rows <= size <= max(rows + 1, rows * 9 / 8) for rows, size in enumerate(sizes, start=1))
    assert all(usual_rows(size) == size for size in sizes)
    assert len(set(sizes)) <= 164
    assert own_sizes == [37, 40]
