"""Tests of what clients raise for a prompt beyond the model's context: their own class for this, if they have one."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs_of_clients import run_python
from tests.clients.scripted_gateway import scripted_gateway

CONTEXT_TOKENS = 2048


async def overflow(folder: Path, environment: str, client: str, words: int) -> Any:
    """Returns the error that a client raises for a prompt of so many words."""
    (folder / "home").mkdir()
    async with scripted_gateway(folder / "gateway", CONTEXT_TOKENS) as gateway:
        variables = {"HOME": str(folder / "home"), **gateway.environment}
        error = await run_python(environment, "context_overflow", client, str(words), variables=variables)
        assert gateway.model.exchanges == []
        return error


@pytest.mark.parametrize("words", [3_000, 200_000])
@pytest.mark.parametrize(
    ("environment", "client", "name"),
    [
        ("litellm", "litellm-openai", "ContextWindowExceededError"),
        ("litellm", "litellm-anthropic", "ContextWindowExceededError"),
        ("langchain", "langchain-openai", "ContextOverflowError"),
        ("langchain", "langchain-anthropic", "ContextOverflowError"),
    ],
)
async def test_class_of_its_own(tmp_path: Path, environment: str, client: str, name: str, words: int) -> None:
    """Each raises its class for a full context, for a prompt that is encoded and for one too long to be."""
    error = await overflow(tmp_path, environment, client, words)

    assert name in error["names"]


async def test_anthropic_words(tmp_path: Path) -> None:
    """`anthropic` raises its class for bad requests with the words that callers look for."""
    error = await overflow(tmp_path, "openai", "anthropic-100", 3_000)

    assert "BadRequestError" in error["names"]
    assert "prompt is too long: " in error["message"]
    assert f" > {CONTEXT_TOKENS} maximum" in error["message"]
