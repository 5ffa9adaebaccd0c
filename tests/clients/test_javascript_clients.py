"""Tests of JavaScript clients: a conversation of two turns, each with a tool that really runs."""

from pathlib import Path

import pytest

from tests.clients.programs_of_clients import run_node
from tests.clients.scripted_gateway import ScriptedGateway
from tests.clients.weather_conversation import REPLIES, assert_two_turns

MODES = ("plain", "streamed")


@pytest.mark.parametrize("mode", [*MODES, "runner"])
async def test_openai_chat(gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path, mode: str) -> None:
    """`openai` on Chat Completions, with a loop of the program's or the package's own."""
    gateway.model.replies = REPLIES

    seen = await run_node("openai", "openai_chat", mode, variables=variables, folder=tmp_path)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("history", ["sent", "kept"])
async def test_openai_responses(
    gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path, history: str, mode: str
) -> None:
    """`openai` on Responses, with the history in the input or behind `previous_response_id`."""
    gateway.model.replies = REPLIES

    seen = await run_node("openai", "openai_responses", history, mode, variables=variables, folder=tmp_path)

    assert_two_turns(gateway, seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("provider", ["default", "chat", "compatible"])
async def test_vercel(
    gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path, provider: str, mode: str
) -> None:
    """The AI SDK with its provider for OpenAI, which uses Responses, and with both that use Chat Completions."""
    gateway.model.replies = REPLIES

    seen = await run_node("vercel", "vercel_agent", provider, mode, variables=variables, folder=tmp_path)

    assert_two_turns(gateway, seen)
