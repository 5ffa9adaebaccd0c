"""Tests of fields and paths that clients of vLLM send: they mean here what they mean there."""

from typing import Any

import pytest
from benchmarks.suite_cases import Judge
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.api.schemas.base import StructuredOutputs
from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.lint import lint
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat
from tests.hypothesis_profiles import examples
from tests.sessions.reference_templates import REFERENCES
from tests.sessions.tokenizer_and_templates import text_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"calls": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "required": True}
OURS: dict[str, dict[str, Any]] = {
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"regex": "a+b"},
    "choice": {"regex": "yes|no\\?"},
    "grammar": {"grammar": 'root ::= "x"'},
    "structural_tag": {"structural_tag": TAG},
}
"""The same format in this server's own fields."""
VALUES: dict[str, Any] = {
    "json": SCHEMA,
    "json_object": True,
    "regex": "a+b",
    "choice": ["yes", "no?"],
    "grammar": 'root ::= "x"',
    "structural_tag": TAG,
}
GUIDED = [({f"guided_{name}": VALUES[name]}, name) for name in ("json", "regex", "choice", "grammar")]
STRUCTURED = [({"structured_outputs": {name: value}}, name) for name, value in VALUES.items()]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(("fields", "name"), GUIDED + STRUCTURED)
async def test_formats_become_the_same_grammar(
    gateway: Gateway, tenant: TestTenant, route: str, fields: dict[str, Any], name: str
) -> None:
    """Each field of vLLM gives the engine the grammar that this server's own field gives."""
    base = chat() if route == "chat/completions" else {"model": "tiny", "prompt": "Go"}

    for given_fields in (fields, OURS[name]):
        answer = await tenant.client.post(f"/v1/{route}", json=base | given_fields)
        assert answer.status_code == 200, answer.text

    theirs, ours = gateway.engine.requests
    assert theirs.grammar == ours.grammar is not None


async def test_a_schema_may_be_text(gateway: Gateway, tenant: TestTenant) -> None:
    """A JSON schema as text, as older clients send it, is read."""
    await tenant.client.post("/v1/chat/completions", json=chat(guided_json='{"type": "integer"}'))

    assert gateway.engine.requests[0].grammar == GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.text("ab\\|.*+?()[]{}^$/-é\n\t 1", min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_choice_is_exactly_one_of_the_texts(choices: list[str]) -> None:
    """The grammar of a choice accepts each text, and neither its beginning nor more than it."""
    (asked,) = StructuredOutputs.model_validate({"choice": choices}).asked()
    compiled = Judge().compiled(lint(GrammarSource(asked.kind, asked.text)))

    def accepts(text: str) -> bool:
        matcher = compiled.matcher()
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete()

    for choice in choices:
        assert accepts(choice)
        for other in (choice[:-1], choice + "a", choice + "|"):
            assert accepts(other) == (other in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"structured_outputs": {"json": "7"}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json_object": True}, "guided_json_object"),
        ({"continue_final_message": True}, "messages[0]"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
    ],
)
async def test_what_cannot_be_kept_is_refused(tenant: TestTenant, fields: dict[str, Any], param: str) -> None:
    """A wrong or contradictory value is a 400 that names the field as it was sent."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(**fields))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_hints_for_another_backend_change_nothing(gateway: Gateway, tenant: TestTenant) -> None:
    """A field that only chooses vLLM's backend, and empty fields, are ignored."""
    fields: dict[str, Any] = {
        "guided_decoding_backend": "outlines",
        "guided_json": None,
        "guided_regex": "",
        "structured_outputs": None,
    }

    answer = await tenant.client.post("/v1/chat/completions", json=chat(**fields))

    assert answer.status_code == 200
    assert gateway.engine.requests[0].grammar is None


OPEN = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, "}]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({}, {"add_generation_prompt": True}),
    ],
)
async def test_prompts_end_as_in_transformers(
    gateway: Gateway, tenant: TestTenant, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    """The prompt of a chat, and of tokenize in vLLM's path, is that of apply_chat_template with the same options."""
    body = {"model": "tiny", "messages": OPEN} | fields

    await tenant.client.post("/v1/chat/completions", json=body)
    found = (await tenant.client.post("/tokenize", json=body)).json()

    expected = REFERENCES["chatml"].apply_chat_template(OPEN, return_dict=False, **options)
    assert list(gateway.engine.requests[0].prompt_token_ids) == found["tokens"] == expected


async def test_template_variables_reach_the_template(gateway: Gateway, tenant: TestTenant) -> None:
    """chat_template_kwargs are names in the template; they cannot write control tokens."""
    body = chat(chat_template_kwargs={"bos_token": "<|im_end|>", "enable_thinking": False})

    answer = await tenant.client.post("/v1/chat/completions", json=body)
    plain = await tenant.client.post("/v1/chat/completions", json=chat())

    assert (answer.status_code, plain.status_code) == (200, 200)
    end = text_tokenizer().token_id("<|im_end|>")
    first, second = (request.prompt_token_ids for request in gateway.engine.requests)
    assert first.count(end or 0) == second.count(end or 0)


async def test_tokenize_in_the_form_of_vllm(tenant: TestTenant) -> None:
    """vLLM's paths need no model, and tell the spelling of each token where asked to."""
    found = (await tenant.client.post("/tokenize", json={"prompt": "The weather", "return_token_strs": True})).json()
    back = (await tenant.client.post("/detokenize", json={"tokens": found["tokens"]})).json()

    backend = text_tokenizer().backend
    assert found["token_strs"] == [backend.id_to_token(token) for token in found["tokens"]]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), CONTEXT_TOKENS)
    assert back == {"prompt": "The weather"}


async def test_paths_of_vllm_need_a_key(gateway: Gateway, tenant: TestTenant) -> None:
    """Only health and version are open."""
    codes = [(await gateway.anonymous.get(path)).status_code for path in ("/health", "/version")]
    codes += [(await gateway.anonymous.post(path, json={})).status_code for path in ("/tokenize", "/detokenize")]

    assert codes == [200, 200, 401, 401]
