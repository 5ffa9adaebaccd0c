"""Tests of public prefixes: only what the operator has declared is shared."""

from dataclasses import replace
from pathlib import Path

import pytest

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import SessionId, TenantId
from graftwork.sessions.core.session import AgentSession, SessionSettings, SessionStatus
from graftwork.sessions.text.encoding import PublicPrefixes
from graftwork.sessions.text.messages import Message
from graftwork.sessions.turns.kv import History, SessionKvClient
from tests.api.fake_engine import FakeEngine
from tests.sessions.generation.test_generator import request
from tests.sessions.scripted_engine import ScriptedEngine, generator_on
from tests.sessions.tokenizer_and_templates import prompt_encoder

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


async def test_every_request_says_how_much_of_its_prompt_is_public(prefixes: PublicPrefixes) -> None:
    """A generation's request carries the number of public tokens at the start of its prompt."""
    engine = ScriptedEngine([])
    prompt = prompt_encoder().encode_messages([Message("system", HOUSE_RULES), Message("user", "Hi")])
    wanted = replace(request(), prompt_token_ids=prompt)

    async for _ in replace(generator_on(engine), public_prefixes=prefixes).start(wanted).events():
        pass

    assert [sent.public_tokens for sent in engine.requests] == [prefixes.tokens_of(prompt)]
    assert prefixes.tokens_of(prompt) > 0


async def test_every_act_on_a_sessions_kv_says_how_much_is_public(prefixes: PublicPrefixes) -> None:
    """A session command carries the number of public tokens at the start of the history."""
    engine = FakeEngine()
    prompt = prompt_encoder().encode_messages([Message("system", HOUSE_RULES), Message("user", "Hi")])

    model, settings = ResolvedModel("tiny", None), SessionSettings()
    session = AgentSession(SessionId("ses_1"), TenantId("t"), SessionStatus.IDLE, model, settings, {}, 0.0, 0.0)

    await SessionKvClient(engine, b"pepper", prefixes).read(History(session, prompt))

    assert [command.public_tokens for command in engine.session_commands] == [prefixes.tokens_of(prompt)]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The error names the setting and the path."""
    with pytest.raises(InvalidRequest, match=r"public_prompts.*nowhere"):
        PublicPrefixes.read(tmp_path / "nowhere.txt", prompt_encoder())
