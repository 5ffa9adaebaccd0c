"""Tests how long the prompt of a request without a session is kept, and at whose cost."""

import pytest

from graftwork.engine.core.prefix_keys import PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.scheduler_driver import PAGE, SchedulerDriver

ALICE, BOB = IsolationDomain(b"alice"), IsolationDomain(b"bob")
PROMPT_PAGES = 6
RESERVE = 20
"""The pages of a device of 40 that a lone domain can lease; two domains can lease half of it each."""


def prompt_of(number: int) -> list[int]:
    """Returns six full pages and one token. No other number's prompt has its first page."""
    return [10 + number] * (PROMPT_PAGES * PAGE + 1)


def run(driver: SchedulerDriver, *numbers: int, domain: IsolationDomain = ALICE, **options: object) -> None:
    """Runs requests with these prompts, one after the other, to their ends."""
    for number in numbers:
        driver.submit(f"{number}-{len(driver.outputs)}", prompt_of(number), domain=domain, max_tokens=1, **options)
        driver.drain()


def device_pages(driver: SchedulerDriver, number: int, domain: IsolationDomain = ALICE) -> int:
    """Returns how many pages of a prompt the device has."""
    scope = PrefixScope(CacheScopes("sha256:model", "float32").scope(domain, ()))
    nodes = driver.cache.kv_cache.page_store.tree.walk(scope, prompt_of(number))
    return sum(node.device is not None for node in nodes)


@pytest.mark.parametrize("host", [0, 200])
@pytest.mark.parametrize(
    ("ttl_s", "waited_s", "is_kept"),
    [(None, 0.0, False), (300.0, 299.0, True), (300.0, 301.0, False), (3600.0, 301.0, True)],
)
def test_a_prompt_outlasts_other_prompts_until_its_time_is_over(
    host: int, ttl_s: float | None, waited_s: float, is_kept: bool
) -> None:
    """Later prompts evict the prompt of a request without a time and of one whose time is over, and no other."""
    driver = SchedulerDriver(pages=40, host=host)
    run(driver, 0, cache_ttl_s=ttl_s)
    run(driver, 1)
    driver.clock.advance(waited_s)

    run(driver, *range(2, 12))

    assert device_pages(driver, 0) == (PROMPT_PAGES if is_kept else 0)
    assert device_pages(driver, 1) == 0


def test_the_next_request_finds_the_kept_prompt() -> None:
    """A request that begins with a kept prompt computes only what comes after the prompt's full pages."""
    driver = SchedulerDriver(pages=40)
    run(driver, 0, cache_ttl_s=300.0)
    run(driver, *range(1, 12))
    before = driver.scheduler.counters.cached_tokens

    driver.submit("next", [*prompt_of(0), 5, 6, 7], domain=ALICE)
    driver.drain()

    assert driver.scheduler.counters.cached_tokens - before == PROMPT_PAGES * PAGE


def test_each_request_begins_the_time_anew() -> None:
    """A prompt that is asked again is kept for the whole time from then on, and never for less than was asked first."""
    driver = SchedulerDriver(pages=40)
    run(driver, 0, 1, cache_ttl_s=300.0)
    run(driver, 2, cache_ttl_s=3600.0)
    driver.clock.advance(200.0)
    run(driver, 0, 2, cache_ttl_s=300.0)
    driver.clock.advance(200.0)
    run(driver, *range(3, 15))

    early = [device_pages(driver, number) for number in range(3)]
    driver.clock.advance(200.0)
    run(driver, *range(15, 27))
    late = [device_pages(driver, number) for number in range(3)]

    assert early == [PROMPT_PAGES, 0, PROMPT_PAGES]
    assert late == [0, 0, PROMPT_PAGES]


def test_a_cancelled_request_keeps_its_prompt() -> None:
    """The prompt of a request that is cancelled during its answer is kept as if the request had finished."""
    driver = SchedulerDriver(pages=40)
    driver.submit("cancelled", prompt_of(0), domain=ALICE, max_tokens=10, cache_ttl_s=300.0)
    while "cancelled" not in driver.admitted() or driver.scheduler.counters.generated_tokens == 0:
        driver.step()
    driver.scheduler.cancel(next(iter(driver.scheduler.running_ids)))

    run(driver, *range(1, 12))

    assert device_pages(driver, 0) == PROMPT_PAGES


def test_only_full_pages_of_the_prompt_are_kept() -> None:
    """Neither the page in which the prompt ends nor the pages of the answer are kept."""
    driver = SchedulerDriver(pages=40)

    driver.submit("long answer", prompt_of(0), domain=ALICE, max_tokens=2 * PAGE, cache_ttl_s=300.0)
    driver.drain()

    assert driver.cache.kv_cache.prompt_leases.num_pages(ALICE) == PROMPT_PAGES


def test_a_session_is_not_kept_by_a_time() -> None:
    """The time of a request with a session protects nothing, because the session's own leases do."""
    driver = SchedulerDriver(pages=40)
    run(driver, 0, cache_ttl_s=300.0, session=SessionUse(SessionKey("s")))

    assert driver.cache.kv_cache.prompt_leases.num_pages(ALICE) == 0


def test_kept_prompts_give_way_to_requests() -> None:
    """Requests that need the whole device at once get it, although prompts are kept, and none is preempted."""
    driver = SchedulerDriver(pages=40, budget=4 * 9 * PAGE)
    run(driver, 0, 1, 2, cache_ttl_s=3600.0)

    for number in range(10, 14):
        driver.submit(f"large-{number}", [10 + number] * (9 * PAGE), domain=ALICE, max_tokens=4)
    driver.step()

    assert driver.scheduler.num_running == 4
    driver.drain()
    assert len(driver.finished()) == 3 + 4
    assert driver.errors() == {}
    assert driver.scheduler.counters.preemptions == 0


def test_a_tenant_keeps_no_more_than_its_reserve() -> None:
    """Of five kept prompts, those asked last stay up to the tenant's reserve; the rest is evicted like other pages,
    last pages first."""
    driver = SchedulerDriver(pages=40)
    run(driver, *range(5), cache_ttl_s=3600.0)

    run(driver, *range(5, 15))

    assert [device_pages(driver, number) for number in range(5)] == [0, RESERVE - 3 * PROMPT_PAGES, 6, 6, 6]


def test_another_tenant_lowers_what_a_tenant_keeps() -> None:
    """When another tenant has pages too, both keep at most their new reserves, and the first loses the pages above
    its own."""
    driver = SchedulerDriver(pages=40)
    leases, page_store = driver.cache.kv_cache.prompt_leases, driver.cache.kv_cache.page_store
    run(driver, *range(5), cache_ttl_s=3600.0)
    alone = leases.num_pages(ALICE)

    run(driver, 5, domain=BOB)
    beside_bob = leases.num_pages(ALICE)
    run(driver, 6, 7, 8, domain=BOB, cache_ttl_s=3600.0)
    run(driver, *range(9, 19))

    assert alone == page_store.reserve_pages(Tier.DEVICE) * 2 == RESERVE
    assert beside_bob == leases.num_pages(ALICE) == leases.num_pages(BOB) == RESERVE / 2
    assert [device_pages(driver, number) for number in range(5)] == [0, 0, 0, RESERVE / 2 - PROMPT_PAGES, PROMPT_PAGES]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, 3600.1, float("inf"), float("nan")])
def test_a_time_out_of_range_is_refused(ttl_s: float) -> None:
    """A time that is not above 0 and up to an hour is an error that names the field and both bounds."""
    driver = SchedulerDriver()

    with pytest.raises(InvalidRequest, match=r"cache_ttl_s is .* above 0 and up to 3600"):
        driver.submit("bad", cache_ttl_s=ttl_s)

    assert driver.scheduler.num_waiting == 0
