"""The step pipeline: what a failed step means for its requests, for other requests and for the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graftwork.engine.core.step import Flight, Runner, StepPlan, StepResult
from graftwork.engine.step_pipeline import DeviceLost
from graftwork.platform.errors import CapacityContended, InternalFailure
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.flights import RunnerAround

MakeEngine = Callable[..., EngineDriver]
MOMENTS = ("launch", "sample", "result")


OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def answers(models: RandomModels) -> list[list[int]]:
    """The answers to two requests on an engine where nothing fails."""
    driver = models.engine()
    first = driver.run([5, 6, 7], max_tokens=3, seed=1, **OPTIONS)
    return [first.token_ids, driver.run([8, 9], max_tokens=4, seed=2, **OPTIONS).token_ids]


class FailingRunner(RunnerAround):
    """A runner of which one step fails, at its launch, when it is sampled, or when its result is read."""

    def __init__(self, runner: Runner, step: int, moment: str, error: Exception, *, is_lost: bool = False) -> None:
        super().__init__(runner)
        self.moment = moment
        self.error = error
        self.num_recovered = 0
        self.plans: list[StepPlan] = []
        self._step = step
        self._is_lost = is_lost

    @property
    def failed_plan(self) -> StepPlan:
        return self.plans[self._step]

    def launch(self, plan: StepPlan) -> Flight:
        self.plans.append(plan)
        if len(self.plans) - 1 != self._step:
            return self.inner.launch(plan)
        self.fail("launch")
        return FailingFlight(self, self.inner.launch(plan))

    def fail(self, moment: str) -> None:
        if moment == self.moment:
            raise self.error

    def recover(self) -> None:
        self.num_recovered += 1
        if self._is_lost:
            raise self.error


class FailingFlight:
    """A flight that fails when its runner says so."""

    def __init__(self, runner: FailingRunner, flight: Flight) -> None:
        self._runner = runner
        self._flight = flight

    def sample(self) -> None:
        self._runner.fail("sample")
        self._flight.sample()

    def result(self) -> StepResult:
        self._runner.fail("result")
        return self._flight.result()


@pytest.mark.parametrize("overlap_steps", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("error", "expected"),
    [(torch.OutOfMemoryError("CUDA out of memory."), CapacityContended), (RuntimeError("a bug"), InternalFailure)],
    ids=["out-of-memory", "bug"],
)
def test_a_failed_step_fails_its_own_requests_alone(
    make_engine: MakeEngine,
    answers: list[list[int]],
    overlap_steps: bool,
    moment: str,
    error: Exception,
    expected: type[Exception],
) -> None:
    """A step fails. Its requests end with a typed error. A request that had its last token from the step before gets
    its whole answer, a request that waited is served, and nothing is held at the end."""
    driver = make_engine(overlap_steps=overlap_steps, max_running=2, max_draft_tokens=0)
    driver.loop.steps.runner = runner = FailingRunner(driver.loop.steps.runner, 3, moment, error)

    ended = driver.submit([5, 6, 7], max_tokens=3, seed=1, **OPTIONS)
    lost = driver.submit([7, 6, 5], max_tokens=9, **OPTIONS)
    waiting = driver.submit([8, 9], max_tokens=4, seed=2, **OPTIONS)
    driver.finish()

    failed = {piece.request_id for piece in runner.failed_plan.slices}
    assert {name for name, outcome in driver.outcomes.items() if outcome is lost} <= failed
    assert isinstance(lost.error, expected)
    assert (ended.token_ids, ended.error) == (answers[0], None)
    assert waiting.token_ids == answers[1] or waiting.error is lost.error
    assert runner.num_recovered == 1
    assert driver.loop.stats().active_pages == 0
    driver.loop.check_integrity()


@pytest.mark.parametrize("overlap_steps", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_device_ends_the_loop(make_engine: MakeEngine, overlap_steps: bool, moment: str) -> None:
    """If the device still fails after a failed step, the loop ends with DeviceLost, whose cause is the device's error."""
    driver = make_engine(overlap_steps=overlap_steps, max_draft_tokens=0)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    driver.loop.steps.runner = FailingRunner(driver.loop.steps.runner, 1, moment, error, is_lost=True)
    driver.submit([5, 6, 7], max_tokens=9, ignore_eos=True)

    with pytest.raises(DeviceLost) as lost:
        driver.finish()

    assert lost.value.__cause__ is error
