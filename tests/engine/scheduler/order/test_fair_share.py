"""Tests of the order of admission: tiers, ageing, fair shares, and requests that wait for an adapter or for pages."""

from hypothesis import strategies as st

from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.platform.errors import (
    NotFound,
)
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.scheduler_driver import CONTEXT, PAGE, SchedulerDriver


def test_an_adapter_that_is_not_ready_delays_no_other_request() -> None:
    """Requests behind one whose adapter is still loading are admitted; that one follows when the adapter is ready."""
    driver = SchedulerDriver()
    driver.submit("cold", adapters=(AdapterUse("sha256:a"),))
    driver.submit("base")
    driver.step()
    assert driver.admitted() == ["base"]

    driver.adapters.ready.add("sha256:a")
    driver.step()

    assert driver.admitted() == ["base", "cold"]


def test_a_failed_load_ends_the_requests_that_wait_for_it() -> None:
    """All waiting requests with the adapter get the error; other requests stay."""
    driver = SchedulerDriver()
    for name in ("one", "two"):
        driver.submit(name, adapters=(AdapterUse("sha256:a"),))
    driver.submit("other", adapters=(AdapterUse("sha256:b"),))

    failed = driver.scheduler.fail_waiting_for("sha256:a", NotFound("gone"))

    assert [output.request_id for output in failed] == ["one", "two"]
    assert driver.scheduler.num_waiting == 1


def test_small_requests_do_not_overtake_one_that_lacks_pages() -> None:
    """The first request in the queue keeps its place until enough pages are free."""
    driver = SchedulerDriver(pages=CONTEXT // PAGE, max_running=8)
    driver.submit("first", 20, max_tokens=4)
    driver.step()
    driver.submit("large", [60 + n % 30 for n in range(30)], max_tokens=8)
    driver.submit("small", [5, 6], max_tokens=2)
    driver.step()
    assert driver.admitted() == ["first"]

    while driver.step() is not None:
        pass

    assert driver.admitted() == ["first", "large", "small"]
    assert set(driver.finished()) == {"first", "large", "small"}


def test_tiers_go_first_and_a_lower_tier_is_never_starved() -> None:
    """Priority goes before default and flex that waited longer; once flex is overdue, it gets one of eight admissions."""
    driver = SchedulerDriver(max_running=1)
    driver.submit("running", max_tokens=2)
    driver.step()
    driver.submit("flex", tier=ServiceTier.FLEX)
    driver.clock.advance(31)
    driver.submit("default")
    for number in range(9):
        driver.submit(f"priority {number}", tier=ServiceTier.PRIORITY)

    while driver.step() is not None:
        pass

    urgent = [f"priority {number}" for number in range(9)]
    assert driver.admitted() == ["running", *urgent[:7], "flex", *urgent[7:], "default"]


def test_two_domains_share_alike_however_much_one_sends() -> None:
    """Twenty requests of one domain and four of another are admitted in turns while both wait."""
    driver = SchedulerDriver(max_running=1)
    for number in range(20):
        driver.submit(f"flood {number}", domain=IsolationDomain(b"flood"))
    for number in range(4):
        driver.submit(f"calm {number}", domain=IsolationDomain(b"calm"))

    while len(driver.admitted()) < 8:
        driver.step()

    assert sum(name.startswith("calm") for name in driver.admitted()[:8]) >= 3


def test_idling_earns_no_credit() -> None:
    """A domain that comes late does not get all places to catch up with domains that were served before."""
    driver = SchedulerDriver(max_running=1)
    for number in range(30):
        driver.submit(f"early {number}", domain=IsolationDomain(b"early"))
    while len(driver.admitted()) < 10:
        driver.step()
    for number in range(10):
        driver.submit(f"late {number}", domain=IsolationDomain(b"late"))

    while len(driver.admitted()) < 18:
        driver.step()

    assert 3 <= sum(name.startswith("late") for name in driver.admitted()[10:]) <= 5


def test_weight_buys_a_larger_share() -> None:
    """A domain of weight three gets about three times as many admissions as one of weight one."""
    driver = SchedulerDriver(max_running=1)
    for number in range(30):
        driver.submit(f"heavy {number}", domain=IsolationDomain(b"heavy"), weight=3.0)
        driver.submit(f"light {number}", domain=IsolationDomain(b"light"))

    while len(driver.admitted()) < 20:
        driver.step()

    assert 13 <= sum(name.startswith("heavy") for name in driver.admitted()) <= 17


requests = st.tuples(
    st.integers(1, CONTEXT - 1), st.integers(1, 20), st.integers(0, 3), st.sampled_from([b"x", b"y", b"z"])
)
