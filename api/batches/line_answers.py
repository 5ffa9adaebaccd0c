"""Answers one line of a batch, and says what to do with an error: store it as the line's answer, or try again later.

    answered, or refused by its own fault            the line's answer
    no room, no quota for now, the engine is away    again, after a time
    failed by the server's fault                     again, a few times; then the line's answer
    its key lost its access                          again at once: the runner finds out whether the batch goes on

Owns this rule. Never stores an answer: the runner does.
"""

import logging
from collections import Counter
from dataclasses import dataclass

from graftwork.api.batches.line_forms import answer_line, error_line, request_id_of
from graftwork.api.batches.line_work import AnswerLine, LineWork
from graftwork.api.http.errors import internal_failure
from graftwork.platform.batches.batch import Batch, BatchUsage, LineOutcome
from graftwork.platform.batches.input_lines import LineRequest
from graftwork.platform.errors import (
    DeadlineExceeded,
    GraftworkError,
    InternalFailure,
    LimitExceeded,
    NotPermitted,
)
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.held_account import HeldAccount

MAX_FAILURES = 3
"""How often a line may fail by the server's fault after the engine has begun with it."""
_AGAIN_S = 2.0
_LONGEST_S = 60.0
_ENDED_CODES = ("access_ended", "tenant_suspended", "tenant_deleted")

_log = logging.getLogger("graftwork.batches")


@dataclass(frozen=True, slots=True)
class Later:
    """A line was not answered, and is to be tried again."""

    after_s: float


class LineAnswers:
    """Answers the lines of one batch. Remembers how often each has failed."""

    def __init__(self, batch: Batch, answer: AnswerLine) -> None:
        self._batch = batch
        self._answer = answer
        self._failures: Counter[int] = Counter()

    async def of(self, request: LineRequest, principal: Principal, held: HeldAccount) -> LineOutcome | Later:
        """Answers a line. `held` has its usage then, until the caller has stored both."""
        batch = self._batch
        request_id = request_id_of(batch, request.number)
        try:
            body = await self._answer(
                batch.endpoint, LineWork(request.body, principal, request_id, held, request.number)
            )
        except GraftworkError as error:
            failure = error
        except Exception:  # noqa: BLE001 - as the outermost loop of a request: the other lines go on
            _log.exception("batch_line_failed", extra={"request_id": request_id})
            failure = internal_failure(request_id)
        else:
            return LineOutcome(request.number, False, answer_line(batch, request, body), _usage(held))
        if (after_s := self._again_after(failure, request.number, held)) is not None:
            return Later(min(after_s, _LONGEST_S))
        return LineOutcome(request.number, True, error_line(batch, request, failure), _usage(held))

    def _again_after(self, error: GraftworkError, line: int, held: HeldAccount) -> float | None:
        """Returns after how many seconds to try again; None if the error is the answer to the line."""
        if isinstance(error, NotPermitted):
            return _AGAIN_S if error.code in _ENDED_CODES else None
        if isinstance(error, LimitExceeded):
            return error.retry_after_s
        if not error.is_server_fault:
            return None
        if held.was_admitted or isinstance(error, InternalFailure | DeadlineExceeded):
            self._failures[line] += 1
            if self._failures[line] >= MAX_FAILURES:
                return None
        return _AGAIN_S if error.retry_after_s is None else error.retry_after_s


def _usage(held: HeldAccount) -> BatchUsage:
    if held.noted is not None:
        return held.noted
    used = held.usage
    if used is None:
        return BatchUsage()
    return BatchUsage(used.prompt_tokens, used.cached_tokens, used.completion_tokens, used.reasoning_tokens)
