"""Tests of steps that are planned ahead: what they compute, what is kept for them, and which results count."""

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.platform.ids import RequestId
from tests.engine.scheduler.scheduler_driver import SchedulerDriver


def planned(driver: SchedulerDriver) -> StepPlan:
    """Admits and plans, and leaves the step in flight."""
    driver.outputs += driver.scheduler.admit()
    plan = driver.scheduler.plan()
    driver.scheduler.check_integrity()
    assert plan is not None
    return plan


def test_the_next_step_awaits_the_token_in_flight() -> None:
    """A step that is planned ahead computes the token in flight at the next position, without its id."""
    driver = SchedulerDriver()
    driver.submit("r", [5, 6, 7])

    planned(driver)
    (piece,) = planned(driver).slices

    assert (piece.token_ids, piece.awaits_token, piece.start, piece.end) == ((), True, 3, 4)
    assert [spec.position for spec in piece.samples] == [4]


def test_no_step_follows_the_last_token() -> None:
    """A request whose token in flight is its last one gets no further step, although it has not ended."""
    driver = SchedulerDriver()
    driver.submit("r", [5, 6, 7], max_tokens=1)
    planned(driver)

    assert driver.scheduler.plan() is None
    assert driver.scheduler.num_running == 1


def test_a_cancelled_request_keeps_its_memory_until_its_step_has_landed() -> None:
    """The pages and the adapter of a cancelled request are given up when the steps that use them have landed."""
    driver = SchedulerDriver()
    driver.adapters.ready.add("a")
    driver.submit("r", [5, 6, 7], adapters=(AdapterUse("a"),))
    first, second = planned(driver), planned(driver)

    driver.scheduler.cancel(RequestId("r"))
    driver.scheduler.check_integrity()
    kept = [(driver.pool.active_pages, driver.adapters.pins["a"])]
    for plan in (first, second):
        driver.scheduler.land(plan)
        kept.append((driver.pool.active_pages, driver.adapters.pins["a"]))

    assert kept == [(1, 1), (1, 1), (0, 0)]


def test_the_result_of_a_cancelled_request_is_not_that_of_its_successor() -> None:
    """A request that was cancelled in flight and sent again under the same id gets nothing of the first one's step."""
    driver = SchedulerDriver()
    driver.submit("r", [5, 6, 7])
    first = planned(driver)
    driver.scheduler.cancel(RequestId("r"))
    driver.submit("r", [8, 9, 8, 9, 8])
    second = planned(driver)

    landed = driver.scheduler.land(first)
    driver.outputs += driver.scheduler.absorb(landed, StepResult({RequestId("r"): (99,)}))
    counted = driver.scheduler.land(second)

    assert landed.slices == ()
    assert counted == second
