"""The Triton pair against the torch oracle, under the interpreter: small shapes, every trap."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from graftwork.engine.adapter_weights import LoraPair
from graftwork.engine.kernels.lora_plan import LoraPlan
from graftwork.engine.kernels.lora_segments import SegmentCapacity, build_segments
from graftwork.engine.kernels.random_adapters import random_slots
from graftwork.engine.kernels.reference import add_lora
from graftwork.engine.kernels.slice_table import SliceTable, SlotPairs, build_table

# Triton 3.6's interpreter makes loop bounds of one-element arrays (and needs numpy < 2.4 for it).
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

IN_FEATURES = 104  # no multiple of a block, and no multiple of 16
WIDTHS = (72, 24, 24)  # as in grouped-query attention, and the widest takes two blocks
RANKS = ((1, 3, 8), (24, 0, 12), (16, 16, 64))
OWNERS: list[int | None] = [2, None, 0, 1, 1, 2, None, 0, 1, 2]

SPLIT_PLAN = LoraPlan(block_in=32, block_rank=16, block_out=64, num_spans=2, parallel_spans=True, num_stages=1)
SERIAL_PLAN = LoraPlan(block_in=32, block_rank=16, block_out=64, num_spans=2, parallel_spans=False, num_stages=1)


class Layer:
    """A fused layer with three adapters, an input and a base output."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_rows: int = len(OWNERS)) -> None:
        generator = torch.Generator().manual_seed(7)
        self.slots = random_slots(RANKS, IN_FEATURES, WIDTHS, dtype, generator)
        self.table = build_table(self.slots, WIDTHS, IN_FEATURES, dtype, "cpu")
        self.x = torch.randn(num_rows, IN_FEATURES, generator=generator).to(dtype)
        self.y = torch.randn(num_rows, sum(WIDTHS), generator=generator).to(dtype)


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ranks_of_every_size_mix_in_a_batch(
    lora_matmul: ModuleType, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """Ranks 1 to 128, multiples of a block or not, stand side by side with rows of the base."""
    ranks = [(1,), (3,), (8,), (12,), (16,), (24,), (64,), (128,)]
    slots = random_slots(ranks, 96, (80,), dtype, generator)
    owners = [5, 0, None, 7, 3, 1, 6, 2, 4, None, 0, 7]
    x = torch.randn(len(owners), 96, generator=generator).to(dtype)
    y = torch.randn(len(owners), 80, generator=generator)
    segments = build_segments(owners)
    expected = add_lora(x, y, segments, slots, (80,))

    lora_matmul.apply_lora(x, y, build_table(slots, (80,), 96, dtype, "cpu"), segments)

    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("plan", [SPLIT_PLAN, SERIAL_PLAN], ids=["parallel", "serial"])
def test_slices_of_unequal_width_share_a_launch(lora_matmul: ModuleType, dtype: torch.dtype, plan: LoraPlan) -> None:
    """q, k and v differ in width and rank, one adapter leaves k alone, and the output is off by one rounding at most."""
    layer = Layer(dtype)
    segments = build_segments(OWNERS)
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments, plan)

    ulp = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(layer.y, expected, rtol=ulp, atol=1e-5)


@pytest.mark.parametrize(
    "owners",
    [
        pytest.param([None] * 5, id="all base"),
        pytest.param([], id="empty"),
        pytest.param([1] * 20, id="one adapter, two tiles"),
        pytest.param([0, 1, 2], id="all distinct"),
        pytest.param([0] * 17 + [2, 1, None], id="skewed"),
    ],
)
def test_batches_of_every_make_up(lora_matmul: ModuleType, owners: list[int | None]) -> None:
    """Whoever is in the batch, each row gets its own adapter's delta and base rows keep their bits."""
    layer = Layer(num_rows=len(owners))
    segments = build_segments(owners)
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)
    before = layer.y.clone()

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments, SERIAL_PLAN)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)
    of_base = [row for row, owner in enumerate(owners) if owner is None]
    assert_bits_equal(layer.y[of_base], before[of_base])


def poisoned_pair(pair: LoraPair) -> LoraPair:
    """The same pair in the midst of NaN: eight ranks of it follow the last real one, and 64 numbers precede the first."""
    poison = float("nan")

    def surround(matrix: torch.Tensor) -> torch.Tensor:
        memory = torch.full((matrix.numel() + 64 + 8 * matrix.shape[1],), poison)
        memory[64 : 64 + matrix.numel()] = matrix.flatten()
        return memory[64 : 64 + matrix.numel()].view(matrix.shape)

    return LoraPair(surround(pair.A), surround(pair.B.t().contiguous()).t(), pair.scale)


def test_what_is_not_real_is_never_used(lora_matmul: ModuleType) -> None:
    """NaN in rank tails, in slots that no row has, in scratch, in base rows and in padding reaches no output."""
    layer = Layer(num_rows=16)
    owners: list[int | None] = [2, None, 0, 0]
    poison = [
        LoraPair(torch.full((4, IN_FEATURES), float("nan")), torch.full((w, 4), float("nan")), 1.0) for w in WIDTHS
    ]
    slots: list[SlotPairs] = [[poisoned_pair(pair) if pair else None for pair in pairs] for pairs in layer.slots]
    table = build_table([slots[0], poison, slots[2]], WIDTHS, IN_FEATURES, torch.float32, "cpu")
    kept = {
        matrix.data_ptr() for pairs in (slots[0], slots[2]) for pair in pairs if pair for matrix in (pair.A, pair.B)
    }
    assert {matrix.data_ptr() for slot in (0, 2) for matrix in table.weights[slot]} == kept, "copies are not poisoned"
    segments = build_segments(owners, capacity=SegmentCapacity(num_rows=16, num_slots=3, tile_rows=16))
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)
    layer.x[1] = layer.x[4:] = float("nan")
    planes = lora_matmul.empty_planes(table, segments, SPLIT_PLAN).fill_(float("nan"))

    lora_matmul.lora_shrink(layer.x, planes, table, segments, SPLIT_PLAN)
    lora_matmul.lora_expand(planes, layer.y, table, segments, SPLIT_PLAN)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def test_a_smaller_rank_can_follow_a_larger_one_in_a_slot(lora_matmul: ModuleType) -> None:
    """Nothing of a slot's former adapter is left in what its next one computes."""
    layer = Layer()
    segments = build_segments([2] * len(OWNERS))
    expected = add_lora(layer.x, layer.y, segments, [layer.slots[0]] * 3, WIDTHS)
    planes = lora_matmul.empty_planes(layer.table, segments, SERIAL_PLAN)
    lora_matmul.lora_shrink(layer.x, planes, layer.table, segments, SERIAL_PLAN)

    layer.table.replace_slot(2, layer.slots[0])
    lora_matmul.lora_shrink(layer.x, planes, layer.table, segments, SERIAL_PLAN)
    lora_matmul.lora_expand(planes, layer.y, layer.table, segments, SERIAL_PLAN)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def run(
    lora_matmul: ModuleType, layer: Layer, owners: Sequence[int | None], plan: LoraPlan = SPLIT_PLAN
) -> torch.Tensor:
    y = layer.y.clone()
    lora_matmul.apply_lora(layer.x, y, layer.table, build_segments(owners), plan)
    return y


def test_equal_inputs_give_equal_bits(lora_matmul: ModuleType) -> None:
    """Two runs are the same run."""
    layer = Layer()

    assert_bits_equal(run(lora_matmul, layer, OWNERS), run(lora_matmul, layer, OWNERS))


def test_spans_in_parallel_or_in_turn_give_equal_bits(lora_matmul: ModuleType) -> None:
    """How many programs share a sum is a matter of speed: the order of its terms is the same."""
    layer = Layer()

    assert_bits_equal(run(lora_matmul, layer, OWNERS, SPLIT_PLAN), run(lora_matmul, layer, OWNERS, SERIAL_PLAN))


def test_the_order_of_rows_does_not_matter(lora_matmul: ModuleType, generator: torch.Generator) -> None:
    """A shuffled batch gives the same rows, shuffled."""
    layer = Layer()
    in_order = run(lora_matmul, layer, OWNERS)
    shuffle = torch.randperm(len(OWNERS), generator=generator)
    layer.x, layer.y = layer.x[shuffle], layer.y[shuffle]

    shuffled = run(lora_matmul, layer, [OWNERS[row] for row in shuffle.tolist()])

    assert_bits_equal(shuffled, in_order[shuffle])


def test_neighbours_do_not_matter(lora_matmul: ModuleType) -> None:
    """A row's bits stay when everyone else in the batch changes adapter, values, number, or turn to NaN."""
    layer = Layer(num_rows=20)
    among_some = run(lora_matmul, layer, [1, 0, 2, None] + [None] * 16)[0]
    layer.x[1:] = float("nan")

    among_others = run(lora_matmul, layer, [1, 1, 1, 2] + [1] * 16)[0]

    assert_bits_equal(among_others, among_some)


def test_padding_does_not_matter(lora_matmul: ModuleType) -> None:
    """The empty tiles of a captured graph do nothing."""
    layer = Layer(num_rows=20)
    owners: list[int | None] = [*[1] * 18, None, 2]
    expected = run(lora_matmul, layer, owners)
    segments = build_segments(owners, capacity=SegmentCapacity(num_rows=20, num_slots=3, tile_rows=16))

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments, SPLIT_PLAN)

    assert_bits_equal(layer.y, expected)


def test_large_tiles_are_right_too(lora_matmul: ModuleType) -> None:
    """A prefill's tiles of 32 rows, full and partly filled, hold the same result (bit for bit only on a GPU)."""
    layer = Layer(num_rows=40)
    segments = build_segments([*[1] * 38, None, 2], capacity=SegmentCapacity(num_rows=40, num_slots=3, tile_rows=32))
    expected = add_lora(layer.x, layer.y, segments, layer.slots, WIDTHS)

    lora_matmul.apply_lora(layer.x, layer.y, layer.table, segments, SERIAL_PLAN)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def test_rows_may_be_views_of_wider_ones(lora_matmul: ModuleType) -> None:
    """Input and output may be columns of wider tensors, whose other columns are let alone."""
    layer = Layer()
    expected = run(lora_matmul, layer, OWNERS)
    wide_x = torch.full((len(OWNERS), IN_FEATURES + 9), float("nan"))
    wide_y = torch.full((len(OWNERS), sum(WIDTHS) + 11), float("nan"))
    wide_x[:, 4 : 4 + IN_FEATURES] = layer.x
    wide_y[:, 5 : 5 + sum(WIDTHS)] = layer.y

    lora_matmul.apply_lora(
        wide_x[:, 4 : 4 + IN_FEATURES], wide_y[:, 5 : 5 + sum(WIDTHS)], layer.table, build_segments(OWNERS), SPLIT_PLAN
    )

    assert_bits_equal(wide_y[:, 5 : 5 + sum(WIDTHS)], expected)
    assert torch.isnan(wide_y[:, :5]).all()
    assert torch.isnan(wide_y[:, 5 + sum(WIDTHS) :]).all()


def test_weights_and_activations_may_differ_in_dtype(lora_matmul: ModuleType) -> None:
    """fp32 adapters serve a bf16 model, without losing theirs on the way."""
    layer = Layer()
    x = layer.x.bfloat16()
    segments = build_segments(OWNERS)
    expected = add_lora(x, layer.y, segments, layer.slots, WIDTHS)

    lora_matmul.apply_lora(x, layer.y, layer.table, segments, SPLIT_PLAN)

    torch.testing.assert_close(layer.y, expected, rtol=1e-5, atol=1e-5)


def test_the_plan_of_a_real_layer_is_right_too(lora_matmul: ModuleType, generator: torch.Generator) -> None:
    """Without a plan given, a layer wide enough for several spans is planned and computed."""
    slots = random_slots([(8, 4), (0, 20)], 1100, (130, 70), torch.float32, generator)
    x = torch.randn(3, 1100, generator=generator)
    y = torch.randn(3, 200, generator=generator)
    segments = build_segments([1, 0, 1])
    expected = add_lora(x, y, segments, slots, (130, 70))

    lora_matmul.apply_lora(x, y, build_table(slots, (130, 70), 1100, torch.float32, "cpu"), segments)

    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused(lora_matmul: ModuleType) -> None:
    """A kernel would read out of bounds, so the shapes are checked before the launch."""
    layer = Layer()
    segments = build_segments(OWNERS)
    table: SliceTable = layer.table

    with pytest.raises(ValueError, match="do not fit"):
        lora_matmul.apply_lora(layer.x[:, 1:], layer.y, table, segments)
    with pytest.raises(ValueError, match="adjacent"):
        lora_matmul.apply_lora(layer.x.t().contiguous().t(), layer.y, table, segments)
    with pytest.raises(ValueError, match="speak of 10 rows"):
        lora_matmul.apply_lora(layer.x[:4], layer.y, table, segments)
