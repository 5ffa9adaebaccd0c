"""The cost of prefills, learned while the engine serves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.core.step import RequestSlice, Runner, SampleSpec, StepPlan, StepResult
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.index.cost_model import CostTracker, LoadCost, PrefillCost, TransferCost
from graftwork.engine.runner.model_runner import PrefillMeter
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import RequestId
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.flights import RunnerAround
from tests.engine.random_models import FolderSource, make_base

COST = LoadCost(TransferCost(0.0, 0.1), TransferCost(0.0, 0.1), PrefillCost(0.001, 0.0, 0.0))
"""A page of 4 tokens is computed 25 times faster than it is loaded."""
SAMPLE = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=0)


def piece(name: str, start: int, num_tokens: int, *, samples: bool, num_drafts: int = 0) -> RequestSlice:
    """A part of one prompt; its last row is sampled if `samples`."""
    pages = tuple(PageId(page) for page in range((start + num_tokens) // 4 + 1))
    specs = (SAMPLE,) * (1 + num_drafts) if samples else ()
    return RequestSlice(RequestId(name), (7,) * num_tokens, start, pages, (), specs)


class Steps:
    """A meter whose steps take as long as the test says."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.costs = CostTracker(COST)
        self.meter = PrefillMeter(self.costs, self.clock)

    def take(self, seconds: float, *pieces: RequestSlice, waited: bool = False) -> None:
        self.meter.step_begins()
        self.clock.advance(seconds)
        self.meter.step_ended(StepPlan(pieces), waited=waited)

    @property
    def token_s(self) -> float:
        return self.costs.cost.prefill.token_s


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_prefill_moves_the_estimate_towards_the_time_that_it_took(factor: float) -> None:
    """After a hundred prefills that take longer or shorter than expected, the estimate is what they take."""
    steps = Steps()

    for number in range(100):
        steps.take(factor * 0.1, piece(f"r{number}", 0, 100, samples=True))

    assert steps.token_s == pytest.approx(factor * COST.prefill.token_s, rel=0.01)


def test_the_steps_of_a_chunked_prefill_count_together() -> None:
    """The time of a chunked prefill is the sum over its chunks, because the engine waits only for the last."""
    whole, chunked = Steps(), Steps()

    whole.take(1.0, piece("r", 0, 100, samples=True))
    chunked.take(0.1, piece("r", 0, 60, samples=False))
    chunked.take(0.9, piece("r", 60, 40, samples=True))

    assert chunked.token_s == whole.token_s > COST.prefill.token_s


@pytest.mark.parametrize(
    "other_steps",
    [
        lambda steps: steps.take(9.0, piece("a", 0, 100, samples=True), piece("b", 50, 1, samples=True)),
        lambda steps: steps.take(9.0, piece("a", 0, 100, samples=True), waited=True),
        lambda steps: steps.take(9.0, piece("a", 0, 31, samples=True)),
        lambda steps: steps.take(9.0, piece("a", 0, 100, samples=False)),
        lambda steps: steps.take(0.0, piece("a", 0, 100, samples=True)),
        lambda steps: steps.take(9.0, piece("a", 0, 104, samples=True, num_drafts=4)),
    ],
    ids=["beside-decodes", "behind-a-copy", "short", "not-waited-for", "no-time", "with-drafts"],
)
def test_other_steps_teach_nothing(other_steps: Callable[[Steps], None]) -> None:
    """A step that does other work too, or whose end is not waited for, leaves the estimate unchanged."""
    steps = Steps()

    other_steps(steps)

    assert steps.costs.cost == COST


def test_a_prefill_behind_work_that_was_not_waited_for_teaches_nothing() -> None:
    """A prefill is not measured while the device may still compute another request's chunk."""
    steps = Steps()

    steps.take(0.1, piece("other", 0, 100, samples=False))
    steps.take(9.0, piece("a", 0, 100, samples=True))
    untaught = steps.costs.cost
    steps.take(9.0, piece("b", 0, 100, samples=True))

    assert untaught == COST
    assert steps.token_s > COST.prefill.token_s


class SlowRunner(RunnerAround):
    """A runner that takes one second for each token."""

    def __init__(self, runner: Runner, clock: ManualClock) -> None:
        super().__init__(runner)
        self._clock = clock

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.advance(plan.num_tokens)
        return super().run(plan)


def test_an_engine_on_a_device_that_became_slow_loads_what_it_used_to_compute(tmp_path: Path) -> None:
    """The second turn recomputes pages that are on the host; after two slow prefills the third turn loads them."""
    clock = ManualClock()
    config = EngineConfig(model=make_base(tmp_path / "base"), dtype="float32", page_tokens=4, device_bytes=4 * 2**20)
    driver = EngineDriver(build_engine(config, lambda _: FolderSource({}, {}), clock, CostTracker(COST, smoothing=1.0)))
    driver.loop.steps.runner = SlowRunner(driver.loop.steps.runner, clock)

    def turn(prompt: list[int]) -> Outcome:
        outcome = driver.run(prompt, max_tokens=1, session=SessionUse(SessionKey("ses"), len(prompt) - 1))
        driver.command(SessionVerb.SUSPEND, "ses", prompt)
        return outcome

    prompt = [2 + number % 50 for number in range(49)]
    found = [turn(prompt).cache for _ in range(3)]

    assert [None if cache is None else cache.host_tokens for cache in found] == [0, 0, 48]
