"""Tests of requests that the scheduler refuses."""

from contextlib import nullcontext

import pytest

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from graftwork.engine.scheduler.validation import check_prompt_logprobs
from graftwork.platform.errors import (
    CapacityContended,
    Conflict,
    ContextLengthExceeded,
    InvalidRequest,
)
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import CONTEXT, SchedulerDriver


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
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT} tokens.*{CONTEXT + 2} tokens"):
        SchedulerDriver().submit("bad", [5] * (CONTEXT + 2))


@pytest.mark.parametrize(("num_top", "fits"), [(None, True), (0, True), (1, True), (2, False), (20, False)])
def test_log_probabilities_of_a_prompt_are_bounded(num_top: int | None, fits: bool) -> None:
    """A request whose log probabilities would take too much memory is refused, and the error names the field."""
    request = EngineRequest(
        RequestId("scored"),
        (5,) * (MAX_PROMPT_LOGPROBS // 2),
        SamplingParams(max_tokens=0, prompt_logprobs=num_top),
        IsolationDomain(b"tenant"),
    )

    with nullcontext() if fits else pytest.raises(InvalidRequest) as refusal:
        check_prompt_logprobs(request)

    assert refusal is None or refusal.value.param == "prompt_logprobs"


def test_a_prompt_may_fill_the_context_if_nothing_is_generated() -> None:
    """With `max_tokens` 0 the prompt needs no room for an answer."""
    driver = SchedulerDriver()

    driver.submit("whole", [5] * CONTEXT, max_tokens=0)
    driver.drain()

    assert driver.finished()["whole"].completion_tokens == 0


def test_a_request_id_is_served_once_at_a_time() -> None:
    """The id of a request that is still served is a conflict."""
    driver = SchedulerDriver()
    driver.submit("same")

    with pytest.raises(Conflict):
        driver.submit("same")
