"""What the operator has declared public, and nothing else, is shared."""

from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.engine.core.requests import SessionKey
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain
from graftwork.sessions.generation.public_prefixes import PublicPrefixEngine, PublicPrefixes
from graftwork.sessions.text.messages import Message
from tests.api.fakes import FakeEngine
from tests.sessions.fakes_text import prompt_encoder

HOUSE_RULES = "You are the house agent. Answer briefly and call tools whenever they help."


@pytest.fixture
def prefixes(tmp_path: Path) -> PublicPrefixes:
    (tmp_path / "rules.txt").write_text(HOUSE_RULES + "\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a prompt", encoding="utf-8")
    return PublicPrefixes.read(tmp_path, prompt_encoder())


def test_public_is_what_equals_a_declared_prompt_from_the_start(prefixes: PublicPrefixes) -> None:
    """A chat under the declared prompt is public up to its end; under one more word only up to that word; under
    another prompt not at all beyond the template's own opening."""
    encode = prompt_encoder().encode_messages
    declared = encode([Message("system", HOUSE_RULES)], add_generation_prompt=False)

    same = encode([Message("system", HOUSE_RULES), Message("user", "Hi")])
    longer = encode([Message("system", HOUSE_RULES + " Be kind."), Message("user", "Hi")])
    other = encode([Message("system", "A tenant's own secret."), Message("user", HOUSE_RULES)])

    assert len(prefixes.prefixes) == 1
    assert prefixes.tokens_of(same) == len(declared)
    assert len(declared) // 2 < prefixes.tokens_of(longer) < len(declared)
    assert prefixes.tokens_of(other) < 8
    assert PublicPrefixes(()).tokens_of(same) == 0


async def test_the_engine_is_told_with_every_prompt(prefixes: PublicPrefixes) -> None:
    """Requests and session commands between turns carry the same number of public tokens."""
    engine = FakeEngine()
    client = PublicPrefixEngine(engine, prefixes)
    prompt = prompt_encoder().encode_messages([Message("system", HOUSE_RULES), Message("user", "Hi")])
    command = SessionCommand(SessionVerb.READ, SessionKey("s"), IsolationDomain(b"x"), (), prompt)

    await client.run_session_command(command)

    assert engine.session_commands == [replace(command, public_tokens=prefixes.tokens_of(prompt))]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The error names the setting and the path."""
    with pytest.raises(InvalidRequest, match=r"public_prompts.*nowhere"):
        PublicPrefixes.read(tmp_path / "nowhere.txt", prompt_encoder())
