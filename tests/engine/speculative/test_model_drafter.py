"""When a draft model guesses: for whom, how far, and when it is left and tried again."""

from collections.abc import Callable
from random import Random

import pytest

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.speculative.draft import Draft, DraftSource, DraftSpan
from graftwork.engine.speculative.draft_budget import StepCost, budget_drafts
from graftwork.engine.speculative.draft_model import DraftContext, Guess
from graftwork.engine.speculative.model_drafter import DraftTask, ModelDrafter
from graftwork.engine.speculative.request_drafts import AcceptanceRates, RequestDrafts
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import RequestId
from tests.engine.speculative.scripted_draft_model import ScriptedDraftModel
from tests.engine.speculative.test_request_drafts import ForcedTokens

STEP_S, ROW_S, RIGHT, WRONG, END = 0.010, 0.0005, 7, 8, 99
"""A step takes 10 ms and half a millisecond for each row. Every token of every answer is 7."""


class Batch:
    """Requests whose answers are all sevens, served with one draft model: the scheduler's part of drafting."""

    def __init__(
        self,
        guess_after: Callable[[DraftContext], Guess | None],
        pass_s: float,
        num_requests: int = 1,
        **options: float,
    ) -> None:
        self.clock = ManualClock()
        self.model = ScriptedDraftModel(guess_after, self.clock, pass_s, row_s=options.get("row_s", 0.0))
        self.cost = StepCost()
        for rows in range(200):
            self.cost.record(1 + rows % 40, STEP_S + ROW_S * (1 + rows % 40))
        self.drafter = ModelDrafter(self.model, self.clock, self.cost)
        self.rates = AcceptanceRates()
        self.drafts: dict[RequestId, RequestDrafts] = {}
        for number in range(num_requests):
            texts = [number] * int(options.get("prompt", 4))
            rates = AcceptanceRates(self.rates)
            self.drafts[RequestId(f"r{number}")] = RequestDrafts(texts, frozenset({END}), rates, ())
        self.lookups: dict[RequestId, Draft] = {}
        self.seconds = 0.0
        self.num_tokens = 0

    def step(self) -> dict[RequestId, int]:
        """Drafts, verifies and learns. Returns how many guesses of the model were verified for each request."""
        tasks = []
        for request_id, drafts in self.drafts.items():
            drafts.draft = self.lookups.get(request_id, Draft())
            context = DraftContext(request_id, drafts.token_ids, (), SamplingParams(max_tokens=10_000), 0)
            tasks.append(DraftTask(context, drafts, 8, drafts.rates.survival(drafts.draft)))
        budget = budget_drafts([task.chances for task in tasks], self.cost.seconds, 500)
        spent = self.drafter.draft(tasks, budget) if self.drafter.should_draft(len(tasks)) else None
        if spent is not None:
            budget = budget_drafts([task.chances for task in tasks], self.cost.seconds, 500)
        self.seconds += (spent or 0.0) + STEP_S + ROW_S * (len(tasks) + sum(budget.lengths))
        verified: dict[RequestId, int] = {}
        for task, length in zip(tasks, budget.lengths, strict=True):
            verified[task.context.request_id] = self._verify(task, length)
        return verified

    def _verify(self, task: DraftTask, length: int) -> int:
        guesses = task.drafts.draft.first(length)
        num_right = next((place for place, token in enumerate(guesses.token_ids) if token != RIGHT), length)
        task.drafts.token_ids.extend([RIGHT] * (num_right + 1))
        self.num_tokens += num_right + 1
        self.drafter.learn(task.context.request_id, [RIGHT] * (num_right + 1))
        if len(task.drafts.draft):
            task.drafts.learn(length, num_right + 1)
        return sum(span.source is DraftSource.MODEL for span in guesses.spans)


def always(token: int, chance: float = 0.9) -> Callable[[DraftContext], Guess | None]:
    return lambda context: Guess(token, chance)


def test_a_cheap_model_that_is_right_makes_answers_faster() -> None:
    """With passes of a tenth of a step, 100 steps give more than three times the tokens per second, lookups failing."""
    batch = Batch(always(RIGHT), pass_s=0.001)

    for _ in range(100):
        batch.step()

    pace, plain = batch.num_tokens / batch.seconds, 1 / (STEP_S + ROW_S)
    assert pace > 3 * plain


def test_a_model_that_is_wrong_is_left_within_some_steps_and_tried_again() -> None:
    """Of 400 steps, a model that is never right takes few passes, and some of them late. When it becomes right, it is
    used in every step again."""
    token = WRONG
    batch = Batch(lambda context: Guess(token, 0.9), pass_s=0.001)
    for _ in range(200):
        batch.step()
    first = batch.model.num_passes
    for _ in range(200):
        batch.step()
    later = batch.model.num_passes - first

    token = RIGHT
    for _ in range(600):
        batch.step()
    before, num_tokens = batch.model.num_passes, batch.num_tokens
    for _ in range(50):
        batch.step()

    assert first < 60
    assert 2 <= later < 12
    assert batch.model.num_passes - before >= 2 * 50
    assert batch.num_tokens - num_tokens >= 3 * 50


def test_a_model_as_slow_as_the_served_one_is_left_even_if_it_is_always_right() -> None:
    """Each guess takes the time in which a step would give the token itself, so trials are all that is left."""
    batch = Batch(always(RIGHT, 0.99), pass_s=STEP_S)
    for _ in range(1000):
        batch.step()
    spent = batch.model.num_passes * STEP_S

    assert spent < 0.06 * batch.seconds


def test_each_request_is_served_by_what_gains_there() -> None:
    """The model is right for two of four requests. After 60 steps these have guesses in each step, the others in few."""
    batch = Batch(
        lambda context: Guess(RIGHT if context.request_id in ("r0", "r2") else WRONG, 0.8), pass_s=0.001, num_requests=4
    )
    for _ in range(60):
        batch.step()

    seen = [batch.step() for _ in range(64)]

    for request_id in ("r0", "r2"):
        assert sum(verified[RequestId(request_id)] > 0 for verified in seen) == 64
    before = len(batch.model.contexts)
    for _ in range(64):
        batch.step()
    asked = [context.request_id for context in batch.model.contexts[before:]]
    assert asked.count(RequestId("r1")) + asked.count(RequestId("r3")) < 12


def test_a_lookup_that_promises_more_is_kept() -> None:
    """A request whose lookup is nearly certain of eight tokens is left to it, and the one beside it gets guesses."""
    batch = Batch(always(RIGHT, 0.6), pass_s=0.0003, num_requests=2)
    batch.lookups[RequestId("r0")] = Draft((DraftSpan(DraftSource.SESSION, 32, (RIGHT,) * 8),))
    for _ in range(40):
        batch.step()

    before = len(batch.model.contexts)
    seen = [batch.step() for _ in range(20)]

    assert all(verified[RequestId("r0")] == 0 for verified in seen)
    assert all(verified[RequestId("r1")] > 0 for verified in seen)
    asked = [context.request_id for context in batch.model.contexts[before:]]
    assert asked.count(RequestId("r0")) <= 2  # trials


def test_a_draft_goes_on_while_the_model_is_sure() -> None:
    """Behind a guess of which the model is unsure, and which is mostly wrong, no further pass is made."""
    random = Random(0)

    def sure_twice(context: DraftContext) -> Guess:
        is_sure = len(context.drafted) % 3 < 2
        return Guess(RIGHT if is_sure or random.random() < 0.1 else WRONG, 0.98 if is_sure else 0.1)

    batch = Batch(sure_twice, pass_s=0.002)
    for _ in range(200):
        batch.step()

    before = len(batch.model.contexts)
    for _ in range(20):
        batch.step()
    lengths = [len(context.drafted) for context in batch.model.contexts[before:]]

    assert max(lengths) == 2


def test_a_pass_that_promises_less_than_its_time_is_worth_is_not_made() -> None:
    """Rows cost next to nothing, and a pass a third of a step. Behind a second guess that is right in one of three cases,
    a third pass would cost more than it promises."""
    random = Random(1)

    def sure_once(context: DraftContext) -> Guess:
        is_sure = len(context.drafted) % 2 == 0
        return Guess(RIGHT if is_sure or random.random() < 0.3 else WRONG, 0.98 if is_sure else 0.1)

    batch = Batch(sure_once, pass_s=0.003)
    for _ in range(200):
        batch.step()

    before = len(batch.model.contexts)
    for _ in range(40):
        batch.step()
    lengths = [len(context.drafted) for context in batch.model.contexts[before:]]

    assert max(lengths) == 1
    assert lengths.count(1) > 20


def test_a_stop_token_ends_a_draft() -> None:
    """No guess is made behind a guess that ends the answer."""
    batch = Batch(lambda context: Guess(END if len(context.drafted) == 2 else RIGHT, 0.95), pass_s=0.0001)

    for _ in range(30):
        batch.step()

    assert max(len(context.drafted) for context in batch.model.contexts) == 2


def test_a_guess_that_the_grammar_forbids_is_not_drafted() -> None:
    """The draft ends before a forbidden guess. What the grammar forces comes first, and the model goes on behind it."""
    batch = Batch(lambda context: Guess(1000 if len(context.drafted) == 4 else RIGHT, 0.95), pass_s=0.0001)
    drafts = batch.drafts[RequestId("r0")]
    drafts.constraint = ForcedTokens((RIGHT, RIGHT), below=1000)
    context = DraftContext(RequestId("r0"), drafts.token_ids, (), SamplingParams(max_tokens=100), 0)
    task = DraftTask(context, drafts, 8, drafts.propose(8))

    batch.drafter.draft([task], budget_drafts([task.chances], batch.cost.seconds, 100))

    assert [span.source for span in drafts.draft.spans] == [DraftSource.GRAMMAR, DraftSource.MODEL, DraftSource.MODEL]
    assert drafts.draft.token_ids == (RIGHT,) * 4
    assert len(task.chances) == 4


@pytest.mark.parametrize("prompt", [10, 4000])
def test_trials_take_little_time_even_if_texts_are_long(prompt: int) -> None:
    """A useless model takes at most 4 % of the time, however long the prompts are that it must read first."""
    batch = Batch(always(WRONG), pass_s=0.001, row_s=0.00005, prompt=prompt)
    plain_s = 0.0
    for number in range(40):
        for _ in range(50):
            batch.step()
            plain_s += STEP_S + ROW_S
        batch.drafter.forget(RequestId("r0"))  # another request comes
        batch.drafts[RequestId("r0")].token_ids[:] = [number] * prompt

    assert batch.seconds < 1.04 * plain_s + 0.5
