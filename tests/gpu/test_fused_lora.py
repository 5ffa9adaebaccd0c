"""Tests of the kernels under graph replay on a GPU."""

import pytest
import torch

from graftwork.engine.lora.triton.launch_plan import TILE_ROWS
from graftwork.engine.lora.triton.random_adapters import random_slots
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.tiles import RowOwner, SegmentCapacity, build_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

IN_FEATURES = 1024
WIDTHS = (1024, 256, 256)
KEY = (0, "qkv")


@pytest.mark.parametrize("tile_rows", TILE_ROWS)
def test_a_replayed_step_is_the_step_run_at_once(tile_rows: int) -> None:
    """A captured graph that is replayed after slots and owners have changed equals the reference for the new step."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.lora.triton.fused_lora import FusedLora
    from graftwork.engine.model.projections import GroupShape

    generator = torch.Generator().manual_seed(3)
    slots = random_slots([(8, 8, 8), (16, 0, 64), (64, 3, 24)], IN_FEATURES, WIDTHS, torch.bfloat16, generator)
    lora = FusedLora({KEY: GroupShape(IN_FEATURES, WIDTHS)}, num_slots=3, max_rank=64, dtype=torch.bfloat16)
    lora.assign(0, {KEY: slots[0]})
    lora.assign(1, {KEY: slots[1]})
    x = torch.randn(40, IN_FEATURES, generator=generator).bfloat16()
    base = torch.randn(40, sum(WIDTHS), generator=generator).bfloat16()
    on_device, y = x.cuda(), base.cuda()
    capacity = SegmentCapacity(num_rows=40, num_slots=3, tile_rows=tile_rows, has_mixtures=True)
    captured_key = lora.begin_step([0] * 40, capacity)
    lora.add_deltas(y, on_device, *KEY)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora.add_deltas(y, on_device, *KEY)

    lora.release(0)
    lora.assign(2, {KEY: slots[2]})
    owners: list[RowOwner | None] = [2, None, 1, ((1, 0.5), (2, 0.25))] * 10
    key = lora.begin_step(owners, capacity)
    y.copy_(base)
    graph.replay()

    assert key == captured_key
    expected = add_lora(x, base, build_segments(owners), slots, WIDTHS)
    torch.testing.assert_close(y.cpu(), expected, rtol=2**-7, atol=1e-3)
