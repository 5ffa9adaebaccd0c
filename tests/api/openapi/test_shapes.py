"""The shapes in the document agree with the readers that check the requests.

A schema may allow more than its reader, where JSON Schema cannot state a rule. It never refuses what the reader takes.
"""

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from graftwork.api.anthropic.schemas import MessagesRequest
from graftwork.api.anthropic.translate import translate
from graftwork.api.schemas.chat import ChatCompletionRequest
from graftwork.api.schemas.responses import ResponseRequest
from graftwork.api.schemas.sessions import SessionBody, TurnBody
from graftwork.api.schemas.tokenization import TokenizeRequest
from graftwork.api.server.app import create_app
from graftwork.engine.core.sampling import RANGES, Range
from graftwork.platform.answers.admin import Quota, QuotaLimits
from graftwork.platform.errors import GraftworkError
from graftwork.platform.quotas.quota import Quota as StoredQuota
from graftwork.platform.settings.settings import Settings
from graftwork.sessions.core.items import parse_input
from graftwork.sessions.generation.sampling import NEUTRAL_VALUES, SamplingFields, SessionSampling
from graftwork.sessions.text.messages import messages_from_chat
from graftwork.sessions.turns.settings import checked_settings, read_sampling

DOCUMENT: dict[str, Any] = create_app(Settings()).openapi()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"], "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look it up."},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
]
SESSION_INPUT = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": "item_1"},
    {"role": "developer", "content": "Be brief."},
]
RESPONSE_INPUT = [
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "user", "content": "Hi"},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "sunny"}]},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": "x", "namespace": "n"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"},
    {"type": "local_shell_call", "call_id": "call_3", "action": {"type": "exec"}},
    {"type": "local_shell_call_output", "id": "call_3", "output": "ok"},
    {"type": "reasoning", "summary": []},
]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Oslo"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
    {
        "role": "user",
        "content": [
            {"type": "document", "source": {"type": "text", "data": "Sunny."}, "title": "Oslo"},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Sunny."}]}},
            {"type": "search_result", "title": "a", "source": "b", "content": [{"type": "text", "text": "Sunny."}]},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "tool_reference", "tool_name": "f"}, {"type": "text", "text": "x"}],
            },
        ],
    },
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hm."}]},
    {
        "role": "system",
        "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}],
        "clear_at": "never",
    },
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Sunny."}]},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Thanks"},
]
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "name": "f", "function": {"name": "f"}}]}
JSON_SCHEMA = {"name": "city", "schema": {"type": "object"}, "strict": True}


def property_of(component: str, field: str) -> dict[str, Any]:
    schema: dict[str, Any] = SCHEMAS[component]["properties"][field]
    return schema


def read_chat(messages: Any) -> None:
    """Check chat messages as the server does."""
    messages_from_chat(ChatCompletionRequest.model_validate({"model": "m", "messages": messages}).messages)


def read_session(**fields: Any) -> None:
    """Check the settings of a session as the server does, beside one tool `f`."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    checked_settings(SessionBody.model_validate({"model": "m", "tools": tools} | fields).new_session().settings)


def read_response(**fields: Any) -> None:
    """Check the fields of a response as the server does, beside one tool `f`."""
    tools = [{"type": "function", "name": "f"}]
    body = ResponseRequest.model_validate({"model": "m", "input": "Hi", "tools": tools} | fields)
    checked_settings(body.order("default").settings)


def read_messages(messages: Any) -> None:
    """Check Anthropic's messages as the server does."""
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": messages})
    messages_from_chat(translate(request, {}).chat.messages)


SUBJECTS: dict[str, tuple[dict[str, Any], Callable[[Any], object], list[Any]]] = {
    "chat messages": (property_of("ChatCompletionRequest", "messages"), read_chat, [CHAT]),
    "turn input": (
        property_of("TurnBody", "input"),
        lambda raw: parse_input(TurnBody.model_validate({"input": raw}).input),
        [SESSION_INPUT, "Hi"],
    ),
    "response input": (
        property_of("ResponseRequest", "input"),
        lambda raw: read_response(input=raw),
        [RESPONSE_INPUT, "Hi"],
    ),
    "Anthropic messages": (property_of("MessagesRequest", "messages"), read_messages, [MESSAGES]),
    "tool choice": (
        property_of("SessionBody", "tool_choice"),
        lambda choice: read_session(tool_choice=choice),
        ["auto", "none", "required", NAMED, {"type": "allowed_tools", "allowed_tools": ALLOWED}],
    ),
    "response tool choice": (
        property_of("ResponseRequest", "tool_choice"),
        lambda choice: read_response(tool_choice=choice),
        [
            *("auto", "none", "required", {"type": "function", "name": "f"}, {"type": "allowed_tools", **ALLOWED}),
            {"type": "allowed_tools", "mode": "auto", "tools": [*ALLOWED["tools"], {"type": "web_search_20250305"}]},
        ],
    ),
    "response format": (
        property_of("ChatCompletionRequest", "response_format"),
        lambda wanted: read_session(response_format=wanted),
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": JSON_SCHEMA}],
    ),
    "text format": (
        property_of("TextOptions", "format"),
        lambda wanted: read_response(text={"format": wanted}),
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", **JSON_SCHEMA}],
    ),
    "sampling": (
        property_of("SessionBody", "sampling"),
        lambda sampling: read_session(sampling=sampling),
        [
            {"max_tokens": 5, "temperature": 0.5, "top_k": 4, "seed": 3, "stop": ["a"], "logit_bias": {"5": 1.5}},
            {"stop": "END", "stop_token_ids": [7], "ignore_eos": True, "repetition_penalty": 1.1},
            {"max_completion_tokens": 5, "min_tokens": 2, "min_p": 0.5, "top_p": 0.5, "frequency_penalty": -1},
        ],
    ),
}
"""For each subject: its schema, its reader, and valid values.

The values leave out the few fields that are read more leniently than the schema says. A falsy `type` of a response's
message counts as missing, and the `content` of a `tool_result` that is neither a text nor a list counts as empty.
Sessions also take tools whose `description` is no text, and whose `strict` is no boolean.
"""


def fits(schema: dict[str, Any], value: Any) -> bool:
    whole = {**schema, "components": DOCUMENT["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def takes(reader: Callable[[Any], object], value: Any) -> bool:
    try:
        reader(value)
    except (GraftworkError, ValidationError):
        return False
    return True


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Each place in a JSON value as its container and its key, from the outside in."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [place for key in keys for place in ((value, key), *places_in(value[key]))]


JUNK = st.sampled_from([None, True, -1, 0, 3, 0.5, 1e9, "", "x", "text", "function", [], [1], ["x"], {}, {"type": "x"}])
CHANGES = st.one_of(st.just("remove"), st.just("add"), st.just("replace"))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_valid_values_fit_their_schemas(subject: str) -> None:
    """The readers take the valid values, and the schemas allow them."""
    schema, reader, values = SUBJECTS[subject]

    for value in values:
        assert takes(reader, value)
        assert fits(schema, value)


@pytest.mark.parametrize("subject", SUBJECTS)
@given(data=st.data())
def test_what_a_schema_refuses_the_server_refuses(subject: str, data: st.DataObject) -> None:
    """A valid value with one change is refused by its reader if its schema refuses it."""
    schema, reader, values = SUBJECTS[subject]
    holder = [copy.deepcopy(data.draw(st.sampled_from(values)))]
    container, key = data.draw(st.sampled_from(places_in(holder)))
    match data.draw(CHANGES):
        case "remove" if container is not holder:
            del container[key]
        case "add" if isinstance(container[key], dict):
            container[key]["colour"] = "red"
        case _:
            container[key] = data.draw(JUNK)

    if not fits(schema, holder[0]):
        assert not takes(reader, holder[0]), json.dumps(holder[0])


def test_sampling_has_every_field_of_the_validator() -> None:
    """The document has each sampling field of its validator, and the same range and description in every body."""
    session = SCHEMAS["SessionSampling"]["properties"]

    assert set(session) == {*SessionSampling.model_fields, *NEUTRAL_VALUES}
    for body in ("ChatCompletionRequest", "CompletionRequest", "ResponseRequest"):
        for name in SamplingFields.model_fields:
            if (body, name) != ("CompletionRequest", "max_tokens"):
                assert SCHEMAS[body]["properties"][name] == session[name], (body, name)
    completion = SCHEMAS["CompletionRequest"]["properties"]["max_tokens"]
    assert completion["anyOf"][0]["minimum"] == 0, "a completion may ask for its prompt alone"


ABSENT = object()
PROMPT_END = {"continue_final_message": [ABSENT, None, True, False], "add_generation_prompt": [ABSENT, True, False]}
RULES: list[tuple[type[BaseModel], dict[str, Any], dict[str, list[Any]]]] = [
    (TokenizeRequest, {"messages": CHAT}, PROMPT_END),
    (ChatCompletionRequest, {"model": "m", "messages": CHAT}, PROMPT_END),
    (
        ChatCompletionRequest,
        {"model": "m", "messages": CHAT},
        {
            "logprobs": [ABSENT, None, True, False],
            "top_logprobs": [ABSENT, None, 0, 1],
            "prompt_logprobs": [ABSENT, None, 0, 1],
            "stream": [ABSENT, True, False],
        },
    ),
    (
        ResponseRequest,
        {"model": "m", "input": "Hi"},
        {
            "conversation": [ABSENT, None, "conv_1", {"id": "conv_1"}],
            "previous_response_id": [ABSENT, None, "resp_1"],
            "store": [ABSENT, None, True, False],
            "background": [ABSENT, True, False],
        },
    ),
    (
        ResponseRequest,
        {"model": "m", "input": "Hi"},
        {
            "include": [ABSENT, None, [], ["x"], ["x", "message.output_text.logprobs"]],
            "top_logprobs": [ABSENT, None, 0, 1],
        },
    ),
]


@pytest.mark.parametrize(("body", "base", "fields"), RULES)
def test_rules_between_fields_agree(body: type[BaseModel], base: dict[str, Any], fields: dict[str, list[Any]]) -> None:
    """For all combinations of the values of fields that exclude each other, the schema and the server agree."""
    for values in itertools.product(*fields.values()):
        chosen = {name: value for name, value in zip(fields, values, strict=True) if value is not ABSENT}
        assert fits(SCHEMAS[body.__name__], base | chosen) == takes(body.model_validate, base | chosen), chosen


def values_near(bounds: Range) -> list[float]:
    """Each bound of a range, and the numbers beside it."""
    ends = [bound for bound in (bounds.ge, bounds.gt, bounds.le, bounds.lt) if bound is not None]
    return [value for end in ends for value in (end - 1, end - 0.001, end, end + 0.001, end + 1)]


@pytest.mark.parametrize("name", sorted({*RANGES} & {*SamplingFields.model_fields} - {"stop_token_ids", "seed"}))
def test_bounds_of_sampling_fields_agree(name: str) -> None:
    """At each bound of a sampling field, and beside it, the schema and the server agree. Null is always allowed."""
    for value in [None, *values_near(RANGES[name])]:
        sampling = {name: int(value) if value is not None and float(value).is_integer() else value}
        if name == "attention_sinks":  # which has no effect alone
            sampling["attention_window"] = 64
        assert fits(SCHEMAS["SessionSampling"], sampling) == takes(read_sampling, sampling), sampling


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": -1},
        {"top_k": -2},
        {"seed": -(2**63)},
        {"seed": -(2**63) - 1},
        {"seed": 2**64 - 1},
        {"seed": 2**64},
        {"stop": "a" * 256},
        {"stop": "a" * 257},
        {"stop": ""},
        {"stop": ["a"] * 16},
        {"stop": ["a"] * 17},
        {"stop_token_ids": [0] * 128},
        {"stop_token_ids": [0] * 129},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": 100.5}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {str(token_id): 0 for token_id in range(1024)}},
        {"logit_bias": {str(token_id): 0 for token_id in range(1025)}},
        {"logprobs": False, "top_logprobs": 0, "n": 1},
        {"logprobs": True},
        {"logprobs": 0},
        {"top_logprobs": 1},
        {"top_logprobs": False},
        {"n": 2},
        {"n": True},
        {"colour": "red"},
    ],
    ids=lambda sampling: str(sampling)[:30],
)
def test_limits_of_sampling_fields_agree(sampling: dict[str, Any]) -> None:
    """At the limits that are not ranges of the engine, the schema and the server agree."""
    assert fits(SCHEMAS["SessionSampling"], sampling) == takes(read_sampling, sampling)


@pytest.mark.parametrize("limit", [None, 0, 2**53, 2**53 + 1, -1])
def test_quota_body_agrees(limit: int | None) -> None:
    """The body of a quota has the names and the range that the server checks, and the SDK the same names."""
    content = DOCUMENT["paths"]["/v1/admin/tenants/{tenant_id}/quota"]["put"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]

    assert set(schema["properties"]) == set(Quota.model_fields) == set(QuotaLimits.__annotations__)
    for name in Quota.model_fields:
        assert fits(schema, {name: limit}) == takes(StoredQuota.from_mapping, {name: limit})
    assert fits(schema, {"colour": 1}) == takes(StoredQuota.from_mapping, {"colour": 1})


def schemas_of_bodies() -> set[str]:
    """The names of the schemas that request bodies in JSON refer to, also through other schemas."""
    found: set[str] = set()
    waiting: list[Any] = [
        operation["requestBody"]["content"].get("application/json")
        for operations in DOCUMENT["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    while waiting:
        match waiting.pop():
            case {"$ref": str(reference)}:
                name = reference.rpartition("/")[2]
                if name not in found:
                    found.add(name)
                    waiting.append(SCHEMAS[name])
            case dict(each):
                waiting += each.values()
            case list(each):
                waiting += each
    return found


def test_every_field_of_a_body_is_described() -> None:
    """Each schema of a body has a description, and so has each of its fields except `type`."""
    names = schemas_of_bodies()

    assert {"SessionSampling", "FunctionTool", "TextPart", "ResponseFormatJsonSchema"} <= names
    for name in names:
        assert SCHEMAS[name]["description"], name
        for field, schema in SCHEMAS[name]["properties"].items():
            assert field == "type" or schema.get("description"), (name, field)


def test_no_field_of_a_body_is_an_object_without_a_schema() -> None:
    """Only JSON Schemas, structural tags, variables of templates and the arguments of calls are objects of any shape."""
    loose = {
        (name, field)
        for name in schemas_of_bodies()
        for field, schema in SCHEMAS[name]["properties"].items()
        if '"additionalProperties": true' in json.dumps(schema)
    }

    schemas = {"parameters", "input_schema", "schema", "json", "guided_json"}
    assert {field for _, field in loose} == schemas | {"structural_tag", "input", "chat_template_kwargs"}
    assert {name for name, field in loose if field == "input"} == {"ToolUseBlockParam"}
