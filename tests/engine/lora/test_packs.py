"""Tests of packs: copies of the matrices of several adapters, side by side."""

import torch

from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import AdapterMix, Pack, PackedGroup
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from tests.engine.lora.triton.engine_runs import weights
from tests.engine.lora.triton.test_backend import LayerShapes

KEY = (0, "qkv")


def resident(digest: str, rank: int, scale: float) -> ResidentAdapter:
    return build_resident(weights(digest, rank, 1, scale=scale), LayerShapes(), torch.float32)


def packed(first: ResidentAdapter, second: ResidentAdapter) -> PackedGroup:
    """One block whose rows use the first adapter, and a mixture of both."""
    alone = AdapterMix(((first, 1.0),))
    mixed = AdapterMix(((first, 0.3), (second, 0.7)))
    group = Pack([[alone, mixed]], 0).group(*KEY)
    assert group is not None
    return group


def test_a_rank_has_the_scale_of_its_adapter_times_the_weight_of_its_mix() -> None:
    """The scales of a pack are those of the adapters' tensors times the weights, bit for bit."""
    first, second = resident("a", 8, 1.3), resident("b", 16, 0.7)
    group = packed(first, second)

    parts = [(first, 1.0), (first, 0.3), (second, 0.7)]
    wanted = []
    for index in range(len(first.deltas[KEY].slices)):
        for adapter, weight in parts:
            delta = adapter.deltas[KEY]
            part = delta.slices[index]
            assert delta.scales is not None
            wanted += [one * weight for one in delta.scales[part.rank_start : part.rank_end].tolist()]
    assert group.scales is not None
    assert torch.equal(group.scales[0, 0], torch.tensor(wanted))


def test_a_pack_is_made_without_reading_the_device() -> None:
    """A pack of adapters on a device without memory is made: nothing is read back from there."""
    here = (resident("a", 8, 1.3), resident("b", 16, 0.7))
    first, second = (one.mapped(lambda tensor: tensor.to("meta"), one.buffer) for one in here)
    group = packed(first, second)

    assert group.A_transposed.device.type == "meta"
    assert group.scales is not None
    assert group.scales.device.type == "meta"
