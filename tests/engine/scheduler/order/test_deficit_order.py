"""Tests of deficit longest prefix match: its published bound, weights, locality, tiers, and that nobody waits for ever."""

import math
from collections.abc import Callable
from itertools import combinations, pairwise
from random import Random

import pytest

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.scheduler.order.domain_queue import DOMAIN_TURN
from graftwork.engine.scheduler.order.fair_share import TIER_TURN, DeficitPrefixOrder, VirtualTokenCounter
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import FirstComeFirstServed, WaitingOrder
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.fair_traces import GivenLocality, Job, Server, waiting_request

MakeOrder = Callable[[ManualClock, GivenLocality], WaitingOrder]


def dlpm(quantum: float, **settings: float) -> MakeOrder:
    return lambda clock, locality: DeficitPrefixOrder(
        clock,
        locality,
        settings=DeficitSettings(quantum, **settings),  # type: ignore[arg-type]
    )


def server(make: MakeOrder, places: int = 4) -> Server:
    clock, locality = ManualClock(0.0), GivenLocality()
    return Server(make(clock, locality), locality, clock, places)


DEAREST = 80 + 2 * 12
"""The cost of the dearest request of a random trace."""


def largest_difference(run: Server, random: Random, domains: dict[str, float]) -> float:
    """Runs a random trace. Returns the largest difference of the service that two domains got while both waited."""
    since: dict[tuple[str, str], dict[str, float]] = {}
    worst = 0.0
    arrivals = {name: random.choice((0.1, 0.5, 2.0)) for name in domains}
    for step in range(100):
        for name, rate in arrivals.items():
            for number in range(int(rate) + (random.random() < rate % 1)):
                prompt = random.choice((5, 20, 80))
                state = waiting_request(f"{name} {step} {number}", name, prompt, weight=domains[name])
                run.arrive(Job(state, random.randint(1, 12), random.randint(0, prompt - 1)))
        before = run.backlogged()
        start = dict(run.served)
        run.step()
        backlogged = sorted(before & run.backlogged())
        since = {pair: since.get(pair, start) for pair in combinations(backlogged, 2)}
        for pair, served in since.items():
            one, other = (run.served.get(name, 0.0) - served.get(name, 0.0) for name in pair)
            worst = max(worst, abs(one - other))
    return worst


def check_the_bound(seeds: range, quantum: float, places: int = 2) -> None:
    for seed in seeds:
        random = Random(seed)
        domains = {name: random.choice((1.0, 2.0, 4.0)) for name in "abcd"[: random.randint(2, 4)]}

        worst = largest_difference(server(dlpm(quantum), places), random, domains)

        assert worst <= 2 * (places * DEAREST + quantum), f"seed {seed}"


@pytest.mark.parametrize("quantum", [0.0, 100.0])
def test_two_backlogged_domains_differ_by_no_more_than_the_published_bound(quantum: float) -> None:
    """In random traces, the service of two domains that both wait differs by at most 2 × (U + Q): U is the largest cost
    of what is admitted at one time, Q the quantum.
    """
    check_the_bound(range(20), quantum)


@pytest.mark.slow
@pytest.mark.parametrize("quantum", [0.0, 100.0])
def test_the_bound_holds_in_a_thousand_traces(quantum: float) -> None:
    """As the test before, in 1,000 traces."""
    check_the_bound(range(1000), quantum)


def test_first_come_first_served_breaks_the_bound() -> None:
    """The bound of the test before is no matter of course: a flood under first come, first served exceeds it."""
    run = server(lambda clock, locality: FirstComeFirstServed(), places=2)
    for number in range(100):
        run.arrive(Job(waiting_request(f"flood {number}", "a", 80), 5))

    assert largest_difference(run, Random(0), {"a": 1.0, "b": 1.0}) > 2 * (2 * DEAREST + 100)


def test_the_choices_are_those_of_explicit_deficits() -> None:
    """With all domains waiting, the order equals the paper's algorithm: serve the longest prefix among domains with a
    deficit above 0; when none is left, give each domain its weighted quantum.
    """
    for seed in range(40):
        random = Random(seed)
        run = server(dlpm(150.0, patience_s=math.inf), places=1)
        weights = {name: random.choice((1.0, 2.0, 4.0)) for name in "abc"}
        queues: dict[str, list[Job]] = {name: [] for name in weights}
        for number in range(60):
            name = "abc"[number % 3]
            prompt = random.randint(20, 120)
            job = Job(waiting_request(f"{name} {number}", name, prompt, weight=weights[name]), 1, random.randint(0, 19))
            queues[name].append(job)
            run.arrive(job)
        expected: list[str] = []
        deficits = {name: weights[name] * 150.0 for name in weights}
        while all(queues.values()):
            able = [name for name in queues if deficits[name] > 0]
            if not able:
                deficits = {name: value + weights[name] * 150.0 for name, value in deficits.items()}
                continue
            # within a domain, all requests are of one flow: the best of its 32 oldest goes first
            job_of = {name: max(queue[:32], key=lambda job: job.cached) for name, queue in queues.items()}
            best = max(able, key=lambda name: (job_of[name].cached, deficits[name] / weights[name], -ord(name)))
            job = job_of[best]
            queues[best].remove(job)
            expected.append(job.state.request_id)
            deficits[best] -= job.state.num_prompt - job.cached + 2.0 * job.outputs

        while len(run.started) < len(expected):
            run.step()

        assert run.started[: len(expected)] == expected, f"seed {seed}"


@pytest.mark.parametrize("make", [dlpm(0.0), dlpm(200.0), lambda clock, locality: VirtualTokenCounter(clock)])
def test_weights_divide_the_service(make: MakeOrder) -> None:
    """Domains of weight 1, 2 and 4 that always wait get service as 1 : 2 : 4, within 5 %."""
    random, run = Random(7), server(make)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    for number in range(2000):
        for name, weight in weights.items():
            if run.order.size_of(IsolationDomain(name.encode())).requests < 4:
                state = waiting_request(f"{name} {number}", name, random.randint(5, 60), weight=weight)
                run.arrive(Job(state, random.randint(1, 8), random.randint(0, 4)))
        run.step()

    assert max(run.served.values()) / min(run.served.values()) < 1.05


def test_an_idle_domain_earns_nothing() -> None:
    """A domain that comes after a hundred requests of another gets every second admission, not all of them."""
    run = server(dlpm(0.0), places=1)
    for number in range(150):
        run.arrive(Job(waiting_request(f"early {number}", "early", 10), 1))
    for _ in range(100):
        run.step()
    for number in range(50):
        run.arrive(Job(waiting_request(f"late {number}", "late", 10), 1))
    for _ in range(20):
        run.step()

    assert sum(name.startswith("late") for name in run.started[100:]) in (10, 11)


def test_a_cached_prefix_goes_first_within_the_quantum_and_not_beyond_it() -> None:
    """A domain with cached prompts is served before the other until it is a quantum ahead, and then they take turns."""
    run = server(dlpm(100.0), places=1)
    for number in range(40):
        run.arrive(Job(waiting_request(f"cold {number}", "cold", 48), 1))
        run.arrive(Job(waiting_request(f"warm {number}", "warm", 48), 1, cached=40))
    for _ in range(24):
        run.step()

    assert all(name.startswith("warm") for name in run.started[:10])
    served = {"warm": 10.0, "cold": 50.0}
    totals = {name: sum(one.startswith(name) for one in run.started) * cost for name, cost in served.items()}
    assert abs(totals["warm"] - totals["cold"]) <= 100 + 50


def test_the_oldest_request_of_a_domain_is_not_starved_by_better_ones() -> None:
    """An uncached request is started although its domain always has waiting requests with cached prompts: at the latest
    as the fourth once it is overdue.
    """
    run = server(dlpm(1e9, patience_s=10.0), places=1)
    run.arrive(Job(waiting_request("unlucky", "a", 50), 1))
    for number in range(40):
        run.arrive(Job(waiting_request(f"lucky {number}", "a", 50, session=f"s{number}"), 1, cached=49))
        run.arrive(Job(waiting_request(f"other {number}", "a", 50, session=f"o{number}"), 1, cached=48))
        run.step()

    assert 10 <= run.started.index("unlucky") < 10 + DOMAIN_TURN


def test_the_oldest_request_of_a_flow_is_not_starved_by_cached_ones_of_the_same_flow() -> None:
    """As the test before, with all requests in one flow, where only a window of the oldest is compared."""
    run = server(dlpm(1e9, patience_s=10.0), places=1)
    run.arrive(Job(waiting_request("unlucky", "a", 50), 1))
    for number in range(60):
        run.arrive(Job(waiting_request(f"lucky {number}", "a", 50), 1, cached=49))
        run.arrive(Job(waiting_request(f"other {number}", "a", 50), 1, cached=48))
        run.step()

    assert 10 <= run.started.index("unlucky") < 10 + DOMAIN_TURN


def test_no_more_requests_of_a_domain_are_compared_than_the_setting_says() -> None:
    """With a thousand requests waiting in one flow and eight compared, a choice reads the ranks of eight."""
    clock, locality = ManualClock(0.0), GivenLocality()
    order = DeficitPrefixOrder(clock, locality, settings=DeficitSettings(requests=8))
    for number in range(1000):
        order.enqueue(waiting_request(f"r{number}", "a", 50))
        locality.cached[f"r{number}"] = number % 50

    first = next(order.candidates()).request_id

    assert first == "r7"
    assert locality.num_reads <= 2 * 8


def test_tiers_go_first_and_a_lower_tier_keeps_a_turn() -> None:
    """While priority requests always wait, flex gets nothing until it is overdue, and then one of eight admissions."""
    run = server(dlpm(100.0, patience_s=20.0), places=1)
    for number in range(20):
        run.arrive(Job(waiting_request(f"flex {number}", "b", 10, tier=ServiceTier.FLEX), 1))
    for number in range(100):
        run.arrive(Job(waiting_request(f"priority {number}", "a", 10, tier=ServiceTier.PRIORITY), 1))
        run.step()
    turns = [index for index, name in enumerate(run.started) if name.startswith("flex")]

    assert 20 <= turns[0] <= 20 + TIER_TURN
    assert {later - earlier for earlier, later in pairwise(turns)} == {TIER_TURN}


def test_the_next_turn_of_a_running_program_goes_before_new_programs() -> None:
    """A session that had a turn goes before requests of its domain that have waited longer; not if that is turned off."""
    started = {}
    for programs_first in (True, False):
        run = server(dlpm(1000.0, programs_first=programs_first), places=1)
        run.arrive(Job(waiting_request("turn 1", "a", 10, session="agent"), 1))
        run.step()
        run.arrive(Job(waiting_request("new", "a", 10, session="new"), 1))
        run.step()
        run.arrive(Job(waiting_request("other", "a", 10, session="other"), 3))
        run.arrive(Job(waiting_request("turn 2", "a", 10, session="agent"), 1))
        run.step()
        started[programs_first] = run.started

    assert started == {True: ["turn 1", "new", "turn 2"], False: ["turn 1", "new", "other"]}


def test_a_preempted_request_goes_before_others_of_its_domain() -> None:
    """A request that has run before is the next of its domain, and its prompt is not counted again."""
    run = server(dlpm(1000.0), places=1)
    run.arrive(Job(waiting_request("one", "a", 10, session="s"), 5))
    preempted = waiting_request("preempted", "a", 10)
    preempted.is_admitted = True
    run.arrive(Job(preempted, 5))

    assert [state.request_id for state in run.order.candidates()] == ["preempted", "one"]


def test_every_request_is_yielded_once_after_any_history() -> None:
    """After random arrivals, starts, ends and charges, the candidates are exactly the waiting requests."""
    for seed in range(60):
        random = Random(seed)
        clock, locality = ManualClock(0.0), GivenLocality()
        order = DeficitPrefixOrder(clock, locality, settings=DeficitSettings(50.0, patience_s=5.0, window=2))
        model: dict[str, RequestState] = {}
        for number in range(80):
            action = random.random()
            if action < 0.5 or not model:
                state = waiting_request(
                    f"r{number}",
                    random.choice("abc"),
                    random.randint(1, 60),
                    at=clock.monotonic(),
                    tier=random.choice(list(ServiceTier)),
                    session=random.choice((None, "s", "t", "u")),
                )
                locality.cached[f"r{number}"] = random.randint(0, state.num_prompt)
                order.enqueue(state)
                model[state.request_id] = state
            else:
                state = model.pop(random.choice(sorted(model)))
                random.choice((order.start, order.remove))(state)
            clock.advance(random.choice((0, 1, 4)))
            order.check_integrity()
            yielded = [one.request_id for one in order.candidates()]
            assert sorted(yielded) == sorted(model)
            assert order.total_size().tokens == sum(one.num_prompt for one in model.values())
            assert len(order) == order.total_size().requests == len(model)
