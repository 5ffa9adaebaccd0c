"""Tests of preemption and cancellation: no token and no page is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import PromptAdmitted
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder
from graftwork.engine.scheduler.order.locality import DeviceLocality
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
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


def fill(driver: SchedulerDriver, number: int, **options: object) -> None:
    """Submits equal requests with prompts of their own, each a moment after the one before."""
    for index in range(number):
        driver.submit(f"{index}", [30 + index] * 9, **{"tier": ServiceTier.FLEX, "max_tokens": 25, **options})  # type: ignore[arg-type]
        driver.clock.advance(0.01)


def test_a_request_keeps_its_place_for_the_minimum_run_and_no_longer() -> None:
    """Among flex requests that have just started, a priority request starts after the minimum run, in the next step."""
    driver = SchedulerDriver(budget=32, max_running=3, host=60, min_run_steps=5)
    fill(driver, 3)
    driver.step()
    driver.submit("urgent", 5, tier=ServiceTier.PRIORITY)

    started = []
    for _ in range(6):
        driver.step()
        started.append("urgent" in driver.scheduler.running_ids)

    assert started == [False] * 4 + [True, True]


def test_the_victim_is_of_the_lowest_tier_then_has_the_most_pages_then_the_fewest_to_bring_back() -> None:
    """The tier decides before the pages, and the pages before the arrival. Of two with as many pages, the one whose pages
    are in the prefix tree goes."""
    driver = SchedulerDriver(pages=100, budget=128, max_running=6, host=60, min_run_steps=0)
    flex = {"tier": ServiceTier.FLEX, "max_tokens": 30}
    driver.submit("generated", [60], **flex)  # type: ignore[arg-type]
    for _ in range(20):
        driver.step()
    for name, length in (("cached", 20), ("small", 1), ("late", 1)):
        driver.clock.advance(0.01)
        driver.submit(name, [len(name) * 10] * length, **flex)  # type: ignore[arg-type]
    for number in range(2):
        driver.submit(f"default {number}", [40 + number] * 30, max_tokens=9)
    for _ in range(4):
        driver.step()
    order = []
    for number in range(4):
        before = list(driver.scheduler.running_ids)
        driver.submit(f"urgent {number}", [90 + number], tier=ServiceTier.PRIORITY, max_tokens=30)
        driver.step()
        order += [name for name in before if name not in driver.scheduler.running_ids]

    assert order == ["cached", "generated", "late", "small"]


def test_a_preempted_request_keeps_its_place_before_later_arrivals() -> None:
    """A request that gave up its place continues before requests of its tier that came after it."""
    driver = SchedulerDriver(max_running=1, host=60, min_run_steps=2)
    fill(driver, 3, max_tokens=8)
    for _ in range(3):
        driver.step()
    driver.submit("urgent", 5, tier=ServiceTier.PRIORITY)

    driver.drain()

    assert driver.scheduler.counters.preemptions == 1
    assert list(driver.finished()) == ["urgent", "0", "1", "2"]


arrivals = st.lists(
    st.tuples(requests, st.sampled_from(list(ServiceTier)), st.integers(0, 4), st.sampled_from([0.0, 0.1, 6.0])),
    max_size=30,
)


@settings(max_examples=examples(60))
@given(arrivals, st.integers(0, 6), st.sampled_from([0, 60]))
def test_each_preemption_follows_the_minimum_run(
    sent: list[tuple[tuple[int, int, int, bytes], ServiceTier, int, float]], min_run_steps: int, host: int
) -> None:
    """With pages for all, no request gives up its place before the minimum run, whoever arrives, so that a request of n
    steps is preempted n / minimum times at most; and all requests end with all their tokens."""
    driver = SchedulerDriver(pages=200, host=host, max_running=3, budget=9, min_run_steps=min_run_steps)
    started: dict[str, int] = {}
    expected: dict[str, int] = {}
    preempted = 0

    def step() -> None:
        nonlocal preempted
        before, steps = set(driver.scheduler.running_ids), driver.scheduler.counters.steps
        driver.step()
        after = set(driver.scheduler.running_ids)
        for name in before - after - driver.finished().keys():
            preempted += 1
            assert steps - started.pop(name) >= min_run_steps
        for name in after - before:
            started[name] = steps

    for number, ((length, max_tokens, family, name), tier, steps, pause_s) in enumerate(sent):
        prompt = [10 + family * 20 + n % 20 for n in range(length)]
        driver.submit(str(number), prompt, max_tokens=max_tokens, domain=IsolationDomain(name), tier=tier)
        expected[str(number)] = min(max_tokens, CONTEXT - length)
        driver.clock.advance(pause_s)
        for _ in range(steps):
            step()
    for _ in range(1000):
        if driver.scheduler.num_running + driver.scheduler.num_waiting:
            step()

    assert {name: event.completion_tokens for name, event in driver.finished().items()} == expected
    assert preempted == driver.scheduler.counters.preemptions


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=3, max_size=12), st.integers(0, 8))
def test_a_priority_request_starts_within_the_minimum_run_of_a_flood(
    flood: list[tuple[int, int]], min_run_steps: int
) -> None:
    """However many flex requests run and wait, a priority request starts at most `min_run_steps` + 1 steps after it came."""
    driver = SchedulerDriver(pages=200, host=200, max_running=3, budget=9, min_run_steps=min_run_steps)
    for number, (length, steps) in enumerate(flood):
        driver.submit(str(number), [10 + number] * length, max_tokens=9, tier=ServiceTier.FLEX)
        for _ in range(steps % 3):
            driver.step()
    driver.submit("urgent", 9, tier=ServiceTier.PRIORITY)

    for _ in range(min_run_steps + 1):
        driver.step()

    assert "urgent" in driver.admitted()


@settings(max_examples=examples(40))
@given(st.integers(2, 6), st.integers(0, 30), st.integers(0, 8))
def test_a_tenant_without_a_place_gets_one_within_the_minimum_run_though_locality_prefers_the_flood(
    num_places: int, num_waiting: int, min_run_steps: int
) -> None:
    """The flood's prompts are cached and the quantum has no end, so all its waiting requests come first in the order. They
    can take no place from the flood's own requests, and must not keep the other tenant from its share of the places."""

    def prefer_cached(driver: SchedulerDriver) -> DeficitPrefixOrder:
        locality = DeviceLocality(driver.cache.kv_cache.page_store.tree, driver.adapters.is_ready)
        return DeficitPrefixOrder(driver.clock, locality, settings=DeficitSettings(quantum=1e9))

    driver = SchedulerDriver(
        pages=200, host=200, max_running=num_places, min_run_steps=min_run_steps, make_order=prefer_cached
    )
    for number in range(num_places + num_waiting):
        driver.submit(f"flood {number}", [20] * 12, max_tokens=25, domain=IsolationDomain(b"flood"))
        driver.clock.advance(0.01)
    for _ in range(3):
        driver.step()
    driver.submit("light", [30] * 5, domain=IsolationDomain(b"light"))

    for _ in range(max(min_run_steps, 1)):
        driver.step()

    assert "light" in driver.scheduler.running_ids or "light" in driver.finished()
    driver.drain()
    assert len(driver.finished()) == num_places + num_waiting + 1
