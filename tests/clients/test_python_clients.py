"""Tests of Python clients: a conversation of two turns, each with a tool that really runs."""

import pytest

from tests.clients.programs_of_clients import run_python
from tests.clients.scripted_gateway import Reply, ScriptedGateway, tool_call
from tests.clients.weather_conversation import PARIS, REPLIES, assert_two_turns

MODES = ("plain", "streamed")


@pytest.mark.parametrize("mode", MODES)
async def test_openai_chat(gateway: ScriptedGateway, variables: dict[str, str], mode: str) -> None:
    """`openai` on Chat Completions."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "openai_chat", mode, variables=variables)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("history", ["sent", "kept"])
async def test_openai_responses(gateway: ScriptedGateway, variables: dict[str, str], history: str, mode: str) -> None:
    """`openai` on Responses, with the history in the input or behind `previous_response_id`."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "openai_responses", history, mode, variables=variables)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", [*MODES, "runner"])
async def test_anthropic(gateway: ScriptedGateway, variables: dict[str, str], mode: str) -> None:
    """`anthropic`, with a loop of the program's or the package's own."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "anthropic_messages", mode, variables=variables)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
async def test_openai_agents(gateway: ScriptedGateway, variables: dict[str, str], mode: str) -> None:
    """The Agents SDK, with its own session."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "openai_agents", mode, variables=variables)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("provider", ["openai", "openai-chat"])
async def test_pydantic_ai(gateway: ScriptedGateway, variables: dict[str, str], provider: str, mode: str) -> None:
    """pydantic-ai's default for OpenAI, which is Responses, and its Chat Completions."""
    gateway.model.replies = REPLIES

    seen = await run_python("openai", "pydantic_ai_agent", provider, mode, variables=variables)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("maker", ["langchain", "langgraph"])
async def test_langchain(gateway: ScriptedGateway, variables: dict[str, str], maker: str, mode: str) -> None:
    """LangChain's `create_agent` and LangGraph's `create_react_agent`, with a checkpointer."""
    gateway.model.replies = REPLIES

    seen = await run_python("langchain", "langchain_agent", maker, mode, variables=variables)

    assert_two_turns(gateway, seen, has_usage=mode == "plain")  # it asks no server but OpenAI's for a stream's usage


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_litellm(gateway: ScriptedGateway, variables: dict[str, str], provider: str, mode: str) -> None:
    """litellm by both of the server's interfaces."""
    gateway.model.replies = REPLIES

    seen = await run_python("litellm", "litellm_completion", provider, mode, variables=variables)

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
