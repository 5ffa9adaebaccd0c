"""Tests of steps of a fixed capacity, which CUDA graphs need."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.core.step import RequestSlice
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.model.config import read_model_config
from tests.engine.attention.batches import batch_of, piece
from tests.engine.attention.cases import CPU
from tests.engine.conftest import RandomModels

PAGE_TOKENS = 16


@pytest.fixture
def attention(interpreted: dict[str, ModuleType], models: RandomModels) -> Any:
    """The kernels over random pages of a small model."""
    model = read_model_config(models.base)
    memory = DeviceMemory(80, bytes_per_page(model, PAGE_TOKENS, torch.float32), CPU)
    cache = KvCache(model, memory, PAGE_TOKENS, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for pages in cache.layer(0):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return interpreted["triton_attention"].TritonAttention(model, cache, torch.float32)


def decoding(*lengths: int) -> list[RequestSlice]:
    """Rows that decode at these positions, over pages that they share."""
    return [piece(str(index), at, 1, list(range(index, index + at // 16 + 1))) for index, at in enumerate(lengths)]


@pytest.fixture
def launches(interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every launch of the test depends on, in order: its kernel, grid, numbers and addresses."""
    seen: list[Any] = []
    launch = interpreted["launch"].Launch
    run = launch.run

    def watched(one: Any) -> None:
        values = {
            name: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for name, value in one.arguments.items()
            if name not in ("query", "output")  # a graph has these in its own memory
        }
        seen.append((one.kernel, one.grid, values))
        run(one)

    monkeypatch.setattr(launch, "run", watched)
    return seen


def test_a_refilled_step_is_launched_alike_and_equals_an_eager_one(
    attention: Any, interpreted: dict[str, ModuleType], launches: list[Any]
) -> None:
    """Steps of other rows, lengths and splits use one grid and one set of addresses, and have the bits of eager steps,
    also after a larger eager step."""
    capacity = interpreted["triton_attention"].StepCapacity(num_queries=4, num_keys=800, num_pages=150)
    fixed = attention.reserve(capacity)
    query = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(5))
    seen: list[Any] = []
    steps: list[Sequence[RequestSlice]] = [decoding(3, 300, 799), decoding(15)]
    for rows in steps:
        batch = batch_of(rows, num_padding=4 - len(rows))
        expected = attention.plan(batch).attend(0, query)
        attention.plan(batch_of([piece("long", 900, 5, list(range(57)), 4)])).attend(0, query.repeat(2, 1, 1)[:5])
        launches.clear()

        fixed.refill(batch)
        mixed = fixed.attend(0, query)

        assert torch.equal(mixed, expected)
        seen.append(list(launches))
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]


def test_a_refilled_step_with_chunks_is_launched_alike_and_equals_an_eager_one(
    attention: Any, launches: list[Any], interpreted: dict[str, ModuleType]
) -> None:
    """Steps of chunks, drafts and decoding rows use one grid and one set of addresses, and have the bits of eager steps.
    The results of padding rows are zero, whatever was in memory, and NaN in their queries reaches nothing."""
    capacity = interpreted["triton_attention"].StepCapacity(8, 800, 300, num_chunk_rows=140, num_chunks=4)
    fixed = attention.reserve(capacity)
    seen: list[Any] = []
    steps = [
        [piece("a", 0, 70, list(range(5))), *decoding(300, 12)],
        [piece("b", 290, 2, list(range(20))), piece("c", 3, 40, [5, 6, 7], 2), piece("d", 0, 90, list(range(6)))],
        decoding(799),
    ]
    for rows in steps:
        batch = batch_of(rows, num_padding=140 - sum(one.num_tokens for one in rows))
        end = sum(one.num_tokens for one in rows)
        query = torch.randn(140, 4, 8, generator=torch.Generator().manual_seed(5))
        query[end:] = float("nan")
        expected = attention.plan(batch).attend(0, query)
        launches.clear()

        fixed.refill(batch)
        mixed = fixed.attend(0, query)

        assert torch.equal(mixed[:end], expected[:end])
        assert (mixed[end:] == 0).all()
        seen.append(list(launches))
    assert len(seen[0]) == 3
    assert seen[0] == seen[1] == seen[2]


def test_what_exceeds_the_capacity_is_refused(attention: Any, interpreted: dict[str, ModuleType]) -> None:
    """A step with too many rows, too many pages or a chunk is refused, with what is too large."""
    fixed = attention.reserve(interpreted["triton_attention"].StepCapacity(2, 300, 30))

    with pytest.raises(ValueError, match="tile_row has 3 entries"):
        fixed.refill(batch_of(decoding(1, 2, 3)))
    with pytest.raises(ValueError, match="page_ids has 38 entries"):
        fixed.refill(batch_of(decoding(299, 299)))
    with pytest.raises(ValueError, match="chunk None tile_row has 1 entries"):
        fixed.refill(batch_of([piece("a", 0, 5, [1])]))
