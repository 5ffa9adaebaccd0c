"""The scheduler without torch, with a runner that always answers one token and a clock that stands still."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason, PromptAdmitted, RequestFinished
from graftwork.engine.core.prefix_keys import TokenCounts
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
)
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.stage import CONTEXT, EOS, PAGE, Stage
from tests.hypothesis_profiles import examples


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    """No step exceeds the token budget, and a decoding request gets a token in every step of a long prefill."""
    stage = Stage(budget=8)
    stage.submit("short", 3, max_tokens=10)
    stage.step()

    stage.submit("long", 30)
    plans = [stage.step() for _ in range(5)]

    assert all(plan is not None and plan.num_tokens <= 8 for plan in plans)
    assert all(any(piece.request_id == "short" for piece in plan.slices) for plan in plans if plan)
    chunks = [piece for plan in plans if plan for piece in plan.slices if piece.request_id == "long"]
    assert [(piece.start, piece.end) for piece in chunks] == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]
    assert [bool(piece.samples) for piece in chunks] == [False] * 4 + [True]


def test_a_request_ends_at_eos_at_its_limit_or_at_the_context() -> None:
    """EOS ends a request with `stop`, unless it is ignored; max_tokens and a full context end it with `length`."""
    stage = Stage()
    stage.submit("eos")
    stage.submit("ignored", max_tokens=2, sampling={"ignore_eos": True})
    stage.submit("full", CONTEXT - 3, max_tokens=50)
    for _ in range(8):
        stage.step(token=EOS)
    finished = stage.finished()

    assert finished["eos"] == RequestFinished(FinishReason.STOP, 1)
    assert finished["ignored"] == RequestFinished(FinishReason.LENGTH, 2)
    assert finished["full"] == RequestFinished(FinishReason.STOP, 1)


def test_generation_stops_where_the_context_is_full() -> None:
    """A prompt that leaves room for three tokens gets three, even with a larger max_tokens."""
    stage = Stage()
    stage.submit("full", CONTEXT - 3, max_tokens=50)
    while stage.step() is not None:
        pass

    assert stage.finished()["full"] == RequestFinished(FinishReason.LENGTH, 3)


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    """EOS and the request's own stop tokens are banned until min_tokens are generated."""
    stage = Stage()
    stage.submit("patient", max_tokens=5, sampling={"min_tokens": 2, "stop_token_ids": (33,)})
    bans = []
    for _ in range(4):
        plan = stage.step()
        assert plan is not None
        (spec,) = plan.slices[0].samples
        bans.append(spec.banned_token_ids)

    assert bans == [(EOS, 33), (EOS, 33), (), ()]


def test_everything_is_released_when_requests_end_or_are_cancelled() -> None:
    """After requests end or are cancelled in any phase, no page is active and no adapter is pinned."""
    stage = Stage(max_running=2)
    stage.shelf.ready.add("sha256:a")
    for name in ("ends", "cancelled running", "cancelled waiting"):
        stage.submit(name, 9, adapters=(AdapterUse("sha256:a"),))
    stage.step()

    stage.scheduler.cancel(RequestId("cancelled running"))
    stage.scheduler.cancel(RequestId("cancelled waiting"))
    stage.scheduler.cancel(RequestId("never was"))
    while stage.step() is not None:
        pass

    assert set(stage.finished()) == {"ends"}
    assert stage.pool.active_pages == 0
    assert stage.shelf.pins == {"sha256:a": 0}
    assert stage.scheduler.num_running == stage.scheduler.num_waiting == 0


def test_a_cancelled_request_holds_nothing_and_its_prompt_stays_cached() -> None:
    """A request cancelled while it decodes holds no page, and the same prompt later finds its whole pages cached."""
    stage = Stage()
    prompt = [50 + n for n in range(20)]
    stage.submit("gone", prompt, max_tokens=10)
    for _ in range(4):
        stage.step()
    assert stage.pool.active_pages > 0

    stage.scheduler.cancel(RequestId("gone"))
    stage.submit("again", prompt)
    stage.step()

    assert stage.pool.active_pages == 5
    report = next(output.event for output in stage.outputs if output.request_id == "again")
    assert isinstance(report, PromptAdmitted)
    assert report.cache.device_tokens == len(prompt) - PAGE


def test_without_pages_the_latest_is_preempted_and_both_end_with_all_their_tokens() -> None:
    """If two requests outgrow the device together, the later one is offloaded to the host and loaded again."""
    stage = Stage(pages=CONTEXT // PAGE, host=20)
    stage.submit("early", 14, max_tokens=20)
    stage.clock.advance(1)
    stage.submit("late", [60 + n for n in range(14)], max_tokens=20)

    stage.drain()

    assert {name: event.completion_tokens for name, event in stage.finished().items()} == {"early": 20, "late": 20}
    assert stage.admitted() == ["early", "late"]
    assert stage.scheduler.counters.preemptions > 0
    assert stage.lab.copies.moved[TransferKind.SAVE] > 0
    computed = [
        piece.start + index
        for plan in stage.plans
        for piece in plan.slices
        if piece.request_id == "late"
        for index in range(len(piece.token_ids))
    ]
    again = len(computed) - len(set(computed))
    assert again <= PAGE * stage.scheduler.counters.preemptions, "what was offloaded was computed again"


def test_a_higher_tier_preempts_a_lower_one_which_continues_later() -> None:
    """With one place in the batch, a priority request preempts a flex one, which loses no token."""
    stage = Stage(max_running=1, host=20)
    stage.submit("flex", 9, max_tokens=10, tier=ServiceTier.FLEX)
    stage.step()
    stage.submit("priority", [60 + n for n in range(9)], max_tokens=3, tier=ServiceTier.PRIORITY)

    stage.drain()

    assert list(stage.finished()) == ["priority", "flex"]
    assert stage.finished()["flex"].completion_tokens == 10


def test_an_adapter_that_is_not_ready_delays_no_other_request() -> None:
    """Requests behind one whose adapter is still loading are admitted; that one follows when the adapter is ready."""
    stage = Stage()
    stage.submit("cold", adapters=(AdapterUse("sha256:a"),))
    stage.submit("base")
    stage.step()
    assert stage.admitted() == ["base"]

    stage.shelf.ready.add("sha256:a")
    stage.step()

    assert stage.admitted() == ["base", "cold"]


def test_a_failed_load_ends_the_requests_that_wait_for_it() -> None:
    """All waiting requests with the adapter get the error; other requests stay."""
    stage = Stage()
    for name in ("one", "two"):
        stage.submit(name, adapters=(AdapterUse("sha256:a"),))
    stage.submit("other", adapters=(AdapterUse("sha256:b"),))

    failed = stage.scheduler.fail_waiting_for("sha256:a", NotFound("gone"))

    assert [output.request_id for output in failed] == ["one", "two"]
    assert stage.scheduler.num_waiting == 1


def test_small_requests_do_not_overtake_one_that_lacks_pages() -> None:
    """The first request in the queue keeps its place until enough pages are free."""
    stage = Stage(pages=CONTEXT // PAGE, max_running=8)
    stage.submit("first", 20, max_tokens=4)
    stage.step()
    stage.submit("large", [60 + n % 30 for n in range(30)], max_tokens=8)
    stage.submit("small", [5, 6], max_tokens=2)
    stage.step()
    assert stage.admitted() == ["first"]

    while stage.step() is not None:
        pass

    assert stage.admitted() == ["first", "large", "small"]
    assert set(stage.finished()) == {"first", "large", "small"}


def test_a_full_queue_refuses_with_the_seconds_to_wait() -> None:
    """A request beyond the free places and the queue limit is refused with a retry-after, and changes nothing."""
    stage = Stage(max_running=1, max_waiting=1)
    stage.submit("one")
    stage.submit("two")

    with pytest.raises(CapacityContended) as refusal:
        stage.submit("three")

    assert refusal.value.retry_after_s
    assert stage.scheduler.num_waiting == 2


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidRequest),
        ([5] * CONTEXT, ContextLengthExceeded),
        ([5, 100], InvalidRequest),
        ([5, -1], InvalidRequest),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(prompt: list[int], error: type[Exception]) -> None:
    """A prompt is refused if it is empty, longer than the context, or outside the vocabulary."""
    stage = Stage()

    with pytest.raises(error):
        stage.submit("bad", prompt)

    assert stage.scheduler.num_waiting == 0


def test_the_context_error_names_both_numbers() -> None:
    """The message has the tokens of the prompt and of the context."""
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT + 2} tokens.*{CONTEXT} tokens"):
        Stage().submit("bad", [5] * (CONTEXT + 2))


def test_a_request_id_is_served_once_at_a_time() -> None:
    """The id of a request that is still served is a conflict."""
    stage = Stage()
    stage.submit("same")

    with pytest.raises(Conflict):
        stage.submit("same")


def test_tiers_go_first_and_ageing_lifts_what_waited() -> None:
    """Priority goes before default and flex; a flex request that has waited long enough goes before newer ones."""
    stage = Stage(max_running=1)
    stage.submit("running", max_tokens=2)
    stage.step()
    stage.submit("flex", tier=ServiceTier.FLEX)
    stage.clock.advance(25)
    stage.submit("default")
    stage.submit("priority", tier=ServiceTier.PRIORITY)

    while stage.step() is not None:
        pass

    assert stage.admitted() == ["running", "flex", "priority", "default"]


def test_two_domains_share_alike_however_much_one_sends() -> None:
    """Twenty requests of one domain and four of another are admitted in turns while both wait."""
    stage = Stage(max_running=1)
    for number in range(20):
        stage.submit(f"flood {number}", domain=IsolationDomain(b"flood"))
    for number in range(4):
        stage.submit(f"calm {number}", domain=IsolationDomain(b"calm"))

    while len(stage.admitted()) < 8:
        stage.step()

    assert sum(name.startswith("calm") for name in stage.admitted()[:8]) >= 3


def test_idling_earns_no_credit() -> None:
    """A domain that comes late does not get all places to catch up with domains that were served before."""
    stage = Stage(max_running=1)
    for number in range(30):
        stage.submit(f"early {number}", domain=IsolationDomain(b"early"))
    while len(stage.admitted()) < 10:
        stage.step()
    for number in range(10):
        stage.submit(f"late {number}", domain=IsolationDomain(b"late"))

    while len(stage.admitted()) < 18:
        stage.step()

    assert 3 <= sum(name.startswith("late") for name in stage.admitted()[10:]) <= 5


def test_weight_buys_a_larger_share() -> None:
    """A domain of weight three gets about three times as many admissions as one of weight one."""
    stage = Stage(max_running=1)
    for number in range(30):
        stage.submit(f"heavy {number}", domain=IsolationDomain(b"heavy"), weight=3.0)
        stage.submit(f"light {number}", domain=IsolationDomain(b"light"))

    while len(stage.admitted()) < 20:
        stage.step()

    assert 13 <= sum(name.startswith("heavy") for name in stage.admitted()) <= 17


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
    stage = Stage(pages=CONTEXT // PAGE, host=host, budget=9, max_running=5)
    cancelled: set[str] = set()
    for number, (length, max_tokens, family, name) in enumerate(arrivals):
        prompt = [10 + family * 20 + n % 20 for n in range(length)]
        domain = IsolationDomain(name)
        stage.submit(str(number), prompt, max_tokens=max_tokens, domain=domain)
        for _ in range(data.draw(st.integers(0, 3))):
            stage.step()
        victim = data.draw(st.integers(0, 4 * len(arrivals)))
        if victim <= number and str(victim) not in stage.finished():
            stage.scheduler.cancel(RequestId(str(victim)))
            cancelled.add(str(victim))

    stage.drain()

    assert set(stage.finished()) | cancelled == {str(number) for number in range(len(arrivals))}
    assert stage.pool.active_pages == 0
    assert stage.scheduler.num_waiting == 0


def test_a_prompt_is_cached_before_its_answer_ends() -> None:
    """A request finds the pages of an equal prompt while that one still decodes."""
    stage = Stage()
    stage.submit("first", 13, max_tokens=20)
    stage.step()
    stage.submit("second", 13)
    stage.step()
    events = [output.event for output in stage.outputs if output.request_id == "second"]

    assert isinstance(events[0], PromptAdmitted)
    assert events[0].cache.cached_tokens == 12


def test_two_requests_that_computed_one_prefix_share_one_copy_of_it() -> None:
    """When two requests have computed the same two pages, one copy is released at once, and all can be evicted later."""
    stage = Stage(budget=40)
    prefix = list(range(10, 18))
    stage.submit("short", [*prefix, 30, 31, 32, 33], max_tokens=2)
    stage.submit("long", [*prefix, 40, 41, 42, 43], max_tokens=20)

    stage.step()
    held = stage.pool.active_pages
    while "short" not in stage.finished():
        stage.step()
    idle = stage.pool.idle_pages

    assert held == 2 + 1 + 1
    assert "long" not in stage.finished()
    page_store = stage.lab.kv_cache.page_store
    assert page_store.make_room(Tier.DEVICE, stage.pool.free_pages + idle, b"tenant") == stage.pool.free_pages
    assert stage.pool.idle_pages == 0
    stage.scheduler.check_integrity()


def test_penalised_rows_carry_their_history() -> None:
    """A row with penalties carries the generated tokens, and the prompt too with a repetition penalty; others carry none."""
    stage = Stage()
    stage.submit("all", [5, 6, 5], sampling={"repetition_penalty": 1.5})
    stage.submit("made", [5, 6, 5], sampling={"presence_penalty": 1.0})
    stage.submit("plain", [5, 6, 5])
    for _ in range(2):
        stage.step(token=9)

    plan = stage.scheduler.plan()

    assert plan is not None
    seen = {}
    for piece in plan.slices:
        (spec,) = piece.samples
        counted = TokenCounts()
        if spec.history is not None:
            spec.history.copy_to(counted)
        seen[piece.request_id] = dict(zip(counted.token_ids, counted.counts, strict=True))
    assert seen == {"all": {5: 0, 6: 0, 9: 2}, "made": {9: 2}, "plain": {}}
