"""The order in which the prompts of running requests are computed, in a scheduler without torch."""

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.fair_share import VirtualTokenCounter
from graftwork.engine.scheduler.order.prompt_turns import in_step_order
from graftwork.platform.clock import ManualClock
from tests.engine.scheduler.fair_traces import waiting_request
from tests.engine.scheduler.scheduler_driver import FLOOD, LIGHT, SchedulerDriver, crowd


def test_a_light_prefill_does_not_wait_for_a_flood_of_prefills() -> None:
    """A short prompt is computed before four long ones of another domain that came first."""
    driver = SchedulerDriver(pages=100, budget=8)
    for number in range(4):
        driver.submit(f"flood {number}", [30 + number] * 30, domain=FLOOD)
    driver.step()
    driver.submit("light", 6, domain=LIGHT)

    plan = driver.step()

    assert plan is not None
    assert [piece.request_id for piece in plan.slices if piece.samples] == ["light"]


def test_a_flood_of_prefills_is_computed_though_another_domain_never_pauses() -> None:
    """What has waited for long goes before what has just come, though its domain holds more places."""
    driver = SchedulerDriver(pages=100, budget=8)
    for number in range(4):
        driver.submit(f"flood {number}", [30 + number] * 30, domain=FLOOD, max_tokens=1)

    for number in range(100):
        driver.clock.advance(1)
        driver.submit(f"light {number}", [10 + number % 80] * 8, domain=LIGHT, max_tokens=1)
        driver.step()

    assert sum(name.startswith("flood") for name in driver.finished()) == 4


def test_a_prompt_that_would_only_wait_in_the_batch_waits_in_the_queue() -> None:
    """With steps of 16 tokens, prompts of 12 start as steps reach them, not as places are free; all of them end."""
    driver = SchedulerDriver(budget=16, max_running=8, pages=200)
    for index in range(8):
        driver.submit(f"flood {index}", [10 + index] * 12, domain=FLOOD, max_tokens=1)
    most = 0
    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        driver.step()
        most = max(most, driver.scheduler.num_running)

    assert [len(plan.slices) for plan in driver.plans[:2]] == [2, 2]
    assert most <= 2
    assert driver.admitted() == [f"flood {index}" for index in range(8)]


def test_a_lighter_domain_and_a_higher_tier_start_beside_prompts_that_fill_the_step() -> None:
    """A flood holds its own further prompts back, and nobody else's."""
    driver = SchedulerDriver(budget=16, max_running=8, pages=200, host=40, min_run_steps=1)
    crowd(driver, 6, max_tokens=20)
    driver.step()
    for index in range(4):
        driver.submit(f"flood long {index}", [50 + index] * 30, domain=FLOOD)
    driver.step()
    assert "flood long 0" in driver.scheduler.running_ids

    driver.submit("light", [90] * 6, domain=LIGHT)
    driver.submit("urgent", [91] * 6, domain=FLOOD, tier=ServiceTier.PRIORITY)
    driver.step()

    assert {"light", "urgent"} <= set(driver.scheduler.running_ids)
    assert "flood long 2" not in driver.scheduler.running_ids


def test_a_prompt_that_has_started_is_passed_by_no_equal_one() -> None:
    """Of two prompts, the one that started first gets its tokens first, although its domain has more places; but not if the
    domain has more than its fair number.
    """
    decoding = [waiting_request(f"decoding {index}", "flood", 3) for index in range(3)]
    for state in decoding:
        state.num_computed = 2
    early, late = waiting_request("early", "flood", 9, at=1.0), waiting_request("late", "light", 9, at=0.0)
    early.started_at_step, late.started_at_step = 3, 4
    running, order = [*decoding, late, early], VirtualTokenCounter(ManualClock())

    with_room, crowded = in_step_order(running, order, 16, 32), in_step_order(running, order, 4, 32)

    assert with_room[3:] == [early, late]
    assert crowded[3:] == [late, early]


def test_a_short_prompt_of_a_domain_with_few_places_goes_before_one_that_has_started() -> None:
    """A light domain does not wait for the prompt of a heavy one, unless its own would take many steps."""
    decoding = [waiting_request(f"decoding {index}", "flood", 3) for index in range(7)]
    for state in decoding:
        state.num_computed = 2
    started = waiting_request("started", "flood", 150, at=0.0)
    short, long = waiting_request("short", "light", 60, at=1.0), waiting_request("long", "light", 150, at=1.0)
    started.started_at_step, short.started_at_step, long.started_at_step = 3, 4, 4
    order = VirtualTokenCounter(ManualClock())

    assert in_step_order([*decoding, started, short], order, 16, 25)[7:] == [short, started]
    assert in_step_order([*decoding, started, long], order, 16, 25)[7:] == [started, long]
