"""Tests of clients that read a model's reasoning apart from its answer. Those of OpenAI and Anthropic are in
tests/api/routes/test_reasoning.py.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.programs_of_clients import run_node, run_python
from tests.clients.scripted_gateway import ScriptedGateway, scripted_gateway
from tests.sessions.tokenizer_and_templates import THINKING

THOUGHT, SAID = "Let me look.", "It is sunny."


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[ScriptedGateway]:
    """A gateway whose model reasons."""
    async with scripted_gateway(tmp_path / "gateway", template=THINKING) as gateway:
        gateway.model.text = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
        yield gateway


@pytest.mark.parametrize("mode", ["plain", "streamed"])
async def test_langchain_reads_the_reasoning(gateway: ScriptedGateway, variables: dict[str, str], mode: str) -> None:
    """ChatAnthropic shows the thinking block of a message as a reasoning block of its own, whole and streamed."""
    seen = await run_python("langchain", "langchain_reasoning", mode, variables=variables)

    assert seen == {"reasoning": THOUGHT, "text": SAID}


@pytest.mark.parametrize("mode", ["plain", "streamed"])
async def test_vercel_reads_the_reasoning(
    gateway: ScriptedGateway, variables: dict[str, str], tmp_path: Path, mode: str
) -> None:
    """The AI SDK's provider for Chat Completions gives `reasoning_content` as the reasoning, whole and streamed."""
    seen = await run_node("vercel", "vercel_reasoning", mode, variables=variables, folder=tmp_path)

    assert seen == {"reasoning": THOUGHT, "text": SAID}
