"""Tests of the decision about requests that arrive, on the thread that receives them, against the engine loop's own."""

from dataclasses import replace
from random import Random

import pytest

from graftwork.engine.arrivals import Arrivals
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import PromptWork
from graftwork.engine.scheduler.arrival import Arrival, QueueSnapshot, QueueTotal, Shares, backlog_of
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import QueueLine, QueueLines
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.fair_traces import waiting_request
from tests.engine.scheduler.test_first_token import TimedDriver, busy_driver

DOMAINS = [IsolationDomain(name) for name in (b"a", b"b", b"c")]


def request_of(name: str, tokens: int, domain: IsolationDomain, random: Random, **options: object) -> EngineRequest:
    prompt = tuple(random.randrange(10, 90) for _ in range(tokens))
    return EngineRequest(RequestId(name), prompt, SamplingParams(max_tokens=3), domain, **options)  # type: ignore[arg-type]


def publish(arrivals: Arrivals, driver: TimedDriver, num_received: int) -> QueueSnapshot:
    snapshot = driver.scheduler.deadlines.snapshot(num_received)
    arrivals.publish(snapshot)
    return snapshot


def test_requests_that_have_come_since_the_snapshot_count_as_if_the_loop_had_them() -> None:
    """In each of 40 random queues in which three domains wait, the prompt tokens ahead of a new request are the same by an old snapshot and the requests
    since, as by a snapshot that knows them all.
    """
    for seed in range(40):
        random, driver = Random(seed), TimedDriver(max_waiting=1000)
        arrivals = Arrivals(driver.clock)
        for number in range(60):
            driver.scheduler.submit(request_of(f"old {number}", random.randint(2, 30), DOMAINS[number % 3], random))
        for _ in range(random.randint(1, 5)):
            driver.timed_step()
        old = publish(arrivals, driver, 0)
        added = []
        for number in range(random.randint(1, 12)):
            request = request_of(f"new {number}", random.randint(2, 30), random.choice(DOMAINS), random)
            added.append(Arrival.of(request, len(request.prompt_token_ids)))
            driver.scheduler.submit(request)
        last = request_of("last", 5, random.choice(DOMAINS), random)
        arrival = Arrival.of(last, 5)

        by_old = backlog_of(old, arrival, added)
        by_new = backlog_of(driver.scheduler.deadlines.snapshot(), arrival)

        assert by_old.ahead.tokens == by_new.ahead.tokens


def random_requests(random: Random, now: float) -> list[RequestState]:
    """Returns requests of all tiers and of four domains, which have different weights, in the order of their arrival."""
    weights = {name: random.choice([1.0, 2.0, 4.0]) for name in "abcd"}
    found = []
    for number in range(random.randint(2, 40)):
        name, tier = random.choice("abcd"), random.choice(list(ServiceTier))
        at, weight = now + number * 1e-6, weights[name]
        found.append(waiting_request(f"r{number}", name, random.randint(1, 60), at=at, weight=weight, tier=tier))
    return found


@pytest.mark.parametrize("quantum", [0.0, 100.0])
def test_what_is_ahead_is_what_the_order_would_admit_first(quantum: float) -> None:
    """In each of 100 random queues of several tiers, domains and weights, the requests ahead of a new one are those that the
    order yields before it. Of requests whose turn is the same, the order may yield some later.
    """
    for seed in range(100):
        random, clock = Random(seed), ManualClock()
        order = DeficitPrefixOrder(clock, settings=DeficitSettings(quantum, programs_first=False, window=100))
        *waiting, new = random_requests(random, clock.monotonic())
        for state in waiting:
            order.enqueue(state)
        for state in [state for state in order if random.random() < 0.3]:
            order.start(state)

        lines, in_order = order.lines(lambda state: state.num_prompt)
        turn = lines.start_of(new.request.tier, new.domain, ((), None, False))
        ahead = {one.request_id for one, start in zip(in_order, lines.starts, strict=True) if start <= turn}
        same = {one.request_id for one, start in zip(in_order, lines.starts, strict=True) if start == turn}
        order.enqueue(new)
        walk = [one.request_id for one in order.candidates()]

        first = set(walk[: walk.index(new.request_id)])
        assert ahead - same <= first <= ahead


def test_a_request_is_refused_at_once_exactly_as_the_loop_would_refuse_it() -> None:
    """With nothing new since the snapshot, both threads accept or refuse the same deadlines, with the same words."""
    driver, outcomes = busy_driver(), []
    snapshot = replace(driver.scheduler.deadlines.snapshot(), served={})  # so that it takes no prompt to be cached
    for number in range(60):
        request = request_of(
            f"new {number}", 12, IsolationDomain(b"tenant"), Random(1000 + number), deadline_s=0.03 * number + 0.01
        )
        arrivals, errors = Arrivals(driver.clock), list[str]()
        arrivals.publish(snapshot)
        for decide in (arrivals.receive, driver.scheduler.submit):
            try:
                decide(request)
                errors.append("")
            except (CapacityContended, Unavailable) as error:
                errors.append(error.message)
        driver.scheduler.cancel(request.request_id)
        if errors[0]:  # one that it leaves to the loop is not refused here
            assert errors[0] == errors[1]
        outcomes.append(bool(errors[0]))
        assert bool(errors[1]) == bool(errors[0]) or number < 10  # for the shortest, its own prompt decides

    assert 5 < sum(outcomes) < 55


def test_requests_fill_the_queue_before_the_loop_takes_them() -> None:
    """Between two steps, so many requests are accepted as can meet their deadline, and the others are refused at once. When
    the loop has taken the accepted ones and published, they are not counted twice.
    """
    driver, random = busy_driver(), Random(5)
    arrivals, accepted, refused = Arrivals(driver.clock), [], 0
    publish(arrivals, driver, 0)
    for number in range(100):
        request = request_of(f"new {number}", 10, IsolationDomain(b"tenant"), random, deadline_s=2.0)
        try:
            accepted.append((request, arrivals.receive(request)))
        except CapacityContended:
            refused += 1
    for request, received in accepted:
        driver.scheduler.submit(request, received)
    publish(arrivals, driver, accepted[-1][1].number)

    assert len(accepted) > 5
    assert refused > 5
    with pytest.raises(CapacityContended):
        arrivals.receive(request_of("late", 10, IsolationDomain(b"tenant"), random, deadline_s=2.0))
    assert arrivals.receive(request_of("patient", 10, IsolationDomain(b"tenant"), random, deadline_s=8.0)).expected


def test_a_prompt_that_may_be_cached_is_left_to_the_loop() -> None:
    """A long prompt is not refused for the time of its own tokens by a thread that cannot see the cache."""
    driver = busy_driver()
    arrivals = Arrivals(driver.clock)
    snapshot = publish(arrivals, driver, 0)
    long = request_of("long", 36, IsolationDomain(b"other"), Random(1), deadline_s=0.03)

    received = arrivals.receive(long)

    assert received.expected is None
    with pytest.raises(Unavailable):
        driver.scheduler.submit(long, received)
    cached = {(ServiceTier.DEFAULT, long.domain): Shares(0.0, 0.0, 0.25)}
    assert replace(snapshot, served=cached).guess_uncached(long) == 9


def test_the_deadline_counts_from_the_receipt() -> None:
    """A request that has lain in the inbox for a long step ends when its deadline passes, not a step later."""
    driver = TimedDriver()
    arrivals = Arrivals(driver.clock)
    request = request_of("waited", 5, IsolationDomain(b"tenant"), Random(1), deadline_s=1.0)
    received = arrivals.receive(request)
    driver.clock.advance(0.9)

    driver.scheduler.submit(request, received)

    assert driver.scheduler.deadlines.seconds_to_next() == pytest.approx(0.1)
    assert arrivals.wants_snapshot
    driver.clock.advance(120.0)
    assert not arrivals.wants_snapshot


def test_a_snapshot_is_replaced_only_when_it_is_old() -> None:
    """The loop makes the first snapshot at once, and the next after 20 ms; what was withdrawn is made at once again."""
    driver = TimedDriver()
    arrivals = Arrivals(driver.clock)

    assert arrivals.is_old
    publish(arrivals, driver, 0)
    assert not arrivals.is_old
    driver.clock.advance(0.021)
    assert arrivals.is_old
    publish(arrivals, driver, 0)
    arrivals.publish(None)
    assert arrivals.is_old


def test_what_passes_is_what_other_domains_will_get_until_their_counters_are_equal() -> None:
    """Of 1,000 tokens ahead: domain b had 30 % of the service and has 100 tokens waiting, 50 below the new request's turn: 50
    pass. Of domain c something waits behind: none pass. The higher tier had 10 %, and passes by that part of all.
    """
    own, b, c, d = (IsolationDomain(name) for name in (b"own", b"b", b"c", b"d"))
    default = ServiceTier.DEFAULT
    lines = {
        (default, own): QueueLine(0.0, {"flow": 300.0}, 0.0, (0.0,), (0.0, 300.0)),
        (default, b): QueueLine(150.0, {"flow": 100.0}, 0.0, (0.0,), (0.0, 100.0)),
        (default, c): QueueLine(0.0, {"flow": 400.0}, 0.0, (0.0,), (0.0, 400.0)),
    }
    served = {
        (default, own): Shares(0.3, 0.3),
        (default, b): Shares(0.3, 0.3),
        (default, c): Shares(0.3, 0.3),
        (ServiceTier.PRIORITY, d): Shares(0.1, 0.1),
    }
    ahead = PromptWork.of(0, 1000)
    snapshot = QueueSnapshot(
        queue=QueueLines(((1, 0.0),), lines, {default: 0.0}),
        totals=(QueueTotal(), QueueTotal(ahead, 10)),
        served=served,
        weights={own: 1.0, b: 1.0, c: 1.0, d: 1.0},
        max_running=8,
    )

    backlog = backlog_of(snapshot, Arrival(default, own, 1.0, "flow", 10, 10))

    total = (1000 + 50) / 0.9
    assert backlog.ahead.tokens == 1000
    assert backlog.passing.tokens == pytest.approx((total - 1000) / total, rel=0.01)
