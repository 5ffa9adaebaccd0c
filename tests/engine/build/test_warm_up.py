"""The warm-up: the largest steps that the limits allow run before memory is divided, and a batch that is too large is
refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from graftwork.engine.build.devices import choose_dtype, load_weights, read_served_model
from graftwork.engine.build.kv import frame_sizer
from graftwork.engine.build.limits import batch_limits
from graftwork.engine.build.lora import build_lora
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.build.warm_up import largest_steps, measure_device
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.step import StepPlan
from graftwork.engine.lora.backend import LoraBackend, StepLora
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels

CPU = torch.device("cpu")


class FakeMeter:
    """The memory of a device that has `free` bytes, and room for a warm-up only from the attempt `fits_at` on."""

    device = CPU

    def __init__(self, fits_at: int = 0) -> None:
        self.fits_at = fits_at
        self.attempts = 0

    def peak_of(self, act: Callable[[], None]) -> int:
        self.attempts += 1
        act()
        if self.attempts <= self.fits_at:
            raise torch.OutOfMemoryError("no memory")
        return 1000

    def free_bytes(self) -> int:
        return 5000


def parts_of(models: RandomModels, max_batch_tokens: int, max_running: int) -> RunnerParts:
    config = EngineConfig(
        models.base, dtype="float32", page_tokens=4, max_batch_tokens=max_batch_tokens, max_running=max_running
    )
    model = read_served_model(config)
    dtype = choose_dtype(config.dtype, model, CPU)
    lora = build_lora(config, model, CPU, dtype)
    weights = load_weights(config, model, CPU, dtype)
    return RunnerParts(
        config, model, weights, lora, limits(max_batch_tokens, max_running), dtype, on_layer=lambda: None
    )


def limits(max_batch_tokens: int, max_running: int, context_tokens: int = 256) -> SchedulerLimits:
    return SchedulerLimits(4, max_batch_tokens, max_running, 8, context_tokens, 64, frozenset())


def num_sampled(plan: StepPlan) -> int:
    return sum(len(piece.samples) for piece in plan.slices)


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_running", "context_tokens"), [(2048, 256, 131_072), (512, 64, 100), (7, 7, 5), (9, 1, 9)]
)
def test_no_step_has_more_tokens_or_samples_more_rows(
    max_batch_tokens: int, max_running: int, context_tokens: int
) -> None:
    """The first plan has the most tokens and the most requests, the second the most rows that drafts allow."""
    chunks, drafts = largest_steps(limits(max_batch_tokens, max_running, context_tokens), max_draft_tokens=16)

    assert chunks.num_tokens == min(max_batch_tokens, max_running * context_tokens)
    assert len(chunks.slices) == len(drafts.slices) == num_sampled(chunks) == max_running
    most = min(17, context_tokens, max_batch_tokens // max_running)
    assert num_sampled(drafts) == drafts.num_tokens == max_running * most
    assert all(piece.num_tokens <= context_tokens for plan in (chunks, drafts) for piece in plan.slices)


def test_the_warm_up_runs_the_largest_steps_and_reports_what_is_left(models: RandomModels) -> None:
    """Both steps run on the model, and the result has the peak of the steps and the memory that is free after them."""
    parts = parts_of(models, max_batch_tokens=300, max_running=4)

    measured = measure_device(parts, frame_sizer(parts.config, parts.model, parts.dtype).wanted, FakeMeter())

    assert (measured.free_bytes, measured.step_bytes, measured.graphs_bytes) == (5000, 1000, 0)


class RecordingLora:
    """A LoRA backend that records what is placed, and the adapters of each step."""

    def __init__(self, inner: LoraBackend) -> None:
        self._inner = inner
        self.placed: list[str] = []
        self.steps: list[tuple[int, set[tuple[str, ...]]]] = []

    def place(self, adapter: ResidentAdapter) -> None:
        self.placed.append(adapter.digest)
        self._inner.place(adapter)

    def forget(self, digest: str) -> None:
        self.placed.remove(digest)
        self._inner.forget(digest)

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        mixes = {tuple(one.digest for one, _ in segment.mix.parts) for segment in segments}
        self.steps.append((num_rows, mixes))
        return self._inner.step(segments, num_rows)


def test_the_warm_up_uses_the_largest_mixture_of_adapters(models: RandomModels) -> None:
    """Each row of both steps has four adapters of the largest rank, and the backend has none of them afterwards."""
    parts = parts_of(models, max_batch_tokens=60, max_running=4)
    lora = RecordingLora(parts.lora)

    measure_device(
        replace(parts, lora=cast(LoraBackend, lora)),
        frame_sizer(parts.config, parts.model, parts.dtype).wanted,
        FakeMeter(),
    )

    four = tuple(f"warm-up {number}" for number in range(4))
    assert [mixes for _, mixes in lora.steps] == [{four}, {four}]
    assert max(rows for rows, _ in lora.steps) >= 60
    assert lora.placed == []


def test_a_batch_that_does_not_fit_names_one_that_was_tried(models: RandomModels) -> None:
    """The batch is halved until it fits, and the error names the first that did."""
    parts = parts_of(models, max_batch_tokens=64, max_running=16)
    wanted = frame_sizer(parts.config, parts.model, parts.dtype).wanted

    with pytest.raises(InvalidRequest, match="max_batch_tokens of at most 8") as caught:
        measure_device(parts, wanted, FakeMeter(fits_at=3))

    assert caught.value.param == "max_batch_tokens"


def test_weights_that_leave_no_room_for_one_token_are_refused(models: RandomModels) -> None:
    """If not even one token fits, the model is at fault, and the error says how much memory is left."""
    parts = parts_of(models, max_batch_tokens=4, max_running=2)

    with pytest.raises(InvalidRequest, match="5000 bytes") as caught:
        measure_device(parts, frame_sizer(parts.config, parts.model, parts.dtype).wanted, FakeMeter(fits_at=9))

    assert caught.value.param == "model"


def test_a_gpu_takes_larger_batches_unless_they_are_given(models: RandomModels) -> None:
    """The defaults differ by device; numbers in the configuration hold on both, and no batch has more requests than
    tokens.
    """
    default, small = EngineConfig(models.base), EngineConfig(models.base, max_batch_tokens=100)

    assert batch_limits(default, CPU) == (512, 64)
    assert batch_limits(default, torch.device("cuda:0")) == (2048, 256)
    assert batch_limits(small, torch.device("cuda:0")) == (100, 100)
    assert batch_limits(EngineConfig(models.base, max_running=3), CPU) == (512, 3)
