"""Tests of both pairs of kernels against the torch reference under the interpreter, on small shapes."""

from types import ModuleType

import pytest
import torch

from graftwork.engine.lora.triton.launch_plan import LaunchBounds, LoraPlan
from graftwork.engine.lora.triton.random_adapters import random_slots
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import build_table
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity, build_segments
from graftwork.engine.lora.weights import LoraPair
from tests.engine.lora.triton.fused_layer import (
    IN_FEATURES,
    OWNERS,
    SERIAL_PLAN,
    SPLIT_PLAN,
    WAYS,
    WIDTHS,
    FusedLayer,
    assert_bits_equal,
)

pytestmark = [
    # Triton 3.6's interpreter makes loop bounds of one-element arrays (and needs numpy < 2.4 for it).
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.parametrize("tile_rows", WAYS, ids=["row-wise", "grouped"]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ranks_of_every_size_mix_in_a_batch(
    lora_matmul: ModuleType, generator: torch.Generator, dtype: torch.dtype, tile_rows: int
) -> None:
    """Ranks from 1 to 128 share a batch with base rows."""
    ranks = [(1,), (3,), (8,), (12,), (16,), (24,), (64,), (128,)]
    slots = random_slots(ranks, 96, (80,), dtype, generator)
    owners = [5, 0, None, 7, 3, 1, 6, 2, 4, None, 0, 7]
    x = torch.randn(len(owners), 96, generator=generator).to(dtype)
    y = torch.randn(len(owners), 80, generator=generator)
    segments = build_segments(owners, tile_rows=tile_rows)
    expected = add_lora(x, y, segments, slots, (80,))

    lora_matmul.apply_lora(x, y, build_table(slots, (80,), 96, dtype, "cpu"), segments)

    # Grouped, v is multiplied as a bf16 and what that leaves over; row-wise it is fp32 throughout.
    tolerance = 1e-4 if dtype == torch.bfloat16 and tile_rows > 1 else 1e-5
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plan", [SPLIT_PLAN, SERIAL_PLAN], ids=["parallel", "serial"])
def test_slices_of_unequal_width_share_a_launch(
    lora_matmul: ModuleType, dtype: torch.dtype, plan: LoraPlan, tile_rows: int
) -> None:
    """Slices of unequal width and rank share a launch, and the output is off by at most one rounding."""
    layer = FusedLayer(dtype)
    expected = add_lora(layer.x, layer.y, build_segments(OWNERS), layer.slots, WIDTHS)

    actual = layer.run(lora_matmul, OWNERS, tile_rows, plan)

    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=1e-4 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([None] * 5, id="all base"),
        pytest.param([], id="empty"),
        pytest.param([1] * 4, id="all one"),
        pytest.param([0, 1, 2], id="all distinct"),
        pytest.param([0] * 17 + [2, 1, None], id="skewed"),
    ],
)
def test_batches_of_every_make_up(lora_matmul: ModuleType, owners: list[int | None], tile_rows: int) -> None:
    """In random batches each row gets its own adapter's delta, and base rows keep their bits."""
    if tile_rows == 1 and len(owners) > 16:
        owners = owners[15:]  # 17 rows are more than a tile; without tiles, two show the same
    layer = FusedLayer(num_rows=len(owners))
    expected = add_lora(layer.x, layer.y, build_segments(owners), layer.slots, WIDTHS)

    actual = layer.run(lora_matmul, owners, tile_rows, SERIAL_PLAN)

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    of_base = [row for row, owner in enumerate(owners) if owner is None]
    assert_bits_equal(actual[of_base], layer.y[of_base])


def poisoned_pair(pair: LoraPair) -> LoraPair:
    """Returns the same pair with NaN around it: eight ranks after the last one, and 64 numbers before the first."""
    poison = float("nan")

    def surround(matrix: torch.Tensor) -> torch.Tensor:
        memory = torch.full((matrix.numel() + 64 + 8 * matrix.shape[1],), poison)
        memory[64 : 64 + matrix.numel()] = matrix.flatten()
        return memory[64 : 64 + matrix.numel()].view(matrix.shape)

    return LoraPair(surround(pair.A), surround(pair.B.t().contiguous()).t(), pair.scale)


def test_what_is_not_real_is_never_used(lora_matmul: ModuleType, tile_rows: int) -> None:
    """NaN in rank tails, unused slots, scratch, base rows and padding reaches no output."""
    layer = FusedLayer(num_rows=6)
    owners: list[int | None] = [2, None, 0, 0]
    poison = [
        LoraPair(torch.full((4, IN_FEATURES), float("nan")), torch.full((w, 4), float("nan")), 1.0) for w in WIDTHS
    ]
    slots = [[poisoned_pair(pair) if pair else None for pair in pairs] for pairs in layer.slots]
    table = build_table([slots[0], poison, slots[2]], WIDTHS, IN_FEATURES, torch.float32, "cpu")
    kept = {
        matrix.data_ptr() for pairs in (slots[0], slots[2]) for pair in pairs if pair for matrix in (pair.A, pair.B)
    }
    assert {matrix.data_ptr() for slot in (0, 2) for matrix in table.rows[slot].weights} == kept, "copies lack poison"
    segments = build_segments(owners, capacity=SegmentCapacity(num_rows=6, num_slots=3, tile_rows=tile_rows))
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)
    layer.x[1] = layer.x[4:] = float("nan")
    planes = lora_matmul.empty_planes(table, segments, SPLIT_PLAN, rank=64).fill_(float("nan"))

    lora_matmul.lora_shrink(layer.x, planes, table, segments, SPLIT_PLAN)
    lora_matmul.lora_expand(planes, layer.y, table, segments, SPLIT_PLAN, has_columns=True)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def test_a_smaller_rank_can_follow_a_larger_one_in_a_slot(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A slot's next adapter of smaller rank uses nothing of the former adapter."""
    layer = FusedLayer(num_rows=2)
    segments = build_segments([2, 2], tile_rows=tile_rows)
    expected = add_lora(layer.x, layer.y, segments, [layer.slots[0]] * 3, WIDTHS)
    planes = lora_matmul.empty_planes(layer.table, segments, SERIAL_PLAN, rank=64)
    lora_matmul.lora_shrink(layer.x, planes, layer.table, segments, SERIAL_PLAN)

    layer.table.replace_slot(2, layer.slots[0])
    lora_matmul.lora_shrink(layer.x, planes, layer.table, segments, SERIAL_PLAN)
    lora_matmul.lora_expand(planes, layer.y, layer.table, segments, SERIAL_PLAN, has_columns=False)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def test_equal_inputs_give_equal_bits(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Two runs with equal inputs give equal bits."""
    layer = FusedLayer()

    assert_bits_equal(layer.run(lora_matmul, OWNERS, tile_rows), layer.run(lora_matmul, OWNERS, tile_rows))


def test_what_is_launched_does_not_matter(lora_matmul: ModuleType, tile_rows: int) -> None:
    """The number of programs that share a sum, and the largest rank, change no bit."""
    owners = OWNERS[:4]  # of each adapter and of the base model
    layer = FusedLayer(num_rows=len(owners))
    expected = layer.run(lora_matmul, owners, tile_rows, SPLIT_PLAN)
    segments = build_segments(owners, tile_rows=tile_rows)
    y = layer.y.clone()

    lora_matmul.apply_lora(layer.x, y, layer.table, segments, SPLIT_PLAN, LaunchBounds(100, has_columns=True))

    assert_bits_equal(y, expected)
    assert_bits_equal(layer.run(lora_matmul, owners, tile_rows, SERIAL_PLAN), expected)


@pytest.mark.parametrize("most_programs", [1, 3])
def test_few_programs_compute_all_units(
    lora_matmul: ModuleType, monkeypatch: pytest.MonkeyPatch, most_programs: int, tile_rows: int
) -> None:
    """Programs that share more units than there are programs compute all of them, with the same bits."""
    layer = FusedLayer(torch.float32)
    expected = layer.run(lora_matmul, OWNERS, tile_rows, SPLIT_PLAN)
    monkeypatch.setattr(lora_matmul, "MOST_PROGRAMS", most_programs)

    actual = layer.run(lora_matmul, OWNERS, tile_rows, SPLIT_PLAN)

    assert torch.equal(actual, expected)


def test_the_order_of_rows_does_not_matter(lora_matmul: ModuleType, generator: torch.Generator, tile_rows: int) -> None:
    """A shuffled batch gives the same rows in the shuffled order."""
    layer = FusedLayer()
    in_order = layer.run(lora_matmul, OWNERS, tile_rows)
    shuffle = torch.randperm(len(OWNERS), generator=generator)
    layer.x, layer.y = layer.x[shuffle], layer.y[shuffle]

    shuffled = layer.run(lora_matmul, [OWNERS[row] for row in shuffle.tolist()], tile_rows)

    assert_bits_equal(shuffled, in_order[shuffle])


def test_neighbours_do_not_matter(lora_matmul: ModuleType, tile_rows: int) -> None:
    """A row keeps its bits when all other rows change their adapter, values or number."""
    num_more = 13 if tile_rows > 1 else 1  # as many rows of its adapter as fill a tile
    layer = FusedLayer(num_rows=5 + num_more)
    among_some = layer.run(lora_matmul, [1, 0, 2] + [None] * (2 + num_more), tile_rows)[0]
    layer.x[1:] = float("nan")

    others: list[RowOwner | None] = [1, 1, 2, ((0, 1.0), (2, 0.5)), *[1] * num_more]
    among_others = layer.run(lora_matmul, [1, *others], tile_rows)[0]

    assert_bits_equal(among_others, among_some)


def test_padding_does_not_matter(lora_matmul: ModuleType, tile_rows: int) -> None:
    """The empty tiles of a captured graph change nothing, with or without mixtures."""
    layer = FusedLayer(num_rows=6)
    owners: list[int | None] = [1, 1, 1, None, 2]
    expected = layer.run(lora_matmul, owners, tile_rows)

    for has_mixtures in (False, True):
        capacity = SegmentCapacity(num_rows=6, num_slots=3, tile_rows=tile_rows, has_mixtures=has_mixtures)
        y = layer.y.clone()
        lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners, capacity=capacity), SPLIT_PLAN)
        assert_bits_equal(y, expected)


def test_rows_may_be_views_of_wider_ones(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Input and output may be columns of wider tensors, whose other columns do not change."""
    layer = FusedLayer()
    expected = layer.run(lora_matmul, OWNERS, tile_rows)
    wide_x = torch.full((len(OWNERS), IN_FEATURES + 9), float("nan"))
    wide_y = torch.full((len(OWNERS), sum(WIDTHS) + 11), float("nan"))
    layer.x = wide_x[:, 4 : 4 + IN_FEATURES].copy_(layer.x)
    y = wide_y[:, 5 : 5 + sum(WIDTHS)].copy_(layer.y)

    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(OWNERS, tile_rows=tile_rows), SPLIT_PLAN)

    assert_bits_equal(y, expected)
    assert torch.isnan(wide_y[:, :5]).all()
    assert torch.isnan(wide_y[:, 5 + sum(WIDTHS) :]).all()


def test_rows_may_lie_beyond_two_to_the_31(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Offsets are 64 bits wide: the last row starts more than 2^31 elements after the first."""
    layer = FusedLayer(torch.float16, num_rows=3)
    owners = [0, None, 2]
    expected = layer.run(lora_matmul, owners, tile_rows)
    memory = torch.empty(2**31 + 1024, dtype=torch.float16)  # of which only the pages of the rows are ever touched
    layer.x = memory.as_strided((3, IN_FEATURES), (2**30 + 16, 1)).copy_(layer.x)
    y = memory.as_strided((3, sum(WIDTHS)), (2**30 + 16, 1), IN_FEATURES).copy_(layer.y)

    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners, tile_rows=tile_rows), SPLIT_PLAN)

    assert_bits_equal(y, expected)


def test_weights_and_activations_may_differ_in_dtype(lora_matmul: ModuleType, tile_rows: int) -> None:
    """fp32 adapters on a bf16 model keep their precision."""
    layer = FusedLayer()
    layer.x = layer.x.bfloat16()
    expected = add_lora(layer.x, layer.y, build_segments(OWNERS), layer.slots, WIDTHS)

    torch.testing.assert_close(layer.run(lora_matmul, OWNERS, tile_rows), expected, rtol=1e-5, atol=1e-5)


def test_the_plan_of_a_real_layer_is_right_too(
    lora_matmul: ModuleType, generator: torch.Generator, tile_rows: int
) -> None:
    """A layer wide enough for several spans is computed by its own plan."""
    slots = random_slots([(8, 4), (0, 20)], 1100, (300, 70), torch.float32, generator)
    x = torch.randn(3, 1100, generator=generator)
    y = torch.randn(3, 370, generator=generator)
    segments = build_segments([1, 0, 1], tile_rows=tile_rows)
    expected = add_lora(x, y, segments, slots, (300, 70))

    lora_matmul.apply_lora(x, y, build_table(slots, (300, 70), 1100, torch.float32, "cpu"), segments)

    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_kernels_are_told_what_they_ask_for(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Each launch passes exactly the arguments that its kernel has, as the compiler demands."""
    layer = FusedLayer()
    segments = build_segments(OWNERS, tile_rows=tile_rows)
    planes = lora_matmul.empty_planes(layer.table, segments, SPLIT_PLAN, rank=64)
    both = (layer.table, segments, SPLIT_PLAN)

    for launch in (
        lora_matmul.shrink_launch(layer.x, planes, *both),
        lora_matmul.expand_launch(planes, layer.y, *both, has_columns=False),
    ):
        assert {*launch.arguments} == {*launch.kernel.arg_names}


def test_shapes_that_do_not_fit_are_refused(lora_matmul: ModuleType, tile_rows: int) -> None:
    """Shapes that do not fit are refused before the launch."""
    layer = FusedLayer()
    segments = build_segments(OWNERS, tile_rows=tile_rows)

    with pytest.raises(ValueError, match="do not fit"):
        lora_matmul.apply_lora(layer.x[:, 1:], layer.y, layer.table, segments)
    with pytest.raises(ValueError, match="adjacent"):
        lora_matmul.apply_lora(layer.x.t().contiguous().t(), layer.y, layer.table, segments)
    with pytest.raises(ValueError, match="speak of 8 rows"):
        lora_matmul.apply_lora(layer.x[:4], layer.y, layer.table, segments)
