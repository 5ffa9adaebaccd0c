"""How the scheduler queues and accounts for requests with an earlier run on another engine."""

from typing import Any

import pytest

from graftwork.engine.core.events import CacheReport, PromptAdmitted
from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import PAGE, SchedulerDriver

FLOOD, LIGHT = IsolationDomain(b"flood"), IsolationDomain(b"light")
SEEDED = {"sampling": {"seed": 3}}
RUN: dict[str, Any] = SEEDED | {"emitted_token_ids": (7, 7), "max_tokens": 4}


def test_a_full_queue_takes_a_request_with_an_earlier_run() -> None:
    """Such a request waits above the limits of the queue, where a new one is refused, and ends with its other tokens."""
    driver = SchedulerDriver(max_running=1, max_waiting=1)
    driver.submit("one")
    driver.submit("two")
    with pytest.raises(CapacityContended):
        driver.submit("new")

    driver.submit("resumed", **RUN)
    driver.drain()

    assert driver.finished()["resumed"].completion_tokens == 4


def test_a_request_with_an_earlier_run_is_not_displaced() -> None:
    """A new request of another domain displaces the flood's last request without an earlier run."""
    driver = SchedulerDriver(max_running=1, max_waiting=3, waiting_share=1.0)
    for name in ("running", "new", "newer"):
        driver.submit(name, domain=FLOOD)
        driver.step()
    driver.submit("resumed", domain=FLOOD, **RUN)

    driver.submit("light", domain=LIGHT)
    driver.drain()

    assert list(driver.errors()) == ["newer"]
    assert "resumed" in driver.finished()


def test_a_request_with_an_earlier_run_goes_before_new_ones_of_its_domain() -> None:
    """Of one domain and tier it starts first, although it arrived last. A higher tier still goes before it."""
    driver = SchedulerDriver(max_running=1, make_order=lambda driver: DeficitPrefixOrder(driver.clock))
    for name, tier in (("new", ServiceTier.DEFAULT), ("high", ServiceTier.PRIORITY)):
        driver.submit(name, tier=tier)
    driver.submit("resumed", **RUN)

    driver.drain()

    assert driver.admitted() == ["high", "resumed", "new"]


def test_a_deadline_for_the_first_token_does_not_bind_a_later_run() -> None:
    """A request whose first token is there waits longer than its deadline, and does not end with an error."""
    driver = SchedulerDriver(max_running=1)
    driver.submit("long", max_tokens=8)
    driver.step()
    driver.submit("resumed", deadline_s=1.0, **RUN)
    driver.clock.advance(2.0)

    driver.drain()

    assert driver.errors() == {}
    assert driver.finished()["resumed"].completion_tokens == 4


def test_the_prompt_of_a_later_run_is_kept_though_all_of_it_was_cached() -> None:
    """A lease is taken for the prompt's full pages when the KV of the prompt and of the earlier run was there."""
    driver = SchedulerDriver()
    prompt = [20] * (2 * PAGE)
    driver.submit("first", prompt, max_tokens=8)
    driver.drain()

    driver.submit("resumed", prompt, max_tokens=8, emitted_token_ids=(7,) * 6, cache_ttl_s=60.0, **SEEDED)
    driver.drain()

    assert driver.cache.kv_cache.prompt_leases.num_pages(IsolationDomain(b"tenant")) == 2
    reports = {one.request_id: one.event.cache for one in driver.outputs if isinstance(one.event, PromptAdmitted)}
    assert reports[RequestId("resumed")] == CacheReport(device_tokens=2 * PAGE)
