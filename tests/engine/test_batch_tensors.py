"""A plan as tensors: the order of rows, and what attention is told."""

import torch

from graftwork.engine.batch import SequenceSlice, StepPlan
from graftwork.engine.batch_tensors import AdapterRun, BatchBuilder
from graftwork.engine.pages import PageId
from graftwork.platform.ids import RequestId

NULL_PAGE = 99


def piece(name: str, start: int, count: int, pages: list[int], adapter: str | None = None) -> SequenceSlice:
    tokens = tuple(range(100 * len(name), 100 * len(name) + count))
    return SequenceSlice(RequestId(name), tokens, start, tuple(map(PageId, pages)), adapter, None)


def builder() -> BatchBuilder:
    return BatchBuilder(page_tokens=4, null_page=NULL_PAGE, device=torch.device("cpu"))


def test_each_adapter_has_one_run_of_rows_however_the_requests_arrive() -> None:
    """Slices of two adapters and the base, interleaved, come to one run an adapter, base rows in none."""
    plan = StepPlan(
        (
            piece("a", 5, 1, [1, 2], "x"),
            piece("b", 0, 2, [3]),
            piece("c", 0, 3, [4], "y"),
            piece("d", 8, 1, [5, 6, 7], "x"),
        )
    )

    batch = builder().build(plan)

    assert batch.adapter_runs == (AdapterRun("x", 2, 4), AdapterRun("y", 4, 7))
    assert [piece.request_id for piece in batch.slices] == ["b", "a", "d", "c"]


def test_a_row_is_written_where_its_position_lies_in_its_pages() -> None:
    """Positions 3 to 6 over pages 7 and 2 of four tokens: the last slot of page 7, the first three of page 2."""
    batch = builder().build(StepPlan((piece("a", 3, 4, [7, 2]),)))

    assert batch.slots.tolist() == [31, 8, 9, 10]
    assert batch.positions.tolist() == [3, 4, 5, 6]


def test_a_page_is_begun_by_whoever_writes_its_first_token() -> None:
    """Pages that were begun before, or are only read, are not scrubbed again."""
    batch = builder().build(StepPlan((piece("a", 3, 6, [7, 2, 5]), piece("b", 2, 1, [8]))))

    assert batch.begun_pages.tolist() == [2, 5]


def test_a_decoding_row_sees_its_own_keys_and_no_padding() -> None:
    """Two sequences of 6 and 2 keys: the shorter one's page table is padded with the null page, and masked."""
    batch = builder().build(StepPlan((piece("a", 5, 1, [1, 2]), piece("b", 1, 1, [3]))))

    assert batch.decode is not None
    assert batch.decode.pages.view(2, 2).tolist() == [[1, 2], [3, NULL_PAGE]]
    assert batch.decode.visible.sum(dim=-1).flatten().tolist() == [6, 2]


def test_a_chunk_is_causal_from_its_own_start() -> None:
    """Rows at positions 2 and 3 see three and four keys."""
    batch = builder().build(StepPlan((piece("a", 2, 2, [1]),)))

    (chunk,) = batch.chunks
    assert chunk.visible.sum(dim=-1).tolist() == [3, 4]
    assert chunk.num_keys == 4
