"""Tests of what waiting requests are charged for the adapters that are copied for them, in a scheduler without torch."""

from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.engine.scheduler.order.fair_share import VirtualTokenCounter
from graftwork.engine.scheduler.order.waiting_order import ServicePrices
from graftwork.platform.ids import RequestId
from tests.engine.scheduler.scheduler_driver import FLOOD, LIGHT, SchedulerDriver

DIGEST = "sha256:a"


def priced(driver: SchedulerDriver) -> VirtualTokenCounter:
    """Returns an order in which a million bytes of an adapter cost 50 prompt tokens."""
    return VirtualTokenCounter(driver.clock, ServicePrices(adapter_megabyte=50.0))


def service(driver: SchedulerDriver) -> list[float]:
    """Returns the counters of both domains."""
    order = driver.scheduler.requests.waiting
    assert isinstance(order, VirtualTokenCounter)
    return [order.counter(ServiceTier.DEFAULT, domain) for domain in (FLOOD, LIGHT)]


def test_a_copy_is_charged_to_the_domain_of_the_first_request_that_asked_for_it() -> None:
    """Two domains wait for one adapter of two million bytes: the first pays 100 prompt tokens, once, and the other nothing."""
    driver = SchedulerDriver(make_order=priced)
    for name, domain in (("flood", FLOOD), ("light", LIGHT)):
        driver.submit(name, 3, domain=domain, adapters=(AdapterUse(DIGEST),))
    driver.step()
    before = service(driver)

    driver.adapters.placed = [(DIGEST, 2_000_000)]
    driver.step()
    driver.step()

    assert before == [0.0, 0.0]
    assert service(driver) == [100.0, 0.0]


def test_what_was_placed_for_requests_that_are_gone_is_charged_to_nobody() -> None:
    """A cancelled request leaves a copy that no waiting request asks for."""
    driver = SchedulerDriver(make_order=priced)
    driver.submit("flood", 3, domain=FLOOD, adapters=(AdapterUse(DIGEST),))
    driver.scheduler.cancel(RequestId("flood"))

    driver.adapters.placed = [(DIGEST, 2_000_000)]
    driver.step()

    assert service(driver) == [0.0, 0.0]


def test_a_place_stays_empty_for_no_request_that_lacks_its_adapter() -> None:
    """Behind forty requests whose adapters are not loaded, one that needs none starts at once."""
    driver = SchedulerDriver(max_waiting=100)
    for number in range(40):
        driver.submit(f"waits {number}", 3, domain=FLOOD, adapters=(AdapterUse(f"sha256:{number}"),))
    driver.submit("ready", 3, domain=FLOOD)

    driver.step()

    assert set(driver.scheduler.running_ids) == {"ready"}
