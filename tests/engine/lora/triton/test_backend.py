"""Tests of the Triton backend's slots, and of adapters without a slot."""

import gc
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import AdapterMix, PackCache
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.projections import GROUPS, GroupShape, ProjectionGroup
from tests.engine.lora.test_lifecycle import SHAPES
from tests.engine.lora.triton.engine_runs import weights

if TYPE_CHECKING:
    from graftwork.engine.lora.triton.backend import TritonLora

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

MAX_RANK = 16
KEY = (0, "down")


class LayerShapes:
    """Linear layers that have only sizes."""

    def groups(self, layer: int) -> tuple[ProjectionGroup, ...]:
        return GROUPS

    def module(self, layer: int, target: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError("low-rank factors do not depend on the base")

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        return SHAPES[target]


def resident(digest: str, rank: int, seed: int = 1) -> ResidentAdapter:
    return build_resident(weights(digest, rank, seed, ("down_proj",), scale=1.3), LayerShapes(), torch.float32)


@pytest.fixture
def plain() -> TorchLora:
    rules = BatchInvariance.of(torch.float32)
    return TorchLora(PackCache(1 << 20, rules.min_columns), rules)


@pytest.fixture
def lora(interpreted: dict[str, ModuleType], plain: TorchLora) -> "TritonLora":
    """Two slots for one fused layer."""
    groups = {KEY: GroupShape(56, (32,))}
    fused = interpreted["fused_lora"].FusedLora(groups, 2, MAX_RANK, torch.float32, "cpu")
    made: TritonLora = interpreted["backend"].TritonLora(fused, groups, MAX_RANK, plain)
    return made


def place(lora: "TritonLora", adapter: ResidentAdapter) -> ResidentAdapter:
    lora.place(adapter)
    lora.check_integrity()
    return adapter


def test_those_without_a_slot_are_applied_all_the_same(lora: "TritonLora", plain: TorchLora) -> None:
    """Adapters that get no slot are applied by torch, with the same result, and their rows are counted."""
    first, second, third = (place(lora, resident(name, 8, seed)) for seed, name in enumerate("abc"))
    high = place(lora, resident("high", MAX_RANK + 1))
    mixes = [
        AdapterMix(((first, 1.0),)),
        AdapterMix(((first, 0.5), (second, 2.0))),
        AdapterMix(((first, 0.5), (third, 2.0))),
        AdapterMix(((third, 1.0),)),
        AdapterMix(((high, 1.0),)),
    ]
    segments = [Segment(row, row + 1, mix) for row, mix in enumerate(mixes)]
    generator = torch.Generator().manual_seed(2)
    x, base = torch.randn(8, 56, generator=generator), torch.randn(8, 32, generator=generator)
    actual, expected = base.clone(), base.clone()

    lora.step(segments, 8).add_deltas(actual, x, *KEY)

    plain.step(segments, 8).add_deltas(expected, x, *KEY)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[5:], base[5:])
    assert not torch.isclose(actual[:5], base[:5]).all(dim=1).any()
    assert (lora.rows.kernels, lora.rows.torch, plain.rows.kernels) == (2, 3, 0)


def test_a_slot_that_is_given_back_goes_to_the_next(lora: "TritonLora") -> None:
    """With two slots, a hundred adapters one after another each get a slot."""
    place(lora, resident("stays", 8))
    for number in range(100):
        adapter = place(lora, resident(f"goes-{number}", 8))
        assert lora.slot_of(adapter.digest) is not None

        lora.forget(adapter.digest)
        lora.check_integrity()


def test_nothing_keeps_the_memory_of_a_forgotten_adapter(lora: "TritonLora") -> None:
    """The buffer of a forgotten adapter is freed although the last step used it."""
    adapter = resident("a", 8)
    place(lora, adapter)
    memory = StorageWeakRef(adapter.buffer.untyped_storage())  # type: ignore[no-untyped-call]
    lora.step([Segment(0, 1, AdapterMix(((adapter, 1.0),)))], 8)

    lora.forget("a")
    del adapter
    gc.collect()

    assert memory.expired()  # type: ignore[no-untyped-call]


def test_an_adapter_that_was_never_placed_is_forgotten_without_harm(lora: "TritonLora") -> None:
    """Forgetting an adapter without a slot changes nothing."""
    place(lora, resident("a", 8))

    lora.forget("b")

    assert lora.slot_of("a") is not None
    assert lora.slot_of("b") is None
