"""The scheduler without torch, with a runner that always answers one token and a clock that stands still."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason, PromptAdmitted, RequestFinished, RequestOutput
from graftwork.engine.core.prefix_keys import TokenCounts
from graftwork.engine.core.requests import AdapterUse, EngineRequest, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    GraftworkError,
    InvalidRequest,
    NotFound,
)
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.tagged_kv_cache import FixedLeases, TaggedKvCache
from tests.hypothesis_profiles import examples

PAGE = 4
CONTEXT = 40
EOS = 1


class ManualAdapterProvider:
    """An AdapterProvider whose adapters become ready when the test says so."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.pins: dict[str, int] = {}

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """Does nothing: the test makes adapters ready."""

    def is_ready(self, digest: str) -> bool:
        return digest in self.ready

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        return None

    def pin(self, digest: str) -> None:
        self.pins[digest] = self.pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1


class SchedulerDriver:
    """A scheduler with its KV cache, and all its outputs."""

    def __init__(
        self, *, pages: int = 40, host: int = 0, budget: int = 16, max_running: int = 8, max_waiting: int = 100
    ) -> None:
        self.cache = TaggedKvCache(device=pages, host=host, page_tokens=PAGE, context=CONTEXT // PAGE)
        self.clock = self.cache.clock
        self.pool = self.cache.kv_cache.page_store.device
        self.adapters = ManualAdapterProvider()
        limits = SchedulerLimits(PAGE, budget, max_running, max_waiting, CONTEXT, 100, frozenset({EOS}))
        scopes = CacheScopes("sha256:model", "float32")
        session_cache = SessionCache(self.cache.kv_cache, scopes, FixedLeases(), self.clock)
        self.scheduler = Scheduler(
            limits, self.cache.kv_cache, session_cache, self.adapters, scopes, clock=self.clock, seeds=Random(0)
        )
        self.outputs: list[RequestOutput] = []
        self.plans: list[StepPlan] = []

    def submit(self, name: str, prompt: int | list[int] = 5, max_tokens: int = 4, **options: object) -> None:
        tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        sampling_options = options.pop("sampling", {})
        assert isinstance(sampling_options, dict)
        self.scheduler.submit(
            EngineRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(tokens),
                sampling=SamplingParams(max_tokens=max_tokens, **sampling_options),
                **{"domain": IsolationDomain(b"tenant"), **options},  # type: ignore[arg-type]
            )
        )

    def step(self, token: int = 7) -> StepPlan | None:
        """Run one step, and then finish the copies that it started."""
        self.outputs += self.scheduler.admit()
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            chosen = {piece.request_id: (token,) for piece in plan.slices if piece.samples}
            self.outputs += self.scheduler.absorb(plan, StepResult(chosen))
        self.scheduler.check_integrity()
        while self.cache.copies.under_way:
            self.outputs += self.scheduler.finish_transfer(self.cache.copies.fire())
        return plan

    def drain(self) -> None:
        """Step until all requests have ended."""
        for _ in range(1000):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("nobody gets anywhere")

    def admitted(self) -> list[str]:
        return [output.request_id for output in self.outputs if isinstance(output.event, PromptAdmitted)]

    def finished(self) -> dict[str, RequestFinished]:
        events = ((output.request_id, output.event) for output in self.outputs)
        return {name: event for name, event in events if isinstance(event, RequestFinished)}


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


def test_an_adapter_that_is_not_ready_delays_no_other_request() -> None:
    """Requests behind one whose adapter is still loading are admitted; that one follows when the adapter is ready."""
    driver = SchedulerDriver()
    driver.submit("cold", adapters=(AdapterUse("sha256:a"),))
    driver.submit("base")
    driver.step()
    assert driver.admitted() == ["base"]

    driver.adapters.ready.add("sha256:a")
    driver.step()

    assert driver.admitted() == ["base", "cold"]


def test_a_failed_load_ends_the_requests_that_wait_for_it() -> None:
    """All waiting requests with the adapter get the error; other requests stay."""
    driver = SchedulerDriver()
    for name in ("one", "two"):
        driver.submit(name, adapters=(AdapterUse("sha256:a"),))
    driver.submit("other", adapters=(AdapterUse("sha256:b"),))

    failed = driver.scheduler.fail_waiting_for("sha256:a", NotFound("gone"))

    assert [output.request_id for output in failed] == ["one", "two"]
    assert driver.scheduler.num_waiting == 1


def test_small_requests_do_not_overtake_one_that_lacks_pages() -> None:
    """The first request in the queue keeps its place until enough pages are free."""
    driver = SchedulerDriver(pages=CONTEXT // PAGE, max_running=8)
    driver.submit("first", 20, max_tokens=4)
    driver.step()
    driver.submit("large", [60 + n % 30 for n in range(30)], max_tokens=8)
    driver.submit("small", [5, 6], max_tokens=2)
    driver.step()
    assert driver.admitted() == ["first"]

    while driver.step() is not None:
        pass

    assert driver.admitted() == ["first", "large", "small"]
    assert set(driver.finished()) == {"first", "large", "small"}


def test_a_full_queue_refuses_with_the_seconds_to_wait() -> None:
    """A request beyond the free places and the queue limit is refused with a retry-after, and changes nothing."""
    driver = SchedulerDriver(max_running=1, max_waiting=1)
    driver.submit("one")
    driver.submit("two")

    with pytest.raises(CapacityContended) as refusal:
        driver.submit("three")

    assert refusal.value.retry_after_s
    assert driver.scheduler.num_waiting == 2


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
    driver = SchedulerDriver()

    with pytest.raises(error):
        driver.submit("bad", prompt)

    assert driver.scheduler.num_waiting == 0


def test_the_context_error_names_both_numbers() -> None:
    """The message has the tokens of the prompt and of the context."""
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT + 2} tokens.*{CONTEXT} tokens"):
        SchedulerDriver().submit("bad", [5] * (CONTEXT + 2))


def test_a_request_id_is_served_once_at_a_time() -> None:
    """The id of a request that is still served is a conflict."""
    driver = SchedulerDriver()
    driver.submit("same")

    with pytest.raises(Conflict):
        driver.submit("same")


def test_tiers_go_first_and_ageing_lifts_what_waited() -> None:
    """Priority goes before default and flex; a flex request that has waited long enough goes before newer ones."""
    driver = SchedulerDriver(max_running=1)
    driver.submit("running", max_tokens=2)
    driver.step()
    driver.submit("flex", tier=ServiceTier.FLEX)
    driver.clock.advance(25)
    driver.submit("default")
    driver.submit("priority", tier=ServiceTier.PRIORITY)

    while driver.step() is not None:
        pass

    assert driver.admitted() == ["running", "flex", "priority", "default"]


def test_two_domains_share_alike_however_much_one_sends() -> None:
    """Twenty requests of one domain and four of another are admitted in turns while both wait."""
    driver = SchedulerDriver(max_running=1)
    for number in range(20):
        driver.submit(f"flood {number}", domain=IsolationDomain(b"flood"))
    for number in range(4):
        driver.submit(f"calm {number}", domain=IsolationDomain(b"calm"))

    while len(driver.admitted()) < 8:
        driver.step()

    assert sum(name.startswith("calm") for name in driver.admitted()[:8]) >= 3


def test_idling_earns_no_credit() -> None:
    """A domain that comes late does not get all places to catch up with domains that were served before."""
    driver = SchedulerDriver(max_running=1)
    for number in range(30):
        driver.submit(f"early {number}", domain=IsolationDomain(b"early"))
    while len(driver.admitted()) < 10:
        driver.step()
    for number in range(10):
        driver.submit(f"late {number}", domain=IsolationDomain(b"late"))

    while len(driver.admitted()) < 18:
        driver.step()

    assert 3 <= sum(name.startswith("late") for name in driver.admitted()[10:]) <= 5


def test_weight_buys_a_larger_share() -> None:
    """A domain of weight three gets about three times as many admissions as one of weight one."""
    driver = SchedulerDriver(max_running=1)
    for number in range(30):
        driver.submit(f"heavy {number}", domain=IsolationDomain(b"heavy"), weight=3.0)
        driver.submit(f"light {number}", domain=IsolationDomain(b"light"))

    while len(driver.admitted()) < 20:
        driver.step()

    assert 13 <= sum(name.startswith("heavy") for name in driver.admitted()) <= 17


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
