"""Tests of Python clients: a conversation of two turns, each with a tool that really runs."""

import pytest

from tests.clients.programs_of_clients import run_python
from tests.clients.scripted_gateway import Reply, ScriptedGateway, tool_call
from tests.clients.weather_conversation import PARIS, REPLIES, assert_two_turns

CLIENTS = {
    "openai on Chat Completions": ("openai", "openai_chat"),
    "openai on Responses, history in the input": ("openai", "openai_responses", "sent"),
    "openai on Responses, history behind previous_response_id": ("openai", "openai_responses", "kept"),
    "anthropic": ("openai", "anthropic_messages"),
    "OpenAI's Agents SDK with its own session": ("openai", "openai_agents"),
    "pydantic-ai on Responses": ("openai", "pydantic_ai_agent", "openai"),
    "pydantic-ai on Chat Completions": ("openai", "pydantic_ai_agent", "openai-chat"),
    "LangChain's create_agent": ("langchain", "langchain_agent", "langchain"),
    "LangGraph's create_react_agent": ("langchain", "langchain_agent", "langgraph"),
    "litellm on OpenAI's interface": ("litellm", "litellm_completion", "openai"),
    "litellm on Anthropic's interface": ("litellm", "litellm_completion", "anthropic"),
}
"""Maps each client to the environment and the program of its test, and the program's arguments."""


@pytest.mark.parametrize("mode", ["plain", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_two_turns(gateway: ScriptedGateway, variables: dict[str, str], client: str, mode: str) -> None:
    """Each client at its defaults runs its tool in both turns, and shows the usage that the server counted."""
    gateway.model.replies = REPLIES

    seen = await run_python(*CLIENTS[client], mode, variables=variables)

    is_unmetered = "langchain" in CLIENTS[client] and mode == "streamed"  # it asks only OpenAI for a stream's usage
    assert_two_turns(gateway, seen, has_usage=not is_unmetered)


async def test_anthropic_tool_runner(gateway: ScriptedGateway, variables: dict[str, str]) -> None:
    """`anthropic` with its own loop, which runs the tools."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "anthropic_messages", "runner", variables=variables)

    assert_two_turns(gateway, seen)


async def test_instructor(gateway: ScriptedGateway, variables: dict[str, str]) -> None:
    """instructor sends a wrong extraction back as the tool's result, and takes the corrected one."""
    gateway.model.replies = (
        Reply("hotter than 60", tool_call("CheckedWeather", '{"city": "Paris", "degrees": 20}')),
        Reply(PARIS, tool_call("CheckedWeather", '{"city": "Paris", "degrees": 200}')),
    )

    seen = await run_python("litellm", "instructor_extraction", "plain", variables=variables)

    assert seen["calls"] == [{"degrees": 200}, {"degrees": 20}]
    assert seen["found"] == {"city": "Paris", "degrees": 20}
    first, second = gateway.model.exchanges
    assert second.prompt.index(PARIS) < second.prompt.index('"degrees": 200') < second.prompt.index("hotter than 60")
    (used,) = await gateway.tenant.usage()
    assert used["prompt_tokens"] == first.prompt_tokens + second.prompt_tokens
    assert seen["usage"] == [[used["prompt_tokens"], used["completion_tokens"]]]


async def test_instructor_stream(gateway: ScriptedGateway, variables: dict[str, str]) -> None:
    """instructor reads a partial object while the call's arguments arrive."""
    gateway.model.replies = (Reply(PARIS, tool_call("Weather", '{"city": "Paris", "degrees": 20}')),)

    seen = await run_python("litellm", "instructor_extraction", "streamed", variables=variables)

    assert seen["calls"][0] == {"degrees": None}
    assert seen["found"] == {"city": "Paris", "degrees": 20}
