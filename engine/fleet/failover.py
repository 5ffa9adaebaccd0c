"""Lets a request go on at another engine, after the tokens that its caller has already got.

    MovableRequest   one request: what its caller has got, and what the next engine must be asked
    MoveBudget       how many moves all requests of this gateway may make

Owns what was emitted. Never talks to an engine.
Invariant: a caller sees one PromptAdmitted, each prompt score, embedding and token once, and one RequestFinished, however
many engines have worked on the request.
"""

from dataclasses import replace

from graftwork.engine.core.events import (
    EngineEvent,
    PromptAdmitted,
    PromptEmbedded,
    PromptScored,
    StepsTraced,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.errors import DeadlineExceeded
from graftwork.platform.replicas.lease import ServedVersion

MAX_MOVES = 2
"""How often one request may lose its engine. A request that ends engines must not end all of them."""


class MovableRequest:
    """One request, over all engines that work on it one after another."""

    def __init__(self, request: EngineRequest, now: float) -> None:
        """`now` is the time of a monotonic clock, in seconds."""
        self.request = request
        self.emitted: list[int] = list(request.emitted_token_ids)
        self.num_moves = 0
        self.num_losses = 0
        """Moves because an engine was lost; the others are because it did not answer in time."""
        self.is_admitted = False
        self.refused_by: set[str] = set()
        """The replicas that had no room for the request."""
        self.served: ServedVersion | None = None
        """The weights and the version that have computed what the caller has got; None while that is nothing. Only an
        engine with the same may go on: otherwise the answer would be that of no model.
        """
        self._num_scored = 0
        self._skips_scores = 0
        self._is_embedded = False
        self._started_at = now

    def take(self, event: EngineEvent, served: ServedVersion | None = None) -> EngineEvent | None:
        """Records an event of an engine that serves `served`. Returns what the caller should see of it, if anything."""
        if not isinstance(event, PromptAdmitted | StepsTraced):
            self.served = served
        if isinstance(event, TokensGenerated):
            self.emitted.extend(event.token_ids)
            return event
        if isinstance(event, PromptScored):
            return self._take_scores(event)
        if isinstance(event, PromptAdmitted):
            if self.is_admitted:
                return None
            self.is_admitted = True
        if isinstance(event, PromptEmbedded):
            was_embedded, self._is_embedded = self._is_embedded, True
            return None if was_embedded else event
        return event

    def _take_scores(self, event: PromptScored) -> PromptScored | None:
        skipped = min(self._skips_scores, len(event.logprobs))
        self._skips_scores -= skipped
        self._num_scored += len(event.logprobs) - skipped
        return event if not skipped else PromptScored(event.logprobs[skipped:]) if event.logprobs[skipped:] else None

    def move(self, *, is_late: bool = False) -> None:
        """Notes that the engine is lost, or with `is_late` does not answer, and that the request goes to another."""
        self.num_moves += 1
        self.num_losses += not is_late
        self.refused_by.clear()
        self._skips_scores = self._num_scored

    def to_send(self, now: float, *, again: bool = False) -> EngineRequest:
        """Returns the request for the next engine, or with `again` for a second one beside it, with the tokens so far
        and the time that is left.

        Raises DeadlineExceeded if none is left.
        """
        request = self.request
        if not self.num_moves and not again:
            return request
        passed_s = now - self._started_at
        has_tokens = len(self.emitted) > len(request.emitted_token_ids)
        return replace(
            request,
            emitted_token_ids=tuple(self.emitted),
            timeout_s=_left(request.timeout_s, passed_s),
            deadline_s=None if has_tokens else _left(request.deadline_s, passed_s),
        )


def _left(limit_s: float | None, passed_s: float) -> float | None:
    if limit_s is None:
        return None
    if passed_s >= limit_s:
        raise DeadlineExceeded(
            f"The request took longer than its {limit_s:g} seconds, during which its engine was lost. Send it again."
        )
    return limit_s - passed_s


class MoveBudget:
    """Bounds the moves of all requests: in the long run, at most one for each request that begins.

    So an engine that is lost can hand all its requests over once, and engines that are lost again and again cannot make
    the others compute the same prompts for ever.
    """

    def __init__(self, spare: int = 64) -> None:
        """`spare` moves are possible at first, and are saved up while there are none."""
        self._spare = spare
        self._credit = spare
        self._running = 0

    def begin(self) -> None:
        """Notes that a request begins. Each call needs one of `end`."""
        self._running += 1
        self._credit = min(self._credit + 1, self._spare + self._running)

    def end(self) -> None:
        self._running -= 1

    def has_room(self, requests: int) -> bool:
        """Returns whether so many requests may move now."""
        return self._credit >= requests

    def allows(self, request: MovableRequest, *, is_late: bool = False) -> bool:
        """Returns whether this request may move now, and if so takes the move from the budget.

        With `is_late`, its engine does not answer. It has not ended by the request, so MAX_MOVES does not hold.
        """
        if self._credit <= 0 or (request.num_losses >= MAX_MOVES and not is_late):
            return False
        self._credit -= 1
        return True
