"""Tests of what waiting requests find on the device, and of an order that uses it, over the real prefix tree."""

from dataclasses import replace
from random import Random

import pytest

from graftwork.engine.core.events import PromptAdmitted
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.engine.core.tiers import Tier
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder
from graftwork.engine.scheduler.order.locality import DeviceLocality
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
from graftwork.engine.scheduler.order.waiting_order import ServicePrices, ServiceUse, WaitingOrder
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.fair_traces import waiting_request
from tests.engine.scheduler.scheduler_driver import PAGE, SchedulerDriver

WARM, COLD = IsolationDomain(b"warm"), IsolationDomain(b"cold")
WARM_PROMPT, COLD_PROMPT = list(range(10, 34)), list(range(40, 64))


def locality_of(driver: SchedulerDriver) -> DeviceLocality:
    return DeviceLocality(driver.cache.kv_cache.page_store.tree, driver.adapters.is_ready)


def by_locality(driver: SchedulerDriver) -> WaitingOrder:
    return DeficitPrefixOrder(driver.clock, locality_of(driver), settings=DeficitSettings(quantum=60.0))


@pytest.mark.parametrize("seed", range(6))
def test_a_cursor_finds_what_a_walk_from_the_root_finds(seed: int) -> None:
    """After random requests, evictions and growth of the tree, the cached tokens of each waiting request are exact."""
    random, order = Random(seed), DeficitPrefixOrder(ManualClock())
    driver = SchedulerDriver(pages=14, max_running=2, make_order=lambda driver: order)
    locality = locality_of(driver)
    found = set()
    for number in range(60):
        start = random.choice((10, 20))
        driver.submit(f"r{number}", [start + index // 6 for index in range(random.randint(1, 36))], max_tokens=2)
        driver.step()
        tree = driver.cache.kv_cache.page_store.tree
        for state in order:
            expected = min(len(tree.walk(state.scope, state.token_ids)) * PAGE, state.num_reusable)
            assert locality.cached_tokens(state) == expected
            found.add(expected)

    assert len(found) > 3


def test_cached_prompts_run_one_after_the_other_within_the_quantum() -> None:
    """With equal requests of two domains waiting, the one with a cached prefix goes first until it is a quantum ahead."""
    driver = SchedulerDriver(budget=40, max_running=1, make_order=by_locality)
    driver.submit("first", WARM_PROMPT, max_tokens=1, domain=WARM)
    driver.drain()
    for number in range(12):
        driver.submit(f"cold {number}", COLD_PROMPT[: 4 + number], max_tokens=1, domain=COLD)
        driver.submit(f"warm {number}", [*WARM_PROMPT, 70 + number], max_tokens=1, domain=WARM)
    for _ in range(6):
        driver.step()

    assert driver.admitted()[1:6] == [f"warm {number}" for number in range(5)]
    driver.drain()
    assert len(driver.finished()) == 25


def test_of_one_flow_a_cached_prompt_goes_before_older_ones_without() -> None:
    """Of twelve requests of one tenant that alternate between two documents, those of the cached one go first."""
    driver = SchedulerDriver(budget=40, max_running=1, make_order=by_locality)
    driver.submit("first", WARM_PROMPT, max_tokens=1, domain=WARM)
    driver.drain()
    for number in range(6):
        driver.submit(f"cold {number}", [*COLD_PROMPT, 70 + number], max_tokens=1, domain=WARM)
        driver.submit(f"warm {number}", [*WARM_PROMPT, 70 + number], max_tokens=1, domain=WARM)
    driver.drain()

    assert [name.split()[0] for name in driver.admitted()[1:]] == ["warm"] * 6 + ["cold"] * 6


def test_a_prompt_that_another_request_computes_waits_until_it_is_cached() -> None:
    """Two requests with one long beginning do not both compute it while other requests wait: the second starts when the
    first has computed its prompt, and finds the beginning cached.
    """
    driver = SchedulerDriver(budget=8, max_running=2, make_order=by_locality)
    for number in range(2):
        driver.submit(f"document {number}", [*WARM_PROMPT, 70 + number], max_tokens=1)
    for number in range(2):
        driver.submit(f"other {number}", [40 + number] * 20, max_tokens=1)
    driver.drain()

    reports = {one.request_id: one.event.cache for one in driver.outputs if isinstance(one.event, PromptAdmitted)}
    assert driver.admitted()[:2] == ["document 0", "other 0"]
    assert reports[RequestId("document 1")].device_tokens == len(WARM_PROMPT)


def test_a_request_whose_beginning_is_computed_elsewhere_still_takes_an_empty_place() -> None:
    """If nothing else waits, both requests run at once, although both compute the same."""
    driver = SchedulerDriver(budget=32, max_running=2, make_order=by_locality)
    for number in range(2):
        driver.submit(f"document {number}", [*WARM_PROMPT, 70 + number], max_tokens=3)
    driver.step()

    assert driver.scheduler.num_running == 2


def test_a_request_that_was_cancelled_computes_nothing_for_others() -> None:
    """When the request that computes a beginning is cancelled, the next request with it has its turn by age again."""
    driver = SchedulerDriver(budget=8, max_running=1, make_order=by_locality)
    driver.submit("gone", WARM_PROMPT, max_tokens=1)
    driver.step()
    driver.submit("again", WARM_PROMPT, max_tokens=1)
    driver.submit("other", COLD_PROMPT, max_tokens=1)
    driver.scheduler.cancel(RequestId("gone"))
    driver.step()

    assert driver.admitted() == ["gone", "again"]


def test_a_request_with_a_resident_adapter_goes_before_one_without() -> None:
    """Of two waiting requests, the later one goes first if only its adapter is on the device."""
    driver = SchedulerDriver()
    driver.adapters.ready.add("sha256:here")
    order = by_locality(driver)
    for number, name in enumerate(("away", "here")):
        state = waiting_request(name, name, 5, at=float(number))
        state.request = replace(state.request, adapters=(AdapterUse(f"sha256:{name}"),))
        order.enqueue(state)

    assert [state.request_id for state in order.candidates()] == ["here", "away"]


def test_pages_are_charged_by_the_second_until_their_request_ends() -> None:
    """A request that holds three pages for ten seconds costs its domain thirty page-seconds beside its tokens."""
    prices = ServicePrices(page_second=10.0)
    orders = []

    def charged(driver: SchedulerDriver) -> WaitingOrder:
        orders.append(DeficitPrefixOrder(driver.clock, prices=prices))
        return orders[0]

    driver = SchedulerDriver(budget=40, make_order=charged)
    driver.submit("one", 9, max_tokens=3)
    driver.step()
    driver.clock.advance(4)
    driver.step()
    driver.clock.advance(6)
    driver.step()

    assert set(driver.finished()) == {"one"}
    assert orders[0].counter(ServiceTier.DEFAULT, IsolationDomain(b"tenant")) == 9 + 3 * 2.0 + 30 * 10.0


def test_drafts_and_adapters_have_their_prices() -> None:
    """The cost is the sum over all resources, each at its price."""
    prices = ServicePrices(1.0, 2.0, 0.5, 3.0, 7.0)

    assert prices.cost(ServiceUse(10, 4, 6, 1.5, 2_000_000)) == 10 + 8 + 3 + 4.5 + 14
    with pytest.raises(InvalidRequest):
        ServicePrices(page_second=-1.0)
    with pytest.raises(InvalidRequest):
        ServicePrices(output_token=0.0)


def test_flex_is_held_back_while_higher_tiers_are_active() -> None:
    """After a request of the default tier, flex takes six of eight places; alone, it takes all."""
    counts = []
    for is_active in (True, False):
        driver = SchedulerDriver(max_running=8, budget=60)
        if is_active:
            driver.submit("default", 3, max_tokens=1)
            driver.step()
        for number in range(12):
            driver.submit(f"flex {number}", [30 + number] * 3, tier=ServiceTier.FLEX)
        driver.step()
        counts.append(driver.scheduler.num_running)
        driver.drain()
        assert len(driver.finished()) == 12 + is_active

    assert counts == [6, 8]


def test_an_evicted_prefix_is_not_counted() -> None:
    """When the pages of a waiting request's prefix are evicted, its cached tokens fall to what is left."""
    order = DeficitPrefixOrder(ManualClock())
    driver = SchedulerDriver(pages=20, max_running=1, make_order=lambda driver: order)
    driver.submit("first", WARM_PROMPT, max_tokens=1)
    driver.drain()
    driver.submit("again", WARM_PROMPT, max_tokens=1)
    locality = locality_of(driver)
    state = next(iter(order))
    before = locality.cached_tokens(state)
    page_store = driver.cache.kv_cache.page_store
    page_store.make_room(Tier.DEVICE, page_store.device.num_pages - 2, b"tenant")

    assert (before, locality.cached_tokens(state)) == (23, 8)
