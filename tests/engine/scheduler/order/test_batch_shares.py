"""The places in the batch that one domain may take while others wait, in a scheduler without torch."""

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.waiting_order import ServiceUse
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import CONTEXT, FLOOD, LIGHT, PAGE, SchedulerDriver, crowd


def running(driver: SchedulerDriver, domain: IsolationDomain) -> int:
    return sum(name.startswith(domain.decode()) for name in driver.scheduler.running_ids)


def test_a_domain_alone_uses_every_place() -> None:
    """Without others, one domain's requests fill the batch."""
    driver = SchedulerDriver(budget=32)
    crowd(driver, 9)

    driver.step()

    assert running(driver, FLOOD) == 8


def test_a_full_batch_of_one_domain_gives_a_place_to_another_at_once() -> None:
    """After the minimum run the newcomer starts in the next step, and the request that made room ends with all its tokens."""
    driver = SchedulerDriver(budget=32, host=40, min_run_steps=1)
    crowd(driver, 8, max_tokens=12)
    driver.step()
    driver.submit("light", 3, domain=LIGHT)

    driver.step()

    assert "light" in driver.scheduler.running_ids
    assert running(driver, FLOOD) == 7
    driver.drain()
    assert {event.completion_tokens for name, event in driver.finished().items() if name != "light"} == {12}
    assert driver.scheduler.counters.preemptions == 1


def test_a_domain_above_its_share_admits_nothing_while_another_waits() -> None:
    """Of four places, two go to the domain that sent first and far more."""
    driver = SchedulerDriver(max_running=4)
    crowd(driver, 20)
    crowd(driver, 3, LIGHT)

    driver.step()

    assert (running(driver, FLOOD), running(driver, LIGHT)) == (2, 2)


def test_two_domains_at_their_shares_take_nothing_from_each_other() -> None:
    """With more waiting on both sides, nothing is preempted."""
    driver = SchedulerDriver(max_running=4)
    crowd(driver, 10)
    crowd(driver, 10, LIGHT)

    driver.drain()

    assert len(driver.finished()) == 20
    assert driver.scheduler.counters.preemptions == 0


def test_a_long_wait_takes_no_place_from_the_same_tier() -> None:
    """What has waited for more than the patience of the order preempts nothing of its tier, so weights hold however long the
    queue is. A flex request that has waited twice as long takes a place from a default request of its tenant.
    """
    driver = SchedulerDriver(max_running=4, host=40, min_run_steps=1)
    crowd(driver, 10, max_tokens=30)
    crowd(driver, 10, LIGHT, max_tokens=30)
    driver.submit("flex", 3, domain=FLOOD, tier=ServiceTier.FLEX)
    driver.step()

    driver.clock.advance(31.0)
    driver.step()
    after_one = driver.scheduler.counters.preemptions
    driver.clock.advance(31.0)
    for _ in range(8):
        driver.step()

    assert after_one == 0
    assert driver.scheduler.counters.preemptions == 1
    assert "flex" in driver.admitted()


def test_places_that_nobody_else_wants_are_used() -> None:
    """A domain that wants less than its share leaves the rest to the others."""
    driver = SchedulerDriver(max_running=4)
    crowd(driver, 10)
    crowd(driver, 1, LIGHT)

    driver.step()

    assert (running(driver, FLOOD), running(driver, LIGHT)) == (3, 1)


def test_a_higher_tier_takes_no_place_from_a_domain_within_its_share() -> None:
    """Priority requests of a domain above its share do not preempt another domain's flex request."""
    driver = SchedulerDriver(max_running=4, host=40, min_run_steps=1)
    crowd(driver, 3, max_tokens=20)
    crowd(driver, 1, LIGHT, max_tokens=20, tier=ServiceTier.FLEX)
    driver.step()
    driver.submit("flood urgent", 3, domain=FLOOD, tier=ServiceTier.PRIORITY)

    driver.step()

    assert "flood urgent" in driver.scheduler.running_ids
    assert running(driver, LIGHT) == 1


def test_a_share_grows_with_the_weight() -> None:
    """Of eight places, a domain of weight three gets six."""
    driver = SchedulerDriver(budget=32, max_running=8)
    crowd(driver, 20)
    crowd(driver, 20, LIGHT, weight=3.0)

    driver.step()

    assert (running(driver, FLOOD), running(driver, LIGHT)) == (2, 6)


def test_pages_for_a_flood_are_taken_from_the_flood() -> None:
    """If running requests outgrow the device, the request of the domain within its share is not the one offloaded."""
    driver = SchedulerDriver(pages=CONTEXT // PAGE + 2, host=60, max_running=4)
    crowd(driver, 3, max_tokens=30)
    driver.step()
    driver.submit("light", 3, domain=LIGHT, max_tokens=12)
    driver.step()

    while "light" not in driver.finished():
        assert "light" in driver.scheduler.running_ids
        driver.step()

    assert driver.scheduler.counters.preemptions > 0


def test_a_domain_with_few_places_gets_the_free_place_before_older_requests() -> None:
    """When a request of the flood ends, the light domain's request starts at once, and nothing is preempted for it."""
    driver = SchedulerDriver(budget=32, host=40, min_run_steps=100)
    crowd(driver, 20, max_tokens=30)
    driver.step()
    driver.submit("light", 3, domain=LIGHT)
    driver.step()
    before = running(driver, LIGHT)

    driver.scheduler.cancel(RequestId("flood 0"))
    driver.step()

    assert (before, running(driver, LIGHT)) == (0, 1)
    assert driver.scheduler.counters.preemptions == 0


def test_a_domain_with_more_than_half_its_places_preempts_only_what_has_had_more_service() -> None:
    """With three of four places, the light domain takes the fourth from the flood only once the flood's counter is larger."""
    for light_service, preemptions in ((1000, 0), (0, 1)):
        driver = SchedulerDriver(budget=32, host=40, min_run_steps=1)
        crowd(driver, 5, max_tokens=30)
        crowd(driver, 3, LIGHT, max_tokens=30)
        driver.step()
        flood, light = (
            next(one for one in driver.scheduler.requests.running.values() if one.domain == domain)
            for domain in (FLOOD, LIGHT)
        )
        driver.submit("light more", 3, domain=LIGHT)
        driver.scheduler.requests.waiting.charge(light, ServiceUse(input_tokens=light_service))
        driver.scheduler.requests.waiting.charge(flood, ServiceUse(input_tokens=500))

        driver.step()

        assert (running(driver, FLOOD), driver.scheduler.counters.preemptions) == (5 - preemptions, preemptions)
