"""Tests of the table of slices, which holds the addresses of the adapters' matrices."""

import pytest
import torch

from graftwork.engine.lora.triton.random_adapters import random_slots
from graftwork.engine.lora.triton.slice_table import SliceTerms, build_table, empty_table
from graftwork.engine.lora.weights import LoraPair


def test_a_table_points_at_the_pairs(generator: torch.Generator) -> None:
    """Each entry has its pair's rank and scale, and the address of A."""
    slots = random_slots([(4, 0), (0, 0), (2, 7)], 32, (16, 8), torch.float32, generator)
    first, last = slots[0][0], slots[2][1]
    assert first is not None
    assert last is not None

    table = build_table(slots, (16, 8), 32, torch.float32, "cpu")

    assert table.ranks.tolist() == [[4, 0], [0, 0], [2, 7]]
    assert table.max_rank == 7
    assert table.scales[2, 1].item() == last.scale
    assert table.a_pointers[0, 0].item() == first.A.data_ptr()
    assert table.offsets.tolist() == [0, 16]


def test_a_rank_major_matrix_is_not_copied(generator: torch.Generator) -> None:
    """A matrix B of shape [rank, width] is not copied."""
    B_transposed = torch.randn(4, 16, generator=generator)
    pair = LoraPair(torch.randn(4, 32, generator=generator), B_transposed.t(), 1.0)

    table = build_table([[pair]], (16,), 32, torch.float32, "cpu")

    assert table.b_pointers.tolist() == [[B_transposed.data_ptr()]]


def test_the_table_keeps_its_copies_alive(generator: torch.Generator) -> None:
    """The table holds every tensor whose address is in it."""
    slots = random_slots([(4, 3)], 32, (16, 8), torch.float32, generator)

    table = build_table(slots, (16, 8), 32, torch.bfloat16, "cpu")

    held = {matrix.data_ptr() for matrix in table.rows[0].weights}
    assert {*table.a_pointers.flatten().tolist(), *table.b_pointers.flatten().tolist()} <= held
    assert all(matrix.dtype == torch.bfloat16 for matrix in table.rows[0].weights)


def test_a_slot_is_replaced_in_place(generator: torch.Generator) -> None:
    """A new adapter in a slot changes the entries but not the table's address; absent slices become rank 0."""
    before, after = random_slots([(4, 3), (0, 2)], 32, (16, 8), torch.float32, generator)
    table = build_table([before], (16, 8), 32, torch.float32, "cpu")
    address = table.ranks.data_ptr()

    table.replace_slot(0, after)

    assert table.ranks.tolist() == [[0, 2]]
    assert table.a_pointers[0, 0].item() == 0
    assert table.ranks.data_ptr() == address


def test_pairs_that_do_not_fit_are_refused(generator: torch.Generator) -> None:
    """A pair with a wrong shape or too high a rank is refused."""
    table = empty_table(2, (16,), 32, max_rank=4, dtype=torch.float32, device="cpu")
    narrow = LoraPair(torch.zeros(4, 31), torch.zeros(16, 4), 1.0)
    uneven = LoraPair(torch.zeros(4, 32), torch.zeros(16, 3), 1.0)
    high = LoraPair(torch.zeros(5, 32), torch.zeros(16, 5), 1.0)

    for pair in (narrow, uneven, high):
        with pytest.raises(ValueError, match="slice 0"):
            table.replace_slot(1, [pair])
    with pytest.raises(ValueError, match=r"slice 0: columns of shape \(15,\)"):
        table.replace_slot(1, [SliceTerms(column_shift=torch.zeros(15))])
    with pytest.raises(ValueError, match="resolve"):
        table.replace_slot(1, [LoraPair(torch.zeros(4, 32), torch.zeros(16, 4), 1.0, magnitude=torch.ones(16))])
    with pytest.raises(ValueError, match="2 pairs"):
        table.replace_slot(1, [None, None])
    assert table.ranks.tolist() == [[0], [0]]


def test_columns_are_kept_in_fp32(generator: torch.Generator) -> None:
    """Columns are kept in fp32; an adapter without them has no address, and the table knows whether any has."""
    columns = torch.randn(16, generator=generator)
    table = empty_table(2, (16, 8), 32, max_rank=4, dtype=torch.bfloat16, device="cpu")
    assert not table.has_columns

    table.replace_slot(1, [SliceTerms(column_scale=columns), SliceTerms(column_shift=columns[:8].double())])

    assert table.has_columns
    assert table.column_scales.tolist() == [[0, 0], [columns.data_ptr(), 0]]
    assert table.column_shifts[1, 0].item() == 0
    (shift,) = [tensor for tensor in table.rows[1].weights if tensor.data_ptr() == table.column_shifts[1, 1].item()]
    assert torch.equal(shift, columns[:8])
    table.replace_slot(1, [None, None])
    assert not table.has_columns


def test_a_slots_numbers_lie_side_by_side(generator: torch.Generator) -> None:
    """The numbers of a slot are one contiguous row for any number of slices."""
    for ranks in ((3,), (3, 0), (1, 2, 3)):
        widths = (16, 8, 8)[: len(ranks)]
        slots = random_slots([[0] * len(ranks), ranks], 32, widths, torch.float32, generator)
        table = build_table(slots, widths, 32, torch.float32, "cpu")
        other = empty_table(2, widths, 32, max_rank=3, dtype=torch.float32, device="cpu")

        other.words[1] = table.words[1]

        assert other.ranks.tolist() == [[0] * len(ranks), list(ranks)]
        assert torch.equal(other.scales, table.scales)
        assert torch.equal(other.a_pointers, table.a_pointers)
        assert torch.equal(other.b_pointers, table.b_pointers)


def test_odd_sizes_are_not_called_aligned() -> None:
    """A table is marked aligned only if every row of every matrix starts at a multiple of 16 elements."""
    assert empty_table(1, (64, 16), 128, 8, torch.float32, "cpu").is_aligned
    assert not empty_table(1, (64, 20), 128, 8, torch.float32, "cpu").is_aligned
    assert not empty_table(1, (64, 16), 100, 8, torch.float32, "cpu").is_aligned
