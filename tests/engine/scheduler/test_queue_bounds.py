"""Which requests may wait, and which make room for them, in a scheduler without torch."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import FirstComeFirstServed, WaitingOrder
from graftwork.engine.scheduler.queue_bounds import QueueBounds, QueueLimits
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.fair_traces import waiting_request
from tests.engine.scheduler.scheduler_driver import FLOOD, LIGHT, SchedulerDriver, crowd
from tests.hypothesis_profiles import examples


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


def random_queue(random: Random) -> list[RequestState]:
    """Returns up to 25 requests of four domains and all tiers, of which some have run, and no two came at one time."""
    found = []
    for number in range(random.randint(0, 25)):
        at = random.randint(0, 90) + number / 100
        tier = random.choice(list(ServiceTier))
        state = waiting_request(str(number), random.choice("abcd"), random.randint(1, 30), at=at, tier=tier)
        state.is_admitted = random.random() < 0.3
        found.append(state)
    return found


@pytest.mark.parametrize("make_order", [DeficitPrefixOrder, lambda clock: FirstComeFirstServed()], ids=["fair", "fcfs"])
def test_the_last_request_of_the_largest_domain_makes_room(make_order: Callable[[ManualClock], WaitingOrder]) -> None:
    """In each of 600 random queues, those make room whom a search through all waiting requests finds: of those that have
    never run, in the domain with most waiting, one of the lowest priority, and of these the last that came.
    """
    num_displaced = 0
    for seed in range(600):
        random = Random(seed)
        order, states = make_order(ManualClock(100.0)), random_queue(random)
        for state in states:
            order.enqueue(state)
        newcomer = waiting_request("new", random.choice("abcd"), random.randint(1, 60), at=100.0)
        most, most_tokens = (10**6, 60) if seed % 4 == 0 else (12, 10**6)
        bounds = QueueBounds(QueueLimits(most, most_tokens, 10**6, 10**6), order)

        expected = _displaced_by_search(order, states, newcomer, most, most_tokens)

        if expected is None:
            with pytest.raises(CapacityContended):
                bounds.displaced_by(newcomer, 0, 1.0)
        else:
            assert bounds.displaced_by(newcomer, 0, 1.0) == expected, f"seed {seed}"
            num_displaced += len(expected)
    assert num_displaced > 50


@pytest.mark.parametrize("free_places", [0, 3])
def test_no_request_fits_that_needs_more_than_is_left(free_places: int) -> None:
    """In each of 1,000 random queues, a request that needs more than its domain's room is refused. A domain whose next request
    would be refused because of its own bound has a room, with nothing left; so has the largest domain of a queue that is full.
    """
    num_full = num_with_rest = 0
    for seed in range(1000):
        random = Random(seed)
        order = DeficitPrefixOrder(ManualClock(100.0))
        for state in random_queue(random):
            order.enqueue(state)
        limits = QueueLimits(
            random.randint(6, 30), random.randint(60, 500), random.randint(3, 12), random.randint(30, 200)
        )
        bounds = QueueBounds(limits, order)

        rooms = {IsolationDomain(bytes.fromhex(room.domain)): room for room in bounds.rooms(free_places, 2.5)}

        for domain in order.all_domains:
            own, one = order.size_of(domain), waiting_request("one", domain.decode(), 1, at=100.0)
            if (room := rooms.get(domain)) is not None:
                assert (room.requests, room.tokens, room.retry_after_s) == (own.requests, own.tokens, 2.5)
                too_long = waiting_request("long", domain.decode(), max(room.tokens_left, 0) + 1, at=100.0)
                for state in [too_long, *([one] if room.requests_left <= 0 else ())]:
                    with pytest.raises(CapacityContended):
                        bounds.displaced_by(state, free_places, 2.5)
                num_with_rest += room.requests_left > 0 and room.tokens_left > 0
            is_full = own.requests >= limits.domain_requests + free_places or own.tokens >= limits.domain_tokens
            most = max(order.size_of(other).requests for other in order.all_domains)
            if own.requests == most and order.total_size().requests >= limits.requests + free_places:
                is_full = True
            if is_full:
                assert min(rooms[domain].requests_left, rooms[domain].tokens_left) <= 0, f"seed {seed}"
                num_full += 1
    assert num_full > 250
    assert num_with_rest > 80


def test_a_domain_far_from_its_bounds_has_no_room_to_tell() -> None:
    """With 7 of 64 requests left a domain is named, with 9 it is not. Of more than sixteen, those with the least left are."""
    order = DeficitPrefixOrder(ManualClock(100.0))
    for number in range(57):
        order.enqueue(waiting_request(f"near {number}", "near", 1))
    for number in range(55):
        order.enqueue(waiting_request(f"far {number}", "far", 1))
    for domain in range(20):
        for number in range(64 - domain // 4):
            order.enqueue(waiting_request(f"{domain} {number}", f"domain {domain:02}", 1))

    rooms = QueueBounds(QueueLimits(10**6, 10**6, 64, 10**6), order).rooms(0, 1.0)

    names = [bytes.fromhex(room.domain).decode() for room in rooms]
    assert names == [f"domain {domain:02}" for domain in range(16)]
    alone = DeficitPrefixOrder(ManualClock(100.0))
    for state in order:
        if state.domain in (b"near", b"far"):
            alone.enqueue(state)
    (room,) = QueueBounds(QueueLimits(10**6, 10**6, 64, 10**6), alone).rooms(0, 1.0)
    assert (bytes.fromhex(room.domain), room.requests_left) == (b"near", 7)


def _displaced_by_search(
    order: WaitingOrder, states: list[RequestState], newcomer: RequestState, most: int, most_tokens: int
) -> list[RequestState] | None:
    """Returns who makes room, by reading the whole queue for each; None if the newcomer is refused."""
    left, gone = list(states), list[RequestState]()

    def size(domain: IsolationDomain) -> int:
        own = [one for one in left if one.domain == domain]
        return sum(one.num_prompt for one in own) if len(left) < most else len(own)

    def too_much() -> bool:
        return len(left) + 1 > most or sum(one.num_prompt for one in [*left, newcomer]) > most_tokens

    while left and too_much():
        movable = [one for one in left if not one.has_run]
        last = max(
            reversed(movable), key=lambda one: (size(one.domain), order.priority(one), one.arrived_at), default=None
        )
        if last is None or last.domain == newcomer.domain:
            return None
        by_tokens = len(left) < most
        own = size(newcomer.domain) + (newcomer.num_prompt if by_tokens else 1)
        if size(last.domain) - (last.num_prompt if by_tokens else 1) < own:
            return None
        left.remove(last)
        gone.append(last)
    return gone
