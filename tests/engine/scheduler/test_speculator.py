"""Tests of the scheduler with drafts, over a model that is a function of the text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import RequestFinished, RequestOutput, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.cost_model import PrefillCost
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.speculator import DraftLimits, Speculator, accepted_prefix
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import CONTEXT, EOS, PAGE, ManualAdapterProvider
from tests.engine.tagged_kv_cache import FixedLeases, TaggedKvCache
from tests.hypothesis_profiles import examples


def model_says(text: list[int]) -> int:
    """The next token: cycles through six tokens, sometimes leaves the cycle, and sometimes ends."""
    if sum(text[-3:]) % 11 == 0:
        return EOS if len(text) % 7 == 0 else 20 + text[-1] % 3
    return 10 + (text[-1] + 1) % 6


def answer_of(prompt: list[int], max_tokens: int) -> list[int]:
    """The answer, token by token."""
    text = list(prompt)
    while len(text) < min(len(prompt) + max_tokens, CONTEXT):
        text.append(model_says(text))
        if text[-1] == EOS:
            break
    return text[len(prompt) :]


class SpeculatorDriver:
    """A scheduler with drafts and few pages, and all its outputs."""

    def __init__(self, pages: int, budget: int, target_itl_s: float | None = None) -> None:
        self.cache = TaggedKvCache(device=pages, host=pages, page_tokens=PAGE, context=CONTEXT // PAGE)
        clock = self.cache.clock
        limits = SchedulerLimits(PAGE, budget, 4, 100, CONTEXT, 100, frozenset({EOS}), target_itl_s=target_itl_s)
        self.pool = self.cache.kv_cache.page_store.device
        scopes = CacheScopes("sha256:model", "float32")
        self.speculator = Speculator(DraftLimits(7, 1 << 16), clock)
        self.scheduler = Scheduler(
            limits,
            self.cache.kv_cache,
            SessionCache(self.cache.kv_cache, scopes, FixedLeases(), clock),
            ManualAdapterProvider(),
            scopes,
            clock=clock,
            speculator=self.speculator,
        )
        self.texts: dict[str, list[int]] = {}
        self.made: dict[str, list[int]] = {}
        self.finished: dict[str, RequestFinished] = {}

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, prediction: list[int], *, uses_lookups: bool = True
    ) -> None:
        self.texts[name], self.made[name] = list(prompt), []
        self.scheduler.submit(
            EngineRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=max_tokens),
                domain=IsolationDomain(b"tenant"),
                prediction_token_ids=tuple(prediction),
                uses_lookups=uses_lookups,
            )
        )

    def step(self) -> StepPlan | None:
        self._record(self.scheduler.admit())
        plan = self.scheduler.plan()
        if plan is not None:
            self._record(self.scheduler.absorb(self.scheduler.land(plan), self._run(plan)))
        while self.cache.copies.under_way:
            self._record(self.scheduler.finish_transfer(self.cache.copies.fire()))
        self.scheduler.check_integrity()
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        """Answers each sampled row by the text and the drafts before it. Asserts that known rows hold known tokens."""
        choices: dict[RequestId, tuple[int, ...]] = {}
        for piece in plan.slices:
            text, drafts = self.texts[piece.request_id], piece.draft_token_ids
            known = piece.token_ids[: len(piece.token_ids) - len(drafts)]
            assert list(known) == text[piece.start : piece.known_end]
            assert [spec.position for spec in piece.samples] == list(range(piece.known_end, piece.end + 1))[
                : len(piece.samples)
            ]
            assert len(piece.pages) == -(-piece.end // PAGE)
            if piece.samples:
                rows = range(len(drafts) + 1)
                choices[piece.request_id] = tuple(model_says([*text, *drafts[:row]]) for row in rows)
        return StepResult(choices)

    def _record(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, TokensGenerated):
                self.texts[output.request_id] += output.event.token_ids
                self.made[output.request_id] += output.event.token_ids
            elif isinstance(output.event, RequestFinished):
                self.finished[output.request_id] = output.event


def test_a_request_without_lookups_has_no_drafts_and_the_same_answer() -> None:
    """With suspended lookups nothing is drafted, from the prediction neither, and every token is as before."""
    made, verified = [], []
    prompt = [10, 11, 12, 13, 14, 15, 10, 11, 12]
    for uses_lookups in (True, False):
        driver = SpeculatorDriver(pages=30, budget=24)
        driver.submit("one", prompt, 25, answer_of(prompt, 25), uses_lookups=uses_lookups)
        while driver.scheduler.num_running + driver.scheduler.num_waiting:
            driver.step()
        made.append(driver.made["one"])
        verified.append(driver.speculator.counts.drafted)

    assert made[0] == made[1] == answer_of(prompt, 25)
    assert verified[0] > 0
    assert verified[1] == 0


requests = st.tuples(
    st.lists(st.integers(10, 15), min_size=1, max_size=CONTEXT - 1),
    st.integers(1, 30),
    st.lists(st.integers(10, 22), max_size=20),
)


@settings(max_examples=examples(80))
@given(st.lists(requests, max_size=12), st.integers(4, 24), st.integers(CONTEXT // PAGE, 30), st.data())
def test_every_answer_is_what_the_model_gives(
    arrivals: list[tuple[list[int], int, list[int]]], budget: int, pages: int, data: st.DataObject
) -> None:
    """With few pages, small budgets and cancellations at any time, tokens and ends are the model's and no page is lost."""
    driver = SpeculatorDriver(pages, budget)
    cancelled: set[str] = set()
    for number, (prompt, max_tokens, prediction) in enumerate(arrivals):
        driver.submit(str(number), prompt, max_tokens, prediction)
        for _ in range(data.draw(st.integers(0, 3))):
            plan = driver.step()
            assert plan is None or plan.num_tokens <= budget
        victim = str(data.draw(st.integers(0, 4 * len(arrivals))))
        if victim in driver.texts and victim not in driver.finished:
            driver.scheduler.cancel(RequestId(victim))
            cancelled.add(victim)

    while driver.scheduler.num_running + driver.scheduler.num_waiting:
        driver.step()

    for number, (prompt, max_tokens, prediction) in enumerate(arrivals):
        if str(number) in cancelled:
            continue
        ended = driver.finished[str(number)]
        assert driver.made[str(number)] == answer_of(prompt, max_tokens)
        assert ended.completion_tokens == len(driver.made[str(number)])
        report = ended.drafts
        assert report.accepted_tokens <= min(report.drafted_tokens, ended.completion_tokens)
        assert report.accepted_prediction_tokens + report.rejected_prediction_tokens == len(prediction)
    assert driver.pool.active_pages == 0
    driver.speculator.check_integrity()


def test_a_repetitive_answer_takes_fewer_steps_than_tokens() -> None:
    """The answer of a model that cycles is drafted right after the first cycle."""
    driver = SpeculatorDriver(pages=30, budget=24)
    driver.submit("round", [10, 11], 30, [])

    plans = []
    while (plan := driver.step()) is not None:
        plans.append(plan)

    made = len(driver.made["round"])
    report = driver.finished["round"].drafts
    assert len(plans) == made - report.accepted_tokens
    assert report.accepted_tokens >= made // 3


def test_no_prompt_waits_for_drafts() -> None:
    """While a prompt gets a page a step, because decoding takes the time that the target allows, nothing is drafted."""
    driver = SpeculatorDriver(pages=60, budget=24, target_itl_s=0.001)
    driver.scheduler.step_times.costs.start_from(PrefillCost(token_s=1.0, attended_s=0.0, fixed_s=1.0))
    driver.submit("round", [10, 11], 30, [])
    while not driver.speculator.counts.drafted:
        assert driver.step() is not None

    driver.submit("long", list(range(10, 16)) * 5, 1, [])
    plans = [driver.step() for _ in range(30 // PAGE - 1)]
    while driver.step() is not None:
        pass

    assert all(plan is not None and len(plan.slices) == 2 for plan in plans)
    assert not any(piece.draft_token_ids for plan in plans if plan is not None for piece in plan.slices)
    assert driver.made["round"] == answer_of([10, 11], 30)


def test_only_an_accepted_draft_is_followed() -> None:
    """Sampled tokens are valid up to and with the first that differs from the draft."""
    assert accepted_prefix((4, 5, 6), (4, 5, 9, 7)) == (4, 5, 9)
    assert accepted_prefix((4, 5), (4, 5, 6)) == (4, 5, 6)
    assert accepted_prefix((4,), (3, 9)) == (3,)
    assert accepted_prefix((), (8,)) == (8,)
