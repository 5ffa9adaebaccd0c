"""Orders the prompts of running requests: which of them get tokens of the next step, and who must wait for that in the queue.

    in_step_order   the order in which running requests get tokens of the next step
    PromptTurns     the same of prompts alone, as numbers
    RunningPrompts  holds back a request whose prompt would only wait in the batch

Owns only the rules. Never admits a request: the scheduler does.
Invariant: no place stays empty because of a rule here, unless a step is full of prompts.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from graftwork.engine.core.step import PromptWork
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.platform.ids import IsolationDomain


def in_step_order(
    running: Collection[RequestState], waiting: WaitingOrder, max_running: int, max_tokens: int
) -> list[RequestState]:
    """Returns the running requests in the order in which they get tokens of the next step.

    Decoding requests come first; among them, the request that would be preempted first is the last. Then come requests
    whose prompts are not computed, by their current priority, which rises with time. At equal priority, domains (usually,
    one domain is one tenant) with at most half their fair number of places go first with prompts of a few steps; the
    others take turns. Those with places above their fair number come last. A prompt of more tokens than `max_tokens`,
    those of a step, lets shorter ones of other domains pass: its own domain has been charged for all of it. Among equals,
    the request that started first begins.
    """
    shares = BatchShares(max_running, running)
    decoding = [one for one in running if one.num_uncomputed <= 1]
    decoding.sort(key=lambda one: (*shares.preemption_order(one), one.arrived_at))
    return decoding + [state for _, state in _prompts_in_turn(running, waiting, shares, max_tokens)]


PromptTurn = tuple[int, bool, int, int, float, float]
"""A sort key of prompts: the priority, whether the domain takes turns or goes first, its turn, whether the prompt lets
others pass, the step of the start, and the time of arrival.
"""
_FEW_STEPS = 4
"""The longest prompt of a domain with few places that goes before those of others, in steps. A longer one takes its turn."""


def _takes_turns(tokens: int, max_tokens: int, *, has_few_places: bool) -> bool:
    return not has_few_places or tokens > _FEW_STEPS * max_tokens


def _lets_pass(excess: int, tokens: int, max_tokens: int) -> int:
    """Returns 2 for a prompt of a domain above its fair number of places, 1 for one of more than a step, 0 for others."""
    return 2 if excess > 0 else int(tokens > max_tokens)


def _prompts_in_turn(
    running: Iterable[RequestState], waiting: WaitingOrder, shares: BatchShares, max_tokens: int
) -> list[tuple[PromptTurn, RequestState]]:
    """Returns the requests whose prompts are not computed, in the order in which they get tokens, with their sort keys."""
    turns: Counter[tuple[IsolationDomain, int]] = Counter()
    found: list[tuple[PromptTurn, RequestState]] = []
    for state in sorted((one for one in running if one.num_uncomputed > 1), key=lambda one: one.arrived_at):
        priority = waiting.priority(state)
        turn = turns[state.domain, priority]
        passed = _lets_pass(shares.excess(state), state.num_uncomputed, max_tokens)
        queues = _takes_turns(state.num_uncomputed, max_tokens, has_few_places=shares.has_few_places(state))
        found.append(((priority, queues, turn, passed, state.started_at_step, state.arrived_at), state))
        turns[state.domain, priority] += 1
    found.sort(key=lambda entry: entry[0])
    return found


@dataclass(frozen=True, slots=True)
class PromptTurns:
    """The prompts of running requests in the order in which steps compute them, as numbers. Any thread may read it."""

    turns: tuple[PromptTurn, ...] = ()
    work: tuple[PromptWork, ...] = (PromptWork(),)
    """What stands ahead of each prompt, and behind the last one the work of all."""
    domain_turns: Mapping[tuple[IsolationDomain, int], int] = field(default_factory=dict)
    """How many of the prompts each domain (usually one tenant) has in each priority."""
    max_tokens: int = 0
    """The most tokens of a step."""

    @classmethod
    def of(
        cls, running: Iterable[RequestState], waiting: WaitingOrder, shares: BatchShares, max_tokens: int
    ) -> "PromptTurns":
        """Returns the prompts of these requests. A request whose KV is being loaded has a turn, but no work yet."""
        in_turn = _prompts_in_turn(running, waiting, shares, max_tokens)
        return cls(
            turns=tuple(turn for turn, _ in in_turn),
            work=tuple(accumulate((_work_left(state) for _, state in in_turn), initial=PromptWork())),
            domain_turns=Counter((state.domain, turn[0]) for turn, state in in_turn),
            max_tokens=max_tokens,
        )

    def before(
        self, domain: IsolationDomain, priority: int, excess: int, tokens: int, *, has_few_places: bool = False
    ) -> int:
        """Returns how many of the prompts would be computed before one of `tokens` tokens of a new request of `domain`, which
        has `excess` places above its fair number without it, and perhaps at most half that number.
        """
        queues = _takes_turns(tokens, self.max_tokens, has_few_places=has_few_places)
        turn, passed = self.domain_turns.get((domain, priority), 0), _lets_pass(excess + 1, tokens, self.max_tokens)
        return bisect_left(self.turns, (priority, queues, turn, passed, math.inf, 0.0))


class RunningPrompts:
    """Holds back a waiting request as long as its prompt would only wait in the batch.

    A request with a place has passed all checks of the queue: nobody refuses it any more, and no lighter domain (usually,
    one domain is one tenant) goes before it by the counters. So a request starts only if fewer prompt tokens stand ahead of
    it than one step computes. Requests that have run before, and so have a part of their answer, are never held back.
    """

    def __init__(
        self, running: Collection[RequestState], waiting: WaitingOrder, tokens_beside: Callable[[int], int]
    ) -> None:
        """`running` may change later: call `started` then. `tokens_beside` returns how many prompt tokens a step computes
        beside so many decoding rows.
        """
        self._running = running
        self._waiting = waiting
        self._tokens_beside = tokens_beside
        self._turns: PromptTurns | None = None

    @cached_property
    def _max_tokens(self) -> int:
        return self._tokens_beside(sum(state.num_uncomputed == 1 for state in self._running))

    @cached_property
    def _total(self) -> int:
        return sum(_work_left(state).tokens for state in self._running)

    @property
    def room(self) -> int:
        """How many more prompt tokens may start until only those of lighter domains and higher tiers may."""
        return self._max_tokens - self._total

    def started(self, state: RequestState) -> None:
        """Records that a request has got a place."""
        if "_total" in self.__dict__:
            self._total += _work_left(state).tokens
        self._turns = None

    def hold(self, state: RequestState, shares: BatchShares) -> bool:
        """Returns whether a waiting request must not start now."""
        if self._total < self._max_tokens or state.has_run:
            return False
        if self._turns is None:
            self._turns = PromptTurns.of(self._running, self._waiting, shares, self._max_tokens)
        before = self._turns.before(
            state.domain,
            self._waiting.priority(state),
            shares.excess(state),
            self._waiting.uncached_tokens(state),
            has_few_places=shares.has_few_places(state),
        )
        return self._turns.work[before].tokens >= self._max_tokens


def _work_left(state: RequestState) -> PromptWork:
    """Returns what the next steps compute of a running request's prompt; nothing while its KV is loaded."""
    if state.pending_loads or state.num_uncomputed <= 1:
        return PromptWork()
    return PromptWork.of(state.num_scheduled, state.num_uncomputed, state.rolling_window)
