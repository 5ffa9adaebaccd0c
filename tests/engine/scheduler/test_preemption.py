"""Tests of preemption and cancellation: no token and no page is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import PromptAdmitted
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import CONTEXT, PAGE, SchedulerDriver
from tests.hypothesis_profiles import examples


def test_everything_is_released_when_requests_end_or_are_cancelled() -> None:
    """After requests end or are cancelled in any phase, no page is active and no adapter is pinned."""
    driver = SchedulerDriver(max_running=2)
    driver.adapters.ready.add("sha256:a")
    for name in ("ends", "cancelled running", "cancelled waiting"):
        driver.submit(name, 9, adapters=(AdapterUse("sha256:a"),))
    driver.step()

    driver.scheduler.cancel(RequestId("cancelled running"))
    driver.scheduler.cancel(RequestId("cancelled waiting"))
    driver.scheduler.cancel(RequestId("never was"))
    while driver.step() is not None:
        pass

    assert set(driver.finished()) == {"ends"}
    assert driver.pool.active_pages == 0
    assert driver.adapters.pins == {"sha256:a": 0}
    assert driver.scheduler.num_running == driver.scheduler.num_waiting == 0


def test_a_cancelled_request_holds_nothing_and_its_prompt_stays_cached() -> None:
    """A request cancelled while it decodes holds no page, and the same prompt later finds its whole pages cached."""
    driver = SchedulerDriver()
    prompt = [50 + n for n in range(20)]
    driver.submit("gone", prompt, max_tokens=10)
    for _ in range(4):
        driver.step()
    assert driver.pool.active_pages > 0

    driver.scheduler.cancel(RequestId("gone"))
    driver.submit("again", prompt)
    driver.step()

    assert driver.pool.active_pages == 5
    report = next(output.event for output in driver.outputs if output.request_id == "again")
    assert isinstance(report, PromptAdmitted)
    assert report.cache.device_tokens == len(prompt) - PAGE


def test_without_pages_the_latest_is_preempted_and_both_end_with_all_their_tokens() -> None:
    """If two requests outgrow the device together, the later one is offloaded to the host and loaded again."""
    driver = SchedulerDriver(pages=CONTEXT // PAGE, host=20)
    driver.submit("early", 14, max_tokens=20)
    driver.clock.advance(1)
    driver.submit("late", [60 + n for n in range(14)], max_tokens=20)

    driver.drain()

    assert {name: event.completion_tokens for name, event in driver.finished().items()} == {"early": 20, "late": 20}
    assert driver.admitted() == ["early", "late"]
    assert driver.scheduler.counters.preemptions > 0
    assert driver.cache.copies.moved[TransferKind.SAVE] > 0
    computed = [
        piece.start + index
        for plan in driver.plans
        for piece in plan.slices
        if piece.request_id == "late"
        for index in range(len(piece.token_ids))
    ]
    again = len(computed) - len(set(computed))
    assert again <= PAGE * driver.scheduler.counters.preemptions, "what was offloaded was computed again"


def test_a_higher_tier_preempts_a_lower_one_which_continues_later() -> None:
    """With one place in the batch, a priority request preempts a flex one, which loses no token."""
    driver = SchedulerDriver(max_running=1, host=20)
    driver.submit("flex", 9, max_tokens=10, tier=ServiceTier.FLEX)
    driver.step()
    driver.submit("priority", [60 + n for n in range(9)], max_tokens=3, tier=ServiceTier.PRIORITY)

    driver.drain()

    assert list(driver.finished()) == ["priority", "flex"]
    assert driver.finished()["flex"].completion_tokens == 10


requests = st.tuples(
    st.integers(1, CONTEXT - 1), st.integers(1, 20), st.integers(0, 3), st.sampled_from([b"x", b"y", b"z"])
)


@settings(max_examples=examples(60))
@given(st.lists(requests, max_size=25), st.sampled_from([0, 3, 30]), st.data())
def test_whatever_is_sent_and_cancelled_everything_ends_and_no_page_is_lost(
    arrivals: list[tuple[int, int, int, bytes]], host: int, data: st.DataObject
) -> None:
    """In the smallest pool that holds one context, with or without a host tier, every request that is not cancelled
    finishes."""
    driver = SchedulerDriver(pages=CONTEXT // PAGE, host=host, budget=9, max_running=5)
    cancelled: set[str] = set()
    for number, (length, max_tokens, family, name) in enumerate(arrivals):
        prompt = [10 + family * 20 + n % 20 for n in range(length)]
        domain = IsolationDomain(name)
        driver.submit(str(number), prompt, max_tokens=max_tokens, domain=domain)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
        victim = data.draw(st.integers(0, 4 * len(arrivals)))
        if victim <= number and str(victim) not in driver.finished():
            driver.scheduler.cancel(RequestId(str(victim)))
            cancelled.add(str(victim))

    driver.drain()

    assert set(driver.finished()) | cancelled == {str(number) for number in range(len(arrivals))}
    assert driver.pool.active_pages == 0
    assert driver.scheduler.num_waiting == 0
