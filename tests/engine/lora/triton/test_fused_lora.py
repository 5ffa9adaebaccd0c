"""Tests of a model's adapters in slots, with two layers of two groups each, under the interpreter."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from graftwork.engine.lora.triton.random_adapters import random_slots, with_random_columns
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import SlotPairs
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity, build_segments
from graftwork.engine.lora.weights import LoraPair
from graftwork.engine.model.projections import GroupShape
from tests.engine.lora.triton.fused_layer import assert_bits_equal

if TYPE_CHECKING:
    from graftwork.engine.lora.triton.fused_lora import FusedLora, LayerKey

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

QKV, DOWN = (40, 24, 24), (40,)
KEYS = ((0, "qkv"), (0, "down"), (1, "qkv"), (1, "down"))
NUM_SLOTS = 4
MAX_RANK = 24


def features_of(key: "LayerKey") -> tuple[int, tuple[int, ...]]:
    return (48, QKV) if key[1] == "qkv" else (72, DOWN)


@pytest.fixture
def lora(fused_lora: ModuleType) -> "FusedLora":
    return make(fused_lora)


def make(fused_lora: ModuleType, batch_invariant: bool = False) -> "FusedLora":
    groups = {key: GroupShape(*features_of(key)) for key in KEYS}
    made: FusedLora = fused_lora.FusedLora(
        groups, NUM_SLOTS, MAX_RANK, torch.float32, "cpu", batch_invariant=batch_invariant
    )
    return made


def adapter(seed: int, rank: int, keys: Sequence["LayerKey"] = KEYS) -> "dict[LayerKey, list[LoraPair | None]]":
    generator = torch.Generator().manual_seed(seed)
    deltas = {}
    for key in keys:
        in_features, widths = features_of(key)
        deltas[key] = random_slots([[rank] * len(widths)], in_features, widths, torch.float32, generator)[0]
    return deltas


class Step:
    """Inputs and base outputs of every layer for one batch."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = {key: torch.randn(num_rows, features_of(key)[0], generator=generator) for key in KEYS}
        self.y = {key: torch.randn(num_rows, sum(features_of(key)[1]), generator=generator) for key in KEYS}

    def run(self, lora: "FusedLora") -> "dict[LayerKey, torch.Tensor]":
        outputs = {key: y.clone() for key, y in self.y.items()}
        for key, y in outputs.items():
            lora.add_deltas(y, self.x[key], *key)
        return outputs

    def expected(
        self, owners: Sequence[RowOwner | None], adapters: "Sequence[Mapping[LayerKey, SlotPairs]]"
    ) -> "dict[LayerKey, torch.Tensor]":
        segments = build_segments(owners)
        outputs = {}
        for key in KEYS:
            widths = features_of(key)[1]
            slots = [deltas.get(key, [None] * len(widths)) for deltas in adapters]
            outputs[key] = add_lora(self.x[key], self.y[key], segments, slots, widths)
        return outputs


def assert_all_close(actual: "dict[LayerKey, torch.Tensor]", expected: "dict[LayerKey, torch.Tensor]") -> None:
    for key in KEYS:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-5)


def test_every_layer_gets_its_rows_deltas(lora: "FusedLora") -> None:
    """Rows of different adapters, of a mixture and of the base get their deltas in two layers."""
    adapters = [adapter(0, 8), adapter(1, 24, KEYS[:1]), adapter(2, 3)]
    for slot, deltas in enumerate(adapters):
        lora.assign(slot, deltas)
    owners: list[RowOwner | None] = [1, None, ((0, 0.5), (2, 0.25)), 0, 2]
    step = Step(len(owners))

    lora.begin_step(owners)

    assert_all_close(step.run(lora), step.expected(owners, adapters))


def test_a_layer_that_no_row_touches_is_not_launched(lora: "FusedLora") -> None:
    """A layer without an adapted row launches no kernel."""
    lora.assign(0, adapter(0, 8, KEYS[:1]))
    lora.assign(1, adapter(1, 8))
    step = Step(2)

    lora.begin_step([0, None])

    lora.add_deltas(step.y[KEYS[3]], torch.empty(0), *KEYS[3])  # any launch would refuse this x
    with pytest.raises(ValueError, match="do not fit"):
        lora.add_deltas(step.y[KEYS[0]], torch.empty(0), *KEYS[0])


def test_a_slot_serves_its_next_adapter(lora: "FusedLora") -> None:
    """After a release, a slot's next adapter finds nothing of the former one in any layer."""
    generator = torch.Generator().manual_seed(1)
    large = {key: with_random_columns(pairs, features_of(key)[1], generator) for key, pairs in adapter(0, 24).items()}
    small = adapter(1, 3, KEYS[2:])
    lora.assign(2, large)
    lora.release(2)
    lora.assign(2, small)
    step = Step(2)

    lora.begin_step([2, None])

    assert_all_close(step.run(lora), step.expected([2, None], [{}, {}, small]))
    assert not lora.has_columns


def test_slots_are_assigned_once_and_released_once(lora: "FusedLora") -> None:
    """A slot that is taken cannot be assigned, and an empty one cannot be released or used."""
    lora.assign(1, adapter(0, 8))
    assert lora.free_slots == [0, 2, 3]

    with pytest.raises(ValueError, match="release it first"):
        lora.assign(1, adapter(1, 8))
    with pytest.raises(ValueError, match="slot 0 is empty"):
        lora.release(0)
    for owner in (0, -1, NUM_SLOTS, ((1, 0.5), (3, 0.5))):
        with pytest.raises(ValueError, match="is empty: assign"):
            lora.begin_step([owner])


def test_an_adapter_that_does_not_fit_changes_nothing(lora: "FusedLora") -> None:
    """An adapter with a wrong rank or an unknown layer is refused whole, and its slot stays free."""
    unfit = adapter(0, 8) | adapter(1, MAX_RANK + 1, KEYS[3:])

    with pytest.raises(ValueError, match=f"above the table's {MAX_RANK}"):
        lora.assign(0, unfit)
    with pytest.raises(ValueError, match="lacks"):
        lora.assign(0, {(2, "qkv"): adapter(0, 8)[KEYS[0]]})

    assert lora.free_slots == [0, 1, 2, 3]
    small = adapter(2, 3, KEYS[3:])
    lora.assign(0, small)
    lora.begin_step([0])
    step = Step(1)
    assert_all_close(step.run(lora), step.expected([0], [small]))


def test_changing_slots_ends_the_step(lora: "FusedLora") -> None:
    """A step that began before a change of slots cannot continue."""
    lora.assign(0, adapter(0, 8))
    step = Step(1)
    lora.begin_step([0])
    lora.release(0)

    with pytest.raises(RuntimeError, match="no step"):
        step.run(lora)
    lora.assign(0, adapter(1, 8))
    with pytest.raises(RuntimeError, match="no step"):
        step.run(lora)


def test_an_adapter_with_columns_is_not_weighted(lora: "FusedLora") -> None:
    """An adapter with columns, such as DoRA, is served alone and refused in a weighted mixture."""
    generator = torch.Generator().manual_seed(1)
    with_columns = {
        key: with_random_columns(pairs, features_of(key)[1], generator) for key, pairs in adapter(0, 8).items()
    }
    lora.assign(0, with_columns)
    lora.assign(1, adapter(1, 8))
    step = Step(2)

    for owner in (((0, 0.5), (1, 0.5)), ((0, 0.5),)):
        with pytest.raises(ValueError, match="cannot be weighted"):
            lora.begin_step([owner, None])
    lora.begin_step([0, 1])

    assert_all_close(step.run(lora), step.expected([0, 1], [with_columns, adapter(1, 8)]))


def test_captured_arrays_keep_their_addresses(
    lora: "FusedLora", fused_lora: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one capacity use the same arrays, so that a captured graph computes the next step."""
    adapters = [adapter(0, 8), adapter(1, 24)]
    for slot, deltas in enumerate(adapters):
        lora.assign(slot, deltas)
    capacity = SegmentCapacity(num_rows=3, num_slots=NUM_SLOTS, tile_rows=1)
    step = Step(3)
    captured: list[Callable[[], None]] = []
    launch = fused_lora.apply_lora
    monkeypatch.setattr(
        fused_lora, "apply_lora", lambda *given, **named: captured.append(partial(launch, *given, **named))
    )
    key = lora.begin_step([0, None, 0], capacity)
    outputs = step.run(lora)

    assert lora.begin_step([1, 0, None], capacity) == key
    for replay in captured:
        replay()

    assert_all_close(outputs, step.expected([1, 0, None], adapters))


def test_columns_call_for_another_graph(lora: "FusedLora") -> None:
    """The key of captured graphs changes when the first adapter with columns comes."""
    capacity = SegmentCapacity(num_rows=1, num_slots=NUM_SLOTS, tile_rows=16)
    lora.assign(0, adapter(0, 8))
    before = lora.begin_step([0], capacity)
    pairs = adapter(1, 8)[KEYS[0]]
    lora.assign(1, {KEYS[0]: with_random_columns(pairs, QKV, torch.Generator().manual_seed(1))})

    assert lora.begin_step([0], capacity) != before


def test_a_row_has_the_same_bits_in_every_batch_where_that_is_asked_for(fused_lora: ModuleType) -> None:
    """With batch invariance, a row has the same bits alone and among many."""
    lora = make(fused_lora, batch_invariant=True)
    lora.assign(0, adapter(0, 24, KEYS[:1]))
    step = Step(24)
    alone, among_many = step.y[KEYS[0]].clone(), step.y[KEYS[0]].clone()

    lora.begin_step([0, *[None] * 23])
    lora.add_deltas(alone, step.x[KEYS[0]], *KEYS[0])
    lora.begin_step([0] * 24)
    lora.add_deltas(among_many, step.x[KEYS[0]], *KEYS[0])

    assert_bits_equal(alone[0], among_many[0])
    with pytest.raises(ValueError, match="not batch-invariant"):
        lora.begin_step([0], SegmentCapacity(1, NUM_SLOTS, tile_rows=1))
