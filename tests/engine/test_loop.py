"""The loop: one failure does not spread to other requests."""

from collections.abc import Callable
from dataclasses import replace

from graftwork.engine.core.step import Runner, StepPlan, StepResult
from graftwork.engine.messages import CancelSink
from graftwork.platform.errors import InternalFailure, NotFound
from tests.engine.engine_driver import EngineDriver
from tests.engine.flights import RunnerAround

MakeEngine = Callable[..., EngineDriver]


class FailsOnce(RunnerAround):
    """A runner whose first step fails."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._failed = False

    def run(self, plan: StepPlan) -> StepResult:
        if not self._failed:
            self._failed = True
            raise RuntimeError("the device is gone")
        return super().run(plan)


def test_a_failed_step_ends_its_requests_and_no_others(make_engine: MakeEngine) -> None:
    """The requests of a failed step get a typed error, their pages are released, and the next request is served."""
    driver = make_engine()
    driver.loop.steps.runner = FailsOnce(driver.loop.steps.runner)

    failed = driver.run([5, 6, 7])
    served = driver.run([5, 6, 7])

    assert isinstance(failed.error, InternalFailure)
    assert served.finish is not None
    assert driver.loop.stats().active_pages == 0


class LosesAnAnswer(RunnerAround):
    """A runner that once loses the tokens of the last request of a step."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._has_lost = False

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if len(plan.slices) > 1 and not self._has_lost:
            self._has_lost = True
            chosen = dict(result.token_ids)
            del chosen[plan.slices[-1].request_id]
            return replace(result, token_ids=chosen)
        return result


def test_a_step_that_fails_late_ends_all_its_requests(make_engine: MakeEngine) -> None:
    """Both the request that had its last token and the one without a token get the error, and the engine goes on."""
    driver = make_engine()
    driver.loop.steps.runner = LosesAnAnswer(driver.loop.steps.runner)

    over = driver.submit([5, 6, 7], max_tokens=1)
    lost = driver.submit([7, 6, 5], max_tokens=5)
    driver.finish()
    served = driver.run([5, 6, 7])

    assert isinstance(over.error, InternalFailure)
    assert isinstance(lost.error, InternalFailure)
    assert served.finish is not None
    assert driver.loop.stats().active_pages == 0


def test_an_adapter_that_does_not_exist_ends_only_its_requests(make_engine: MakeEngine) -> None:
    """The requests of an adapter that cannot be loaded get NotFound; a request of the base is served."""
    driver = make_engine()

    lost = driver.submit([5, 6], adapter="sha256:nowhere")
    base = driver.submit([5, 6])
    driver.finish()

    assert isinstance(lost.error, NotFound)
    assert base.finish is not None


def test_a_disconnected_gateway_has_its_requests_cancelled(make_engine: MakeEngine) -> None:
    """All requests of a sink are cancelled with it; the pages and the queue are empty."""
    driver = make_engine(max_running=2)
    for number in range(5):
        driver.submit([9, 8, 7, number + 2], max_tokens=50, ignore_eos=True)
    driver.step()

    driver.loop.take(CancelSink(driver.sink))

    stats = driver.loop.stats()
    assert (stats.running_requests, stats.waiting_requests, stats.active_pages) == (0, 0, 0)
    assert driver.loop.step() is False
