"""Decides when short prompts are computed in a step of their own, before the next step of the decoding requests.

Owns the memory of whether the last step was such a step. Never plans a step: the planner does.

A new request that comes beside a large batch waits for the step that runs, and then gets its first token at the end of
a step with all decoding rows. Where rows cost time (a CPU, a large batch of a small model), a step with the new prompts
alone ends much sooner, and delays the others by little. Where a step costs the same with few rows or with many (a GPU
that reads all weights anyway), little is gained, and the prompts run beside the decoding rows as usual, unless they have
a better priority than all that decode: then these wait for them in any case.

Invariants: a request goes first only if it has a better priority than all that decode, or if its domain (usually one
tenant) has at most half its fair number of places and others decode. Two such steps never follow each other.
"""

from collections.abc import Collection

from graftwork.engine.core.step import PromptWork
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.step_time import StepLoad, StepTimes

_MOST_OF_A_STEP = 0.7
"""The longest a step of prompts alone may take, as a fraction of a step with the decoding rows too. In the scene `chats` of the
scheduling benchmark light requests have their first token after 12 ms at the median and 24 at p99; with 0.34 they have it
after 16 and 30, and 0.7 % more tokens are computed.
"""
_MOST_OF_BOTH = 1.25
"""The longest both steps may take, as a fraction of one step with all: where a step without rows costs much, the others lose more
than the new prompts gain.
"""


class PrefillFirst:
    """Chooses the requests of the next step: all of them, or new prompts alone."""

    def __init__(self, step_times: StepTimes, max_running: int) -> None:
        self._step_times = step_times
        self._max_running = max_running
        self._was_alone = False

    def choose(self, running: Collection[RequestState]) -> Collection[RequestState]:
        """Returns the requests of the batch that the next step computes. Call it once for each step that is planned."""
        alone = [] if self._was_alone else self._short_prompts(running)
        self._was_alone = bool(alone)
        return alone or running

    def _short_prompts(self, running: Collection[RequestState]) -> list[RequestState]:
        """Returns the new requests that go first; none if their step would take too long."""
        prompts, decoding = [], []
        for state in running:
            if state.num_uncomputed > 1 and not state.num_generated and not state.pending_loads:
                prompts.append(state)
            elif state.num_uncomputed == 1:
                decoding.append(state)
        if not prompts or not decoding:
            return []
        best, domains = min(state.priority for state in decoding), {state.domain for state in decoding}
        urgent = [one for one in prompts if one.priority < best]
        if urgent:
            return urgent
        shares = BatchShares(self._max_running, running)
        first = [
            one for one in prompts if one.priority == best and shares.has_few_places(one) and domains != {one.domain}
        ]
        return first if first and self._is_cheap(first, len(decoding)) else []

    def _is_cheap(self, prompts: Collection[RequestState], num_decoding: int) -> bool:
        works = (PromptWork.of(one.num_scheduled, one.num_uncomputed, one.rolling_window) for one in prompts)
        work = sum(works, PromptWork())
        seconds = self._step_times.costs.seconds
        alone_s = seconds(StepLoad(0, work.tokens, work.attended, len(prompts)))
        together_s = seconds(StepLoad(num_decoding, work.tokens, work.attended, len(prompts)))
        waits_s = alone_s + seconds(StepLoad(num_decoding))
        gains = alone_s <= _MOST_OF_A_STEP * together_s and waits_s <= _MOST_OF_BOTH * together_s
        return gains and self._step_times.may_end_prompt_within(waits_s)
