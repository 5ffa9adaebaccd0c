"""Tests of `prediction` in chat.completions, and of its figures in the usage."""

import pytest

from graftwork.engine.core.events import DraftReport
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.sessions.tokenizer_and_templates import text_tokenizer

TEXT = "def area(width, height):\n    return width * height\n"


@pytest.mark.parametrize(
    "content",
    [TEXT, [{"type": "text", "text": TEXT[:20]}, {"type": "text", "text": TEXT[20:]}]],
    ids=["text", "parts"],
)
async def test_a_prediction_reaches_the_engine_as_tokens(
    gateway: Gateway, tenant: TestTenant, content: str | list[dict[str, str]]
) -> None:
    """A prediction, as text or in parts, reaches the engine as the tokens that the model would write."""
    body = chat(prediction={"type": "content", "content": content})

    answer = await tenant.client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200
    (request,) = gateway.engine.requests
    assert request.prediction_token_ids == text_tokenizer().encode(TEXT, allow_special=True, continues=True)


async def test_a_prediction_longer_than_the_context_is_refused(gateway: Gateway, tenant: TestTenant) -> None:
    """An oversized prediction is refused by name, and nothing is generated."""
    body = chat(prediction={"type": "content", "content": "word " * 4 * CONTEXT_TOKENS})

    answer = await tenant.client.post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")
    assert gateway.engine.requests == []


async def test_usage_tells_what_came_of_guesses(gateway: Gateway, tenant: TestTenant) -> None:
    """Usage sums the figures of all choices, and has OpenAI's two fields if there was a prediction."""
    gateway.engine.drafts = DraftReport(9, 6, 2)
    plain = await tenant.client.post("/v1/chat/completions", json=chat(n=2))
    gateway.engine.drafts = DraftReport(9, 6, 2, 5, 3)
    predicted = await tenant.client.post("/v1/chat/completions", json=chat())

    assert plain.json()["usage"]["completion_tokens_details"] == {
        "drafted_tokens": 18,
        "accepted_tokens": 12,
        "forced_tokens": 4,
    }
    assert predicted.json()["usage"]["completion_tokens_details"] == {
        "drafted_tokens": 9,
        "accepted_tokens": 6,
        "forced_tokens": 2,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 3,
    }
