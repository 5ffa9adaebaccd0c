"""Tests of log-probabilities in the Responses API, through the `openai` package."""

from typing import Any

from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant

LOGPROBS: Any = "message.output_text.logprobs"


async def test_the_same_figures_as_in_chat(gateway: Gateway, tenant: TestTenant) -> None:
    """A response has the log-probabilities that a chat has, streamed, whole and when it is fetched again."""
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
        )
        response = await client.responses.create(model="tiny", input="Hi", include=[LOGPROBS], top_logprobs=2)
        stream = await client.responses.create(
            model="tiny", input="Hi", include=[LOGPROBS], top_logprobs=2, stream=True
        )
        events = [event async for event in stream]
        again = await client.responses.retrieve(response.id)
        plain = await client.responses.create(model="tiny", input="Hi")

    assert chat.choices[0].logprobs is not None
    expected = [score.to_dict() for score in chat.choices[0].logprobs.content or ()]
    assert expected
    assert [score.to_dict() for score in text_of(response).logprobs or ()] == expected
    assert again.to_dict() == response.to_dict()
    assert response.top_logprobs == 2
    bodies: list[dict[str, Any]] = [event.to_dict() for event in events]
    streamed = [body["logprobs"] for body in bodies if body["type"] == "response.output_text.delta"]
    (done,) = [body["logprobs"] for body in bodies if body["type"] == "response.output_text.done"]
    assert [score for scores in streamed for score in scores] == done == expected
    assert text_of(plain).logprobs is None


def text_of(response: Response) -> ResponseOutputText:
    """The text of a response with one message."""
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert isinstance(part, ResponseOutputText)
    return part
