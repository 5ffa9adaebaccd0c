"""What one domain may take while others wait, in a scheduler without torch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import ServiceTier
from graftwork.platform.errors import CapacityContended
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.stage import CONTEXT, PAGE, Stage
from tests.hypothesis_profiles import examples

FLOOD, LIGHT = IsolationDomain(b"flood"), IsolationDomain(b"light")


def crowd(stage: Stage, number: int, domain: IsolationDomain = FLOOD, **options: object) -> None:
    """Submits equal requests, named by their domain and a number."""
    for index in range(number):
        stage.submit(f"{domain.decode()} {index}", [30 + index] * 3, domain=domain, **options)  # type: ignore[arg-type]


def running(stage: Stage, domain: IsolationDomain) -> int:
    return sum(name.startswith(domain.decode()) for name in stage.scheduler.running_ids)


def test_a_domain_alone_uses_every_place() -> None:
    """Without others, one domain's requests fill the batch."""
    stage = Stage()
    crowd(stage, 9)

    stage.step()

    assert running(stage, FLOOD) == 8


def test_a_full_batch_of_one_domain_gives_a_place_to_another_at_once() -> None:
    """The newcomer starts in the next step, and the request that made room ends with all its tokens."""
    stage = Stage(host=40)
    crowd(stage, 8, max_tokens=12)
    stage.step()
    stage.submit("light", 3, domain=LIGHT)

    stage.step()

    assert "light" in stage.scheduler.running_ids
    assert running(stage, FLOOD) == 7
    stage.drain()
    assert {event.completion_tokens for name, event in stage.finished().items() if name != "light"} == {12}
    assert stage.scheduler.counters.preemptions == 1


def test_a_domain_above_its_share_admits_nothing_while_another_waits() -> None:
    """Of four places, two go to the domain that sent first and far more."""
    stage = Stage(max_running=4)
    crowd(stage, 20)
    crowd(stage, 3, LIGHT)

    stage.step()

    assert (running(stage, FLOOD), running(stage, LIGHT)) == (2, 2)


def test_two_domains_at_their_shares_take_nothing_from_each_other() -> None:
    """With more waiting on both sides, nothing is preempted."""
    stage = Stage(max_running=4)
    crowd(stage, 10)
    crowd(stage, 10, LIGHT)

    stage.drain()

    assert len(stage.finished()) == 20
    assert stage.scheduler.counters.preemptions == 0


def test_places_that_nobody_else_wants_are_used() -> None:
    """A domain that wants less than its share leaves the rest to the others."""
    stage = Stage(max_running=4)
    crowd(stage, 10)
    crowd(stage, 1, LIGHT)

    stage.step()

    assert (running(stage, FLOOD), running(stage, LIGHT)) == (3, 1)


def test_a_higher_tier_takes_no_place_from_a_domain_within_its_share() -> None:
    """Priority requests of a domain above its share do not preempt another domain's flex request."""
    stage = Stage(max_running=4, host=40)
    crowd(stage, 3, max_tokens=20)
    crowd(stage, 1, LIGHT, max_tokens=20, tier=ServiceTier.FLEX)
    stage.step()
    stage.submit("flood urgent", 3, domain=FLOOD, tier=ServiceTier.PRIORITY)

    stage.step()

    assert "flood urgent" in stage.scheduler.running_ids
    assert running(stage, LIGHT) == 1


def test_a_share_grows_with_the_weight() -> None:
    """Of eight places, a domain of weight three gets six."""
    stage = Stage(max_running=8)
    crowd(stage, 20)
    crowd(stage, 20, LIGHT, weight=3.0)

    stage.step()

    assert (running(stage, FLOOD), running(stage, LIGHT)) == (2, 6)


def test_pages_for_a_flood_are_taken_from_the_flood() -> None:
    """If running requests outgrow the device, the request of the domain within its share is not the one offloaded."""
    stage = Stage(pages=CONTEXT // PAGE + 2, host=60, max_running=4)
    crowd(stage, 3, max_tokens=30)
    stage.step()
    stage.submit("light", 3, domain=LIGHT, max_tokens=12)
    stage.step()

    while "light" not in stage.finished():
        assert "light" in stage.scheduler.running_ids
        stage.step()

    assert stage.scheduler.counters.preemptions > 0


def test_a_light_prefill_does_not_wait_for_a_flood_of_prefills() -> None:
    """A short prompt is computed before four long ones of another domain that came first."""
    stage = Stage(pages=100, budget=8)
    for number in range(4):
        stage.submit(f"flood {number}", [30 + number] * 30, domain=FLOOD)
    stage.step()
    stage.submit("light", 6, domain=LIGHT)

    plan = stage.step()

    assert plan is not None
    assert [piece.request_id for piece in plan.slices if piece.samples] == ["light"]


def test_a_flood_of_prefills_is_computed_though_another_domain_never_pauses() -> None:
    """What has waited for long goes before what has just come, though its domain holds more places."""
    stage = Stage(pages=100, budget=8)
    for number in range(4):
        stage.submit(f"flood {number}", [30 + number] * 30, domain=FLOOD, max_tokens=1)

    for number in range(100):
        stage.clock.advance(1)
        stage.submit(f"light {number}", [10 + number % 80] * 8, domain=LIGHT, max_tokens=1)
        stage.step()

    assert sum(name.startswith("flood") for name in stage.finished()) == 4


def test_a_domain_fills_only_its_part_of_the_queue() -> None:
    """Above its part, in requests, its next request is refused with a time to retry; another domain's is not."""
    stage = Stage(max_running=1, max_waiting=4, waiting_share=0.5)
    crowd(stage, 3)

    with pytest.raises(CapacityContended, match="3 requests") as refusal:
        stage.submit("more", domain=FLOOD)
    crowd(stage, 1, LIGHT)

    assert (refusal.value.code, refusal.value.status) == ("queue_full", 429)
    assert refusal.value.retry_after_s
    assert stage.scheduler.num_waiting == 4


def test_a_domain_fills_only_its_part_of_the_queue_in_tokens() -> None:
    """Two long prompts are too many, a short one fits, and the first may be of any length."""
    stage = Stage(max_waiting_tokens=40, waiting_share=0.5)
    stage.submit("first", 30, domain=FLOOD)

    with pytest.raises(CapacityContended):
        stage.submit("second", 3, domain=FLOOD)
    stage.submit("other", 6, domain=LIGHT)

    assert stage.scheduler.num_waiting == 2


def test_a_full_queue_makes_room_for_a_light_domain() -> None:
    """The last request of the domain with most waiting ends with 429 `queue_full`, and the newcomer waits."""
    stage = Stage(max_running=1, max_waiting=4, waiting_share=1.0)
    crowd(stage, 5)

    stage.submit("light", domain=LIGHT)

    (error,) = stage.errors().values()
    assert stage.errors().keys() == {"flood 4"}
    assert isinstance(error, CapacityContended)
    assert error.code == "queue_full"
    assert error.retry_after_s
    stage.drain()
    assert len(stage.finished()) == 5


def test_a_full_queue_of_tokens_makes_room_as_well() -> None:
    """Only as many of the flood's requests go as the newcomer's prompt needs."""
    stage = Stage(max_waiting_tokens=40, waiting_share=1.0)
    for name in ("one", "two", "three", "four"):
        stage.submit(name, 10, domain=FLOOD)

    stage.submit("light", 12, domain=LIGHT)

    assert stage.errors().keys() == {"three", "four"}


def test_the_newcomer_is_refused_if_nobody_has_more_waiting() -> None:
    """Two domains with as many waiting do not displace each other's requests."""
    stage = Stage(max_running=1, max_waiting=3, waiting_share=1.0)
    crowd(stage, 2)
    crowd(stage, 2, LIGHT)

    for domain in (FLOOD, LIGHT):
        with pytest.raises(CapacityContended):
            stage.submit("more", domain=domain)

    assert stage.errors() == {}


def test_a_request_that_has_run_is_not_displaced() -> None:
    """A request that was offloaded keeps its answer: another of its domain makes room."""
    stage = Stage(max_running=1, host=40, max_waiting=2, waiting_share=1.0)
    stage.submit("streams", 3, domain=FLOOD, tier=ServiceTier.FLEX, max_tokens=9)
    stage.step()
    stage.submit("urgent", 3, domain=FLOOD, tier=ServiceTier.PRIORITY, max_tokens=9)
    stage.step()
    stage.submit("new", 3, domain=FLOOD, tier=ServiceTier.PRIORITY)

    stage.submit("light", 3, domain=LIGHT)
    stage.drain()

    assert stage.errors().keys() == {"new"}
    assert stage.finished()["streams"].completion_tokens == 9


arrivals = st.lists(
    st.tuples(st.sampled_from([b"a", b"a", b"a", b"b", b"c"]), st.integers(1, 20), st.integers(0, 2)), max_size=40
)


@settings(max_examples=examples(60))
@given(arrivals, st.sampled_from([0, 30]), st.sampled_from([0.5, 1.0]))
def test_every_request_ends_once_and_no_light_domain_is_refused_for_a_flood(
    sent: list[tuple[bytes, int, int]], host: int, share: float
) -> None:
    """A request with nothing of its domain in the queue is refused only if no domain has two that could make room."""
    stage = Stage(host=host, max_running=3, max_waiting=6, waiting_share=share)
    owners: dict[str, bytes] = {}
    for number, (domain, length, steps) in enumerate(sent):
        ended = {*stage.finished(), *stage.errors(), *stage.scheduler.running_ids}
        waiting = {name: owner for name, owner in owners.items() if name not in ended}
        never_ran = [owner for name, owner in waiting.items() if name not in stage.admitted()]
        try:
            stage.submit(str(number), [10 + number] * length, domain=IsolationDomain(domain))
            owners[str(number)] = domain
        except CapacityContended:
            assert domain in waiting.values() or all(never_ran.count(owner) < 2 for owner in never_ran)
        for _ in range(steps):
            stage.step()

    stage.drain()

    assert sorted([*stage.finished(), *stage.errors()]) == sorted(owners)
