"""Estimates how long a step takes from what it computes, and how much of a prompt fits into it beside decoding requests.

Owns the fitted costs of a step on this device and the clock of the steps. Never plans a step: the planner does.

    seconds ≈ fixed + row · decoding rows + token · prompt tokens + attended · attended positions + prompt · prompts

Decoding requests get their next token when the step ends, so its duration is their inter-token latency (ITL). Beside
them, a step computes only as many prompt tokens as this latency allows (`PromptRoom`). Source: chunked prefill with a
dynamic chunk size, Agrawal et al. 2024 (Sarathi-Serve, arXiv 2403.02310).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.engine.core.step import PromptWork, StepPlan
from graftwork.engine.core.step_timer import StepTimer
from graftwork.engine.kv.index.cost_model import PrefillCost
from graftwork.platform.clock import Clock

Numbers = tuple[float, float, float, float, float]
_UNITS: Numbers = (1.0, 16.0, 256.0, 256.0 * 2048.0, 1.0)
"""The scale of each number in `StepLoad.numbers`, so that all are near 1 in a usual step. Prompts come last: what might be the
cost of a prompt or of its tokens counts as that of its tokens at first.
"""
_TOKEN, _ATTENDED, _PROMPT = 2, 3, 4


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes, as far as its duration depends on it."""

    rows: int = 0
    """Tokens of decoding requests, with their drafts."""
    prompt_tokens: int = 0
    attended: float = 0.0
    """Pairs of a prompt token and a position that it attends to."""
    prompts: int = 0
    """Prompts of which the step computes a chunk."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepLoad":
        """Returns the load of a planned step. A slice with one known token counts as decoding."""
        rows = sum(piece.num_tokens for piece in plan.slices if piece.num_known == 1)
        prompts = [piece for piece in plan.slices if piece.num_known > 1]
        tokens = sum(piece.num_tokens for piece in prompts)
        attended = sum(piece.num_tokens * (piece.num_before + piece.num_tokens / 2) for piece in prompts)
        return cls(rows, tokens, attended, len(prompts))

    @property
    def numbers(self) -> Numbers:
        """The numbers that the duration depends on linearly: 1 for each step, rows, prompt tokens, attended positions, prompts.

        Each is divided by a fixed unit.
        """
        _, row, token, attended, prompt = _UNITS
        return 1.0, self.rows / row, self.prompt_tokens / token, self.attended / attended, self.prompts / prompt


_FADING = 0.98
"""The factor by which the weight of a step fades with each later step: about the last 50 steps count."""
_PACE_DEVIATION = 1.5
"""If two steps in a row take more than this many times the expected duration, or less than one over it, the device has
another pace: all costs change by a common factor.
"""
_MAX_PACE_CHANGE = 1.4
"""The most by which all costs rise or fall after one step."""
_SWEEPS = 3


class StepCosts:
    """Learns the five costs of a step by recursive least squares. No cost is ever negative.

    The errors are relative, so that short steps count as much as long ones, and one slow step (a pause of the process, a
    compiled kernel) less than any other. A cost that recent steps do not show keeps its value: without this, after an
    hour of pure decoding a single step would decide what prompts cost. Source: exponential resetting and forgetting,
    Salgado, Goodwin and Middleton 1988.
    """

    def __init__(self) -> None:
        self._costs = [0.0] * len(_UNITS)
        self._moments = [[0.0] * len(_UNITS) for _ in _UNITS]
        self._targets = [0.0] * len(_UNITS)
        self._usual = [0.0] * len(_UNITS)
        """The weight that a usual step gives to each cost, among the steps that show this cost at all."""
        self._largest = [0.0] * len(_UNITS)
        self._last_ratio = 1.0
        """The duration of the last step, over the expected one."""
        self.is_known = False
        """Whether the costs were measured at all, at start or by a step."""

    def start_from(self, prefill: PrefillCost) -> None:
        """Takes the costs that were measured when the engine started. A decoding row is assumed to cost a prompt token, and a
        prompt nothing besides its tokens.
        """
        raw = (prefill.fixed_s, prefill.token_s, prefill.token_s, prefill.attended_s, 0.0)
        self._costs = [cost * unit for cost, unit in zip(raw, _UNITS, strict=True)]
        self._usual = [1.0 / max(sum(self._costs), 1e-9) ** 2] * len(_UNITS)
        self._moments, self._targets = [[0.0] * len(_UNITS) for _ in _UNITS], [0.0] * len(_UNITS)
        self._keep_values()
        self.is_known = True

    def seconds(self, load: StepLoad) -> float:
        """Returns the expected duration of a step with this load; 0 if nothing is known."""
        return _dot(self._costs, load.numbers)

    @property
    def prompt_s(self) -> float:
        """Seconds for each prompt, besides its tokens: a step without prompts skips some work altogether."""
        return self._costs[_PROMPT] / _UNITS[_PROMPT]

    @property
    def token_s(self) -> float:
        """Seconds for each prompt token, without its attention."""
        return self._costs[_TOKEN] / _UNITS[_TOKEN]

    @property
    def attended_s(self) -> float:
        """Seconds for each position that a prompt token attends to."""
        return self._costs[_ATTENDED] / _UNITS[_ATTENDED]

    @property
    def most_prompt_tokens(self) -> int:
        """The most prompt tokens in one step for which the costs may be used: twice the most that was measured.

        A device that is bound by memory for 128 tokens may be bound by arithmetic for 2,048.
        """
        return max(int(2 * self._largest[_TOKEN] * _UNITS[_TOKEN]), _FIRST_CHUNK)

    def record(self, load: StepLoad, seconds: float) -> None:
        """Learns that a step with this load took `seconds`."""
        if seconds <= 0:
            return
        numbers, expected = load.numbers, self.seconds(load)
        if expected > 0 and all(number <= most for number, most in zip(numbers, self._largest, strict=True)):
            expected *= self._follow_pace(seconds / expected)
        weight = 1.0 / max(seconds, expected) ** 2
        for index, number in enumerate(numbers):
            row, weighted = self._moments[index], weight * number
            for other in range(len(_UNITS)):
                row[other] = _FADING * row[other] + weighted * numbers[other]
            self._targets[index] = _FADING * self._targets[index] + weighted * seconds
            if number:
                self._usual[index] = _FADING * self._usual[index] + (1 - _FADING) * weighted * number
        self._keep_values()
        self._largest = [max(pair) for pair in zip(numbers, self._largest, strict=True)]
        self._solve()
        self.is_known = True

    def _follow_pace(self, ratio: float) -> float:
        """Multiplies all costs, and all earlier durations, by a factor if the device has another pace.

        `ratio` is the measured duration of the last step over the expected one. Returns the factor.
        """
        before, self._last_ratio = self._last_ratio, ratio
        if min(before, ratio) <= _PACE_DEVIATION and max(before, ratio) >= 1 / _PACE_DEVIATION:
            return 1.0
        factor = _MAX_PACE_CHANGE if ratio > 1 else 1 / _MAX_PACE_CHANGE
        self._costs = [cost * factor for cost in self._costs]
        self._moments = [[moment / factor**2 for moment in row] for row in self._moments]
        self._targets = [target / factor for target in self._targets]
        self._usual = [weight / factor**2 for weight in self._usual]
        return factor

    def _keep_values(self) -> None:
        """Lets the present value of each cost count at least as much as one usual step that shows this cost."""
        for index, cost in enumerate(self._costs):
            lacking = self._usual[index] - self._moments[index][index]
            if lacking > 0:
                self._moments[index][index] += lacking
                self._targets[index] += lacking * cost

    def _solve(self) -> None:
        """Moves the costs to the least squared error over costs that are not negative, one cost after the other."""
        costs = self._costs
        for _ in range(_SWEEPS):
            for index, row in enumerate(self._moments):
                if row[index] > 0:
                    error = self._targets[index] - _dot(row, costs)
                    costs[index] = max(costs[index] + error / row[index], 0.0)

    def check_integrity(self) -> None:
        """Checks that each cost is finite and not negative."""
        assert all(math.isfinite(cost) and cost >= 0 for cost in self._costs), f"{self._costs} are no costs"


_FIRST_CHUNK = 256
"""The most prompt tokens beside decoding requests before any longer chunk was measured."""
_PROMPT_SHARE = 0.5
"""The least time for prompts in a step, as a fraction of the time of its other parts. So prompts advance also where the
target cannot be met, because decoding alone takes nearly that long. With 0.25, prompts of short chats could not keep the
batch full: on a CPU with steps of 10 ms and a target of 12, a third of the places stayed empty.
"""
_END_SHARE = 0.25
"""By this fraction of the target a step may take longer if it then ends a prompt: a further step for a few tokens more would
cost all requests a step's fixed time.
"""


class PromptRoom:
    """How many prompt tokens still fit into a step with decoding requests.

    One page always fits, so that the first prompt advances in every step.
    """

    def __init__(
        self,
        costs: StepCosts,
        rows: int,
        target_s: float,
        page_tokens: int,
        *,
        least_share: float = _PROMPT_SHARE,
        end_share: float = 0.0,
    ) -> None:
        """`rows` is the number of decoding rows of the step. `target_s` is its longest duration in seconds; the tokens
        of prompts get `least_share` of the time of these rows in any case. With the end of a prompt it may take longer, by `end_share`.
        """
        self._prompt_s, self._token_s, self._attended_s = costs.prompt_s, costs.token_s, costs.attended_s
        self._page_tokens = page_tokens
        self._tokens = costs.most_prompt_tokens
        decoding_s = costs.seconds(StepLoad(rows))
        self._seconds = max(target_s - decoding_s, least_share * decoding_s + costs.prompt_s)
        self._end_s = end_share * target_s
        self._is_first = True

    def take(self, start: int, wanted: int) -> int:
        """Returns how many of `wanted` tokens, the next of a prompt from position `start` on, the step can compute.

        The room for further prompts shrinks by as much. The result is 0, `wanted`, or at least one page.
        """
        seconds = self._seconds - self._prompt_s
        fitting = min(self._tokens, self._tokens_in(seconds, start))
        if self._is_first:
            fitting = max(fitting, self._page_tokens)
        if 0 < fitting < wanted <= min(self._tokens, self._tokens_in(seconds + self._end_s, start)):
            fitting = wanted
        if fitting < min(wanted, self._page_tokens):
            return 0
        taken = min(wanted, fitting)
        self._is_first = False
        self._tokens -= taken
        self._seconds = seconds - taken * (self._token_s + self._attended_s * (start + taken / 2))
        return taken

    def _tokens_in(self, seconds: float, start: int) -> int:
        """Returns how many prompt tokens from position `start` on take at most `seconds`."""
        if seconds <= 0:
            return 0
        linear = self._token_s + self._attended_s * start
        divisor = linear + math.sqrt(linear * linear + 2 * self._attended_s * seconds)
        return self._tokens if divisor == 0 else int(min(2 * seconds / divisor, self._tokens))


@dataclass(frozen=True, slots=True)
class StepPace:
    """What is known of the duration of steps at one moment. Any thread may read it."""

    step_s: float = 0.0
    """Seconds of a step without rows and prompts."""
    row_s: float = 0.0
    """Seconds for each decoding row."""
    prompt_s: float = 0.0
    """Seconds for each prompt of a step, besides its tokens."""
    token_s: float = 0.0
    """Seconds for each prompt token, without its attention."""
    attended_s: float = 0.0
    """Seconds for each position that a prompt token attends to."""
    mean_s: float = 0.0
    """The mean duration of the latest steps, in seconds; 0 before the first."""
    is_known: bool = False
    """Whether anything was measured, at start or by a step."""
    target_s: float | None = None
    """The longest duration of a step with decoding requests, in seconds; None sets no limit."""
    page_tokens: int = 1
    max_batch_tokens: int = 1

    def seconds_of_prompts(self, work: PromptWork, rows: int) -> float:
        """Returns the expected duration of the steps that compute `work` beside `rows` decoding rows, in seconds: as many
        steps as the token budget and the target of inter-token time make of it.
        """
        step_s, prompt_s = self.step_s + self.row_s * rows, self.prompt_s if work.tokens else 0.0
        work_s = self.token_s * work.tokens + self.attended_s * work.attended
        steps = work.tokens / max(self.max_batch_tokens - rows, 1)
        if self.target_s is not None and rows:
            room_s = max(self.target_s - step_s - prompt_s, _PROMPT_SHARE * step_s)
            by_room = work_s / room_s if room_s else 0.0
            steps = max(steps, min(by_room, work.tokens / self.page_tokens))
        return math.ceil(steps) * (step_s + prompt_s) + work_s


class StepTimes:
    """Measures the steps in flight, and knows how long steps take: what they cost, their mean, and how long prompts take
    beside decoding requests. The planner, the estimate of first tokens and the prices of service all ask it.
    """

    def __init__(self, clock: Clock, target_s: float | None, page_tokens: int, max_batch_tokens: int) -> None:
        """`target_s` is the longest duration of a step with decoding requests, in seconds; None sets no limit."""
        self.costs = StepCosts()
        self._target_s = target_s
        self._page_tokens = page_tokens
        self._max_batch_tokens = max_batch_tokens
        self._timer = StepTimer(clock)
        self._loads: deque[StepLoad | None] = deque()
        """The load of each step that has not ended, the oldest first; None if nothing is learned from it."""
        self._follows = False
        self._weight = self._seconds = 0.0

    @property
    def mean_s(self) -> float:
        """The mean duration of the latest steps, in seconds; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0

    def pace(self) -> StepPace:
        """Returns what is known at this moment."""
        costs = self.costs
        return StepPace(
            step_s=costs.seconds(StepLoad()),
            row_s=costs.seconds(StepLoad(1)) - costs.seconds(StepLoad()),
            prompt_s=costs.prompt_s,
            token_s=costs.token_s,
            attended_s=costs.attended_s,
            mean_s=self.mean_s,
            is_known=costs.is_known,
            target_s=self._target_s,
            page_tokens=self._page_tokens,
            max_batch_tokens=self._max_batch_tokens,
        )

    def room(self, rows: int) -> PromptRoom | None:
        """Returns the room for prompts in a step with `rows` decoding rows; None if there is no limit."""
        if self._target_s is None or not rows or not self.costs.is_known:
            return None
        return PromptRoom(self.costs, rows, self._target_s, self._page_tokens, end_share=_END_SHARE)

    def prompt_tokens_beside(self, rows: int) -> int:
        """Returns how many prompt tokens a step can compute beside `rows` decoding rows, at least 1."""
        most, room = max(self._max_batch_tokens - rows, 1), self.room(rows)
        return most if room is None else max(room.take(0, most), 1)

    def room_for_share(self, rows: int, share: float) -> PromptRoom | None:
        """Returns the room for prompts that take at most a `share` of the time of a step with `rows` decoding rows; None if
        no step was measured yet.
        """
        if not self.costs.is_known:
            return None
        decoding_s = self.costs.seconds(StepLoad(rows))
        return PromptRoom(self.costs, rows, decoding_s, self._page_tokens, least_share=share)

    def may_end_prompt_within(self, seconds: float) -> bool:
        """Returns whether decoding requests may wait so long for their next token, because a prompt ends before it."""
        return self._target_s is None or seconds <= (1 + _END_SHARE) * self._target_s

    def begin(self, plan: StepPlan, *, is_typical: bool) -> None:
        """Starts to measure a step. Each step must be ended by `end`, in the same order.

        Nothing is learned from a step that is not `is_typical`, for example because it waits for KV that is copied. The
        host's work since the step before counts too: clients wait for it as well.
        """
        self._loads.append(StepLoad.of(plan) if is_typical else None)
        self._timer.begin(follows=self._follows)
        self._follows = True

    def rest(self) -> None:
        """Records that no step could be planned, so the time until the next step says nothing."""
        self._follows = False

    def end(self) -> float:
        """Learns the duration of the oldest step that has not ended, and returns it in seconds."""
        seconds, load = self._timer.end(), self._loads.popleft()
        self._weight = self._weight * _FADING + 1
        self._seconds = self._seconds * _FADING + seconds
        if load is not None:
            self.costs.record(load, seconds)
        return seconds


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns the sum of the five products. Written out, because it runs many times in each step."""
    first = left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
    return first + left[3] * right[3] + left[4] * right[4]
