"""Tests of the scheduler without torch, with a runner that always answers one token: steps, ends, and cached prompts."""

from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason, PromptAdmitted, RequestFinished
from graftwork.engine.core.prefix_keys import TokenCounts
from graftwork.engine.core.tiers import Tier
from tests.engine.scheduler.scheduler_driver import CONTEXT, EOS, SchedulerDriver


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    """No step exceeds the token budget, and a decoding request gets a token in every step of a long prefill."""
    driver = SchedulerDriver(budget=8)
    driver.submit("short", 3, max_tokens=10)
    driver.step()

    driver.submit("long", 30)
    plans = [driver.step() for _ in range(5)]

    assert all(plan is not None and plan.num_tokens <= 8 for plan in plans)
    assert all(any(piece.request_id == "short" for piece in plan.slices) for plan in plans if plan)
    chunks = [piece for plan in plans if plan for piece in plan.slices if piece.request_id == "long"]
    assert [(piece.start, piece.end) for piece in chunks] == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]
    assert [bool(piece.samples) for piece in chunks] == [False] * 4 + [True]


def test_a_request_ends_at_eos_at_its_limit_or_at_the_context() -> None:
    """EOS ends a request with `stop`, unless it is ignored; max_tokens and a full context end it with `length`."""
    driver = SchedulerDriver()
    driver.submit("eos")
    driver.submit("ignored", max_tokens=2, sampling={"ignore_eos": True})
    driver.submit("full", CONTEXT - 3, max_tokens=50)
    for _ in range(8):
        driver.step(token=EOS)
    finished = driver.finished()

    assert finished["eos"] == RequestFinished(FinishReason.STOP, 1)
    assert finished["ignored"] == RequestFinished(FinishReason.LENGTH, 2)
    assert finished["full"] == RequestFinished(FinishReason.STOP, 1)


def test_generation_stops_where_the_context_is_full() -> None:
    """A prompt that leaves room for three tokens gets three, even with a larger max_tokens."""
    driver = SchedulerDriver()
    driver.submit("full", CONTEXT - 3, max_tokens=50)
    while driver.step() is not None:
        pass

    assert driver.finished()["full"] == RequestFinished(FinishReason.LENGTH, 3)


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    """EOS and the request's own stop tokens are banned until min_tokens are generated."""
    driver = SchedulerDriver()
    driver.submit("patient", max_tokens=5, sampling={"min_tokens": 2, "stop_token_ids": (33,)})
    bans = []
    for _ in range(4):
        plan = driver.step()
        assert plan is not None
        (spec,) = plan.slices[0].samples
        bans.append(spec.banned_token_ids)

    assert bans == [(EOS, 33), (EOS, 33), (), ()]


requests = st.tuples(
    st.integers(1, CONTEXT - 1), st.integers(1, 20), st.integers(0, 3), st.sampled_from([b"x", b"y", b"z"])
)


def test_a_prompt_is_cached_before_its_answer_ends() -> None:
    """A request finds the pages of an equal prompt while that one still decodes."""
    driver = SchedulerDriver()
    driver.submit("first", 13, max_tokens=20)
    driver.step()
    driver.submit("second", 13)
    driver.step()
    events = [output.event for output in driver.outputs if output.request_id == "second"]

    assert isinstance(events[0], PromptAdmitted)
    assert events[0].cache.cached_tokens == 12


def test_two_requests_that_computed_one_prefix_share_one_copy_of_it() -> None:
    """When two requests have computed the same two pages, one copy is released at once, and all can be evicted later."""
    driver = SchedulerDriver(budget=40)
    prefix = list(range(10, 18))
    driver.submit("short", [*prefix, 30, 31, 32, 33], max_tokens=2)
    driver.submit("long", [*prefix, 40, 41, 42, 43], max_tokens=20)

    driver.step()
    held = driver.pool.active_pages
    while "short" not in driver.finished():
        driver.step()
    idle = driver.pool.idle_pages

    assert held == 2 + 1 + 1
    assert "long" not in driver.finished()
    page_store = driver.cache.kv_cache.page_store
    assert page_store.make_room(Tier.DEVICE, driver.pool.free_pages + idle, b"tenant") == driver.pool.free_pages
    assert driver.pool.idle_pages == 0
    driver.scheduler.check_integrity()


def test_penalised_rows_carry_their_history() -> None:
    """A row with penalties carries the generated tokens, and the prompt too with a repetition penalty; others carry none."""
    driver = SchedulerDriver()
    driver.submit("all", [5, 6, 5], sampling={"repetition_penalty": 1.5})
    driver.submit("made", [5, 6, 5], sampling={"presence_penalty": 1.0})
    driver.submit("plain", [5, 6, 5])
    for _ in range(2):
        driver.step(token=9)

    plan = driver.scheduler.plan()

    assert plan is not None
    seen = {}
    for piece in plan.slices:
        (spec,) = piece.samples
        counted = TokenCounts()
        if spec.history is not None:
            spec.history.copy_to(counted)
        seen[piece.request_id] = dict(zip(counted.token_ids, counted.counts, strict=True))
    assert seen == {"all": {5: 0, 6: 0, 9: 2}, "made": {9: 2}, "plain": {}}
