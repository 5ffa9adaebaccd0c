"""Decides when a draft model guesses, for which requests, and how many tokens: while it is measured to pay.

    before a step    the lookups have proposed their drafts
    choose           the requests for which the model promises more than the lookups, if a pass is worth its time
    pass             one more guess for each of them; those that are unlikely by now leave; another pass while it pays
    after a step     the guesses are compared with the tokens that came

Owns the estimated duration of a pass and, for each request, how often the model's guesses were right. Time is worth
tokens at the pace of the batch, in tokens per second. A pass pays if it promises more tokens than its time and the rows to
verify would give at this pace. A model that does not pay is left out for some steps, and then tried for a few requests.
Source: the goodput of drafts, as in TurboSpec (Liu et al. 2024), and confidence to end drafts, as in EAGLE-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from graftwork.engine.speculative.draft import Draft, DraftSource, DraftSpan
from graftwork.engine.speculative.draft_budget import LEAST_GAIN, DraftBudget, Pause, StepCost
from graftwork.engine.speculative.draft_model import DraftContext, DraftModel, Guess
from graftwork.engine.speculative.request_drafts import RequestDrafts
from graftwork.platform.clock import Clock
from graftwork.platform.ids import RequestId

_MOST_ON_TRIAL = 4
"""The most requests for which a model is tried in a step that it is not expected to pay."""


_TRIAL_SHARE = 0.02
"""The most part of the time that trials take."""


_SERVED_STEPS = 32
"""For how many steps the model serves a request, before this is measured. The time to read its text is spread over them."""


_MOST_ODDS = 63


@dataclass(slots=True)
class DraftTask:
    """A request that may get a draft in the next step."""

    context: DraftContext
    """Its text, without draft tokens."""
    drafts: RequestDrafts
    max_tokens: int
    """The most draft tokens of the request in this step."""
    chances: list[float]
    """The probability of each token of `drafts.draft`: that it and all before it are accepted."""


class _HitRate:
    """A running average of how often a guess is right, if the guesses before it were."""

    def __init__(self, inherited: "_HitRate | None" = None) -> None:
        self._inherited = inherited
        self._count = 4
        self._memory = 200 if inherited is None else 24
        self.value: float = 0.5 if inherited is None else inherited.value

    def record(self, *, is_right: bool) -> None:
        """Records one guess. A request's rate passes it on to the engine's."""
        self._count = min(self._count + 1, self._memory)
        self.value += (is_right - self.value) / self._count
        if self._inherited is not None:
            self._inherited.record(is_right=is_right)


@dataclass(slots=True)
class _Course:
    """What is known of the model's guesses for one request."""

    rate: _HitRate
    pause: Pause = field(default_factory=Pause)
    num_steps: int = 0
    """The number of steps with a guess for this request."""
    tried_at: int = 0
    """The number of the last step with a guess for this request."""
    forced: tuple[int, ...] = ()
    """The tokens that the grammar forced in the last draft."""
    guesses: list[int] = field(default_factory=list)
    """The guesses that followed them; empty without a guess."""


@dataclass(slots=True)
class _Chain:
    """The draft that grows by one guess with each pass."""

    task: DraftTask
    course: _Course
    draft: Draft
    chances: list[float]

    @property
    def chance(self) -> float:
        """The probability that all tokens of the draft are accepted."""
        return self.chances[-1] if self.chances else 1.0

    @property
    def num_left(self) -> int:
        """How many guesses the draft has room for."""
        return self.task.max_tokens - len(self.draft)

    def expected(self) -> float:
        """Returns the expected accepted tokens of a draft as long as possible, by the request's rate."""
        return sum(self.chances) + self.chance * sum(
            self.course.rate.value**place for place in range(1, self.num_left + 1)
        )

    def add(self, guess: Guess) -> bool:
        """Adds a guess. Returns whether the draft can go on behind it: not behind a stop token, or a forbidden one."""
        odds = _MOST_ODDS if guess.chance >= 1 else min(int(guess.chance / (1 - guess.chance)), _MOST_ODDS)
        longer = Draft((*self.draft.spans, DraftSpan(DraftSource.MODEL, odds, (guess.token_id,))))
        possible = self.task.drafts.possible(longer)
        if len(possible) > len(self.draft):
            self.draft, self.chances = possible, self.task.drafts.rates.survival(possible)
        return len(possible) == len(longer) and guess.token_id not in self.task.drafts.stop_token_ids


class ModelDrafter:
    """Drafts with one draft model for all requests. Only the scheduler's thread may use it."""

    def __init__(self, model: DraftModel, clock: Clock, step_cost: StepCost) -> None:
        """`step_cost` estimates the duration of a step of the served model."""
        self.model = model
        self._clock = clock
        self._step_cost = step_cost
        self.pass_cost = StepCost()
        """Estimates the duration of a pass of the draft model."""
        self._rate = _HitRate()
        self._courses: dict[RequestId, _Course] = {}
        self._pause = Pause()
        self._num_steps = 0
        self._served_steps = float(_SERVED_STEPS)
        """A running average of the steps for which the model serves a request."""

    def should_draft(self, num_requests: int) -> bool:
        """Returns whether to call `draft` in this step, which generates tokens for `num_requests` requests. Call it once a
        step.
        """
        self._num_steps += 1
        return self._pause.is_over(num_requests)

    def pauses(self, num_requests: int) -> bool:
        """Returns whether the next call of `should_draft` will return False. Changes nothing."""
        return self._pause.lasts(num_requests)

    def draft(self, tasks: Sequence[DraftTask], without: DraftBudget) -> float | None:
        """Replaces the drafts of tasks by the model's own where these promise more.

        Returns the seconds that it took; None if the model does not guess in this step.

        `without` says what the step would verify without the model.
        """
        batch = _Batch.of(tasks, without, self._step_cost)
        able = [task for task in tasks if self._can_serve(task)]
        if not able:
            return None  # nothing is learned of the model's worth
        gaining, due = self._candidates(able, batch)
        best = self._best_pace(gaining, batch)
        if best > (1 + LEAST_GAIN) * batch.pace:
            self._pause.end()
            return self._guess(gaining + due, best)
        on_trial = sorted(gaining + due, key=lambda chain: chain.course.tried_at)[:_MOST_ON_TRIAL]
        spent = self._guess(on_trial, batch.pace)
        self._pause.begin(len(tasks), int(spent / (_TRIAL_SHARE * self._step_cost.seconds(len(tasks)))))
        return spent if on_trial else None

    def learn(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Compares the last guesses for a request with the tokens that a step has just given it.

        If they were right, an unused model is tried again as soon as the share of time for trials allows.
        """
        course = self._courses.get(request_id)
        if course is None or not course.guesses:
            return
        guesses, course.guesses, forced = course.guesses, [], course.forced
        if tuple(token_ids[: len(forced)]) != forced:
            return
        for guess, token in zip(guesses, token_ids[len(forced) :], strict=False):
            course.rate.record(is_right=guess == token)
            if guess != token:
                break
        else:
            self._pause.shorten()

    def forget(self, request_id: RequestId) -> None:
        """Drops what is known of a request, and its KV."""
        course = self._courses.pop(request_id, None)
        if course is not None and course.num_steps:
            self._served_steps += (course.num_steps - self._served_steps) / 16
        self.model.forget(request_id)

    def _can_serve(self, task: DraftTask) -> bool:
        return task.max_tokens > len(task.drafts.forced) and self.model.reaches(task.context, task.max_tokens)

    # ---- choose -----------------------------------------------------------------------------------------------

    def _candidates(self, tasks: list[DraftTask], batch: "_Batch") -> tuple[list[_Chain], list[_Chain]]:
        """Returns the requests for which the model promises more than the lookups, and those on which it is tried again."""
        row_s = self._step_cost.slope + self._pass_slope
        gaining: list[_Chain] = []
        due: list[_Chain] = []
        for chain in map(self._begin, tasks):
            promises_more = chain.expected() > batch.expected_of(chain.task)
            if promises_more and chain.chance * chain.course.rate.value > batch.pace * row_s:
                chain.course.pause.end()
                gaining.append(chain)
            elif chain.course.pause.is_over():
                due.append(chain)
        due = sorted(due, key=lambda chain: chain.course.tried_at)[:_MOST_ON_TRIAL]
        for chain in due:
            chain.course.pause.begin()
        return gaining, due

    def _begin(self, task: DraftTask) -> _Chain:
        request_id = task.context.request_id
        course = self._courses.get(request_id)
        if course is None:
            course = self._courses[request_id] = _Course(_HitRate(self._rate))
        forced = task.drafts.forced
        return _Chain(task, course, forced, task.drafts.rates.survival(forced) if forced.spans else [])

    def _best_pace(self, chains: list[_Chain], batch: "_Batch") -> float:
        """Returns the most tokens per second with drafts of the model for some requests: 0 for no request."""
        if not chains:
            return 0.0
        others, best = batch.without(chains), 0.0
        tokens = others.tokens + sum(sum(chain.chances) for chain in chains)
        rows = others.rows + sum(len(chain.draft) for chain in chains)
        catch_up = self._catch_up_seconds(chains)
        for depth in range(1, max(chain.num_left for chain in chains) + 1):
            live = [chain for chain in chains if depth <= chain.num_left]
            tokens += sum(chain.chance * chain.course.rate.value**depth for chain in live)
            rows += len(live)
            pace = tokens / (self._step_cost.seconds(rows) + depth * self._pass_seconds(len(chains)) + catch_up)
            if pace <= best:
                break
            best = pace
        return best

    def _catch_up_seconds(self, chains: list[_Chain]) -> float:
        num_missing = sum(self.model.num_missing(chain.task.context) for chain in chains)
        return max(self._pass_slope * (num_missing - len(chains)), 0.0) / self._served_steps

    # ---- pass -------------------------------------------------------------------------------------------------

    def _guess(self, chains: list[_Chain], pace: float) -> float:
        spent, live = 0.0, chains
        while live:
            contexts = [_context(chain) for chain in live]
            began_at = self._clock.monotonic()
            done = self.model.guess(contexts)
            seconds = self._clock.monotonic() - began_at
            self.pass_cost.record(done.num_rows, seconds)
            spent += seconds
            for chain, guess in zip(live, done.guesses, strict=True):
                self._note(chain, guess)
            pairs = zip(live, done.guesses, strict=True)
            live = self._worth_another(
                [chain for chain, guess in pairs if guess is not None and chain.add(guess)], pace
            )
        for chain in chains:
            if sum(chain.chances) > sum(chain.task.chances):
                chain.task.drafts.draft, chain.task.chances = chain.draft, chain.chances
        return spent

    def _note(self, chain: _Chain, guess: Guess | None) -> None:
        """Remembers the guesses of a request, from which its rate is learned."""
        course, forced = chain.course, chain.task.drafts.forced
        if len(chain.draft) == len(forced):
            course.num_steps += 1
            course.tried_at, course.forced, course.guesses = self._num_steps, forced.token_ids, []
        if guess is not None:
            course.guesses.append(guess.token_id)

    def _worth_another(self, chains: list[_Chain], pace: float) -> list[_Chain]:
        """Returns the drafts that another pass makes longer; none if it would take more time than it is worth."""
        row_tokens = pace * (self._step_cost.slope + self._pass_slope)
        live = [chain for chain in chains if chain.num_left and chain.chance * chain.course.rate.value > row_tokens]
        if not live:
            return []
        promised = sum(chain.chance * chain.course.rate.value for chain in live)
        seconds = self._pass_seconds(len(live)) + self._step_cost.slope * len(live)
        return live if promised > pace * seconds else []

    # ---- the cost of passes -----------------------------------------------------------------------------------

    def _pass_seconds(self, num_rows: int) -> float:
        if self.pass_cost.is_measured:
            return self.pass_cost.seconds(num_rows)
        return self.model.relative_cost * self._step_cost.seconds(num_rows)

    @property
    def _pass_slope(self) -> float:
        return self.pass_cost.slope if self.pass_cost.is_measured else self.model.relative_cost * self._step_cost.slope

    def check_integrity(self) -> None:
        self.model.check_integrity()


def _context(chain: _Chain) -> DraftContext:
    known = chain.task.context
    return DraftContext(known.request_id, known.token_ids, chain.draft.token_ids, known.sampling, known.seed)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a step gives and costs without the draft model."""

    tokens: float
    """The expected tokens of the step."""
    rows: int
    pace: float
    """Tokens per second."""
    by_request: dict[RequestId, tuple[float, int]]
    """The expected accepted draft tokens of each request, and their number."""

    @classmethod
    def of(cls, tasks: Sequence[DraftTask], budget: DraftBudget, cost: StepCost) -> "_Batch":
        by_request = {
            task.context.request_id: (sum(task.chances[:length]), length)
            for task, length in zip(tasks, budget.lengths, strict=True)
        }
        tokens = len(tasks) + sum(expected for expected, _ in by_request.values())
        rows = len(tasks) + sum(budget.lengths)
        return cls(tokens, rows, tokens / cost.seconds(rows), by_request)

    def expected_of(self, task: DraftTask) -> float:
        return self.by_request[task.context.request_id][0]

    def without(self, chains: Sequence[_Chain]) -> "_Batch":
        """Returns the same batch, but without the drafts of some requests."""
        own = [self.by_request[chain.task.context.request_id] for chain in chains]
        tokens, rows = self.tokens - sum(one for one, _ in own), self.rows - sum(length for _, length in own)
        return _Batch(tokens, rows, self.pace, self.by_request)
