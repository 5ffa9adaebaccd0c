"""What one domain may take while others wait, in a scheduler without torch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.fair_share import VirtualTokenCounter
from graftwork.engine.scheduler.tenant_bounds import in_step_order
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.fair_traces import waiting_request
from tests.engine.scheduler.scheduler_driver import CONTEXT, PAGE, SchedulerDriver
from tests.hypothesis_profiles import examples

FLOOD, LIGHT = IsolationDomain(b"flood"), IsolationDomain(b"light")


def crowd(driver: SchedulerDriver, number: int, domain: IsolationDomain = FLOOD, **options: object) -> None:
    """Submits equal requests, named by their domain and a number."""
    for index in range(number):
        driver.submit(f"{domain.decode()} {index}", [30 + index] * 3, domain=domain, **options)  # type: ignore[arg-type]


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


def test_a_domain_fills_only_its_part_of_the_queue() -> None:
    """Above its part, in requests, its next request is refused with a time to retry; another domain's is not."""
    driver = SchedulerDriver(max_running=1, max_waiting=4, waiting_share=0.5)
    crowd(driver, 3)

    with pytest.raises(CapacityContended, match="3 requests") as refusal:
        driver.submit("more", domain=FLOOD)
    crowd(driver, 1, LIGHT)

    assert (refusal.value.code, refusal.value.status) == ("queue_full", 429)
    assert refusal.value.retry_after_s
    assert driver.scheduler.num_waiting == 4


def test_a_domain_fills_only_its_part_of_the_queue_in_tokens() -> None:
    """Two long prompts are too many, a short one fits, and the first may be of any length."""
    driver = SchedulerDriver(max_waiting_tokens=40, waiting_share=0.5)
    driver.submit("first", 30, domain=FLOOD)

    with pytest.raises(CapacityContended):
        driver.submit("second", 3, domain=FLOOD)
    driver.submit("other", 6, domain=LIGHT)

    assert driver.scheduler.num_waiting == 2


def test_a_full_queue_makes_room_for_a_light_domain() -> None:
    """The last request of the domain with most waiting ends with 429 `queue_full`, and the newcomer waits."""
    driver = SchedulerDriver(max_running=1, max_waiting=4, waiting_share=1.0)
    crowd(driver, 5)

    driver.submit("light", domain=LIGHT)

    (error,) = driver.errors().values()
    assert driver.errors().keys() == {"flood 4"}
    assert isinstance(error, CapacityContended)
    assert error.code == "queue_full"
    assert error.retry_after_s
    driver.drain()
    assert len(driver.finished()) == 5


def test_a_full_queue_of_tokens_makes_room_as_well() -> None:
    """Only as many of the flood's requests go as the newcomer's prompt needs."""
    driver = SchedulerDriver(max_waiting_tokens=40, waiting_share=1.0)
    for name in ("one", "two", "three", "four"):
        driver.submit(name, 10, domain=FLOOD)

    driver.submit("light", 12, domain=LIGHT)

    assert driver.errors().keys() == {"three", "four"}


def test_the_newcomer_is_refused_if_nobody_has_more_waiting() -> None:
    """Two domains with as many waiting do not displace each other's requests."""
    driver = SchedulerDriver(max_running=1, max_waiting=3, waiting_share=1.0)
    crowd(driver, 2)
    crowd(driver, 2, LIGHT)

    for domain in (FLOOD, LIGHT):
        with pytest.raises(CapacityContended):
            driver.submit("more", domain=domain)

    assert driver.errors() == {}


def test_a_request_that_has_run_is_not_displaced() -> None:
    """A request that was offloaded keeps its answer: another of its domain makes room."""
    driver = SchedulerDriver(max_running=1, host=40, max_waiting=2, waiting_share=1.0)
    driver.submit("streams", 3, domain=FLOOD, tier=ServiceTier.FLEX, max_tokens=9)
    driver.step()
    driver.submit("urgent", 3, domain=FLOOD, tier=ServiceTier.PRIORITY, max_tokens=9)
    driver.step()
    driver.submit("new", 3, domain=FLOOD, tier=ServiceTier.PRIORITY)

    driver.submit("light", 3, domain=LIGHT)
    driver.drain()

    assert driver.errors().keys() == {"new"}
    assert driver.finished()["streams"].completion_tokens == 9


arrivals = st.lists(
    st.tuples(st.sampled_from([b"a", b"a", b"a", b"b", b"c"]), st.integers(1, 20), st.integers(0, 2)), max_size=40
)


@settings(max_examples=examples(60))
@given(arrivals, st.sampled_from([0, 30]), st.sampled_from([0.5, 1.0]))
def test_every_request_ends_once_and_no_light_domain_is_refused_for_a_flood(
    sent: list[tuple[bytes, int, int]], host: int, share: float
) -> None:
    """A request with nothing of its domain in the queue is refused only if no domain has two that could make room."""
    driver = SchedulerDriver(host=host, max_running=3, max_waiting=6, waiting_share=share)
    owners: dict[str, bytes] = {}
    for number, (domain, length, steps) in enumerate(sent):
        ended = {*driver.finished(), *driver.errors(), *driver.scheduler.running_ids}
        waiting = {name: owner for name, owner in owners.items() if name not in ended}
        never_ran = [owner for name, owner in waiting.items() if name not in driver.admitted()]
        try:
            driver.submit(str(number), [10 + number] * length, domain=IsolationDomain(domain))
            owners[str(number)] = domain
        except CapacityContended:
            assert domain in waiting.values() or all(never_ran.count(owner) < 2 for owner in never_ran)
        for _ in range(steps):
            driver.step()

    driver.drain()

    assert sorted([*driver.finished(), *driver.errors()]) == sorted(owners)


# ---- prompts that would only wait in the batch --------------------------------------------------------------------


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
