"""Tests of what requests report of their memory: KV that they held, and adapters that were loaded for them."""

from collections import defaultdict

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, TokensGenerated
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import StepPlan
from tests.engine.scheduler.scheduler_driver import SchedulerDriver

STEP_S = 0.3


class WatchedDriver(SchedulerDriver):
    """A driver whose steps take time, and that counts for itself which pages each request held for how long."""

    def __init__(self, pages: int = 40) -> None:
        super().__init__(pages=pages, host=40)
        self.page_bytes = self.cache.kv_cache.page_store.sizes.page_bytes
        self.held: defaultdict[str, float] = defaultdict(float)
        self.shares: defaultdict[str, float] = defaultdict(float)

    def ran(self, plan: StepPlan) -> None:
        for request_id in self.scheduler.running_ids:
            pages = self.scheduler.requests.running[request_id].pages
            self.held[request_id] += len(pages) * self.page_bytes * STEP_S
        self.clock.advance(STEP_S)
        for piece in plan.slices:
            self.shares[piece.request_id] += STEP_S * piece.num_tokens / plan.num_tokens

    def shared_out(self) -> dict[str, int]:
        """The reported microseconds of each request."""
        found: defaultdict[str, int] = defaultdict(int)
        for output in self.outputs:
            if isinstance(output.event, TokensGenerated | RequestFinished):
                found[output.request_id] += output.event.engine_us
        return dict(found)

    def reported(self) -> dict[str, int]:
        found: defaultdict[str, int] = defaultdict(int)
        for output in self.outputs:
            if isinstance(output.event, TokensGenerated | RequestFinished):
                found[output.request_id] += output.event.kv_byte_seconds
        return dict(found)


def test_all_events_together_report_the_kv_that_was_held() -> None:
    """The sum over a request's events is its pages times the seconds of its steps, to less than a byte-second a report."""
    driver = WatchedDriver()
    driver.submit("short", 5, 3)
    driver.submit("long", 30, 20)

    driver.drain()

    assert driver.reported().keys() == driver.held.keys() == {"short", "long"}
    for name, reported in driver.reported().items():
        assert abs(reported - driver.held[name]) <= 1
    assert driver.reported()["long"] > driver.reported()["short"] > 0


def test_the_time_of_steps_is_shared_out_by_tokens() -> None:
    """Each request reports its part of the steps that computed it, and all parts together are the time of all steps."""
    driver = WatchedDriver(pages=8)
    for name in ("first", "second", "third"):
        driver.submit(name, 8, 16)

    driver.drain()

    assert driver.scheduler.counters.preemptions > 0
    shares = driver.shared_out()
    assert shares.keys() == driver.shares.keys()
    for name, share in shares.items():
        assert abs(share / 1e6 - driver.shares[name]) < 2e-6
    assert abs(sum(shares.values()) / 1e6 - driver.scheduler.counters.step_seconds) < 6e-6


def test_a_preempted_request_reports_both_its_runs() -> None:
    """A request that loses its pages and gets them again reports what it held before and after, and nothing between."""
    driver = WatchedDriver(pages=8)
    for name in ("first", "second", "third"):
        driver.submit(name, 8, 16)

    driver.drain()

    assert driver.scheduler.counters.preemptions > 0
    for name, reported in driver.reported().items():
        assert abs(reported - driver.held[name]) <= 1


def test_a_load_of_an_adapter_is_reported_once() -> None:
    """The first request that starts after a load reports its bytes, the next ones report none, until it is loaded again."""
    driver = SchedulerDriver()
    driver.adapters.ready |= {"a", "b"}
    driver.adapters.loaded_bytes |= {"a": 1000, "b": 500}
    driver.submit("first", adapters=(AdapterUse("a"), AdapterUse("b")))
    driver.submit("second", adapters=(AdapterUse("a"),))
    driver.drain()
    driver.adapters.loaded_bytes["a"] = 1000
    driver.submit("third", adapters=(AdapterUse("a"),))
    driver.drain()

    reported = {
        output.request_id: output.event.adapter_bytes
        for output in driver.outputs
        if isinstance(output.event, PromptAdmitted)
    }
    assert reported == {"first": 1500, "second": 0, "third": 1000}
