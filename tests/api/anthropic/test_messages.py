"""Tests of `POST /v1/messages`: prompts, refusals, answers and pings."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from graftwork.api.anthropic.answer import write_anthropic_events
from graftwork.api.anthropic.messages import chat_messages
from graftwork.api.anthropic.schemas import ConversationMessage, MessagesRequest
from graftwork.api.anthropic.translate import translate
from graftwork.api.deps.background import ServerTasks
from graftwork.api.inference.job import ResponseHead
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from tests.api.fake_engine import CONTEXT_TOKENS, FakeEngine
from tests.api.in_process_gateway import Gateway, TestTenant, session_frames
from tests.api.inference_jobs import make_job

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}], **fields}


def said(role: str, *blocks: dict[str, Any]) -> ConversationMessage:
    return ConversationMessage.model_validate({"role": role, "content": list(blocks)})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


async def test_prompts_are_those_of_chat_completions(gateway: Gateway, tenant: TestTenant) -> None:
    """A conversation with tools makes the same prompt as in chat.completions, token for token."""
    conversation = [
        {"role": "user", "content": [text("Weather?")]},
        {
            "role": "assistant",
            "content": [
                text("Let me see."),
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "20 degrees"}, text("And?")],
        },
    ]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
        {"role": "user", "content": "And?"},
    ]

    await tenant.client.post("/v1/messages", json=body(messages=conversation, system=[text("Be brief.")], tools=[TOOL]))
    await tenant.client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": chat, "tools": [CHAT_TOOL], "max_tokens": 50}
    )
    theirs, ours = gateway.engine.requests

    assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert replace(theirs.sampling, seed=None) == replace(ours.sampling, seed=None)


def test_results_come_before_what_is_said_about_them() -> None:
    """The messages have the order of the blocks, and a tool's error is marked as an error."""
    message = said(
        "user",
        {"type": "tool_result", "tool_use_id": "a", "content": [text("one"), text("two")]},
        {"type": "tool_result", "tool_use_id": "b", "content": "no luck", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        text("Go"),
        text("on"),
    )

    found = chat_messages(None, [message])

    assert found == [
        {"role": "tool", "tool_call_id": "a", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "b", "content": '{"error": "no luck"}'},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]},
    ]


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("user", IMAGE, "messages[0].content[1]"),
        ("user", {"type": "document", "source": {}}, "messages[0].content[1]"),
        ("user", {"type": "document", "source": PDF}, "messages[0].content[1]"),
        ("user", {"type": "document"}, "messages[0].content[1].source"),
        (
            "user",
            {"type": "document", "source": {"type": "content", "content": [IMAGE]}},
            "messages[0].content[1].source.content[0]",
        ),
        ("user", {"type": "search_result", "title": "a", "source": "b"}, "messages[0].content[1].content"),
        ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, "messages[0].content[1]"),
        ("user", {"type": "tool_result", "content": "x"}, "messages[0].content[1].tool_use_id"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "a", "content": [text("x"), IMAGE]},
            "messages[0].content[1].content[1]",
        ),
        ("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, "messages[0].content[1].input"),
        ("assistant", {"type": "server_tool_use", "id": "a", "name": "web_search"}, "messages[0].content[1]"),
        ("assistant", {"type": "text"}, "messages[0].content[1].text"),
        ("system", IMAGE, "messages[0].content[1]"),
    ],
)
def test_a_block_that_cannot_be_read_is_named(role: str, block: dict[str, Any], param: str) -> None:
    """Each unsupported block is refused by its position."""
    with pytest.raises(InvalidRequest) as refused:
        chat_messages(None, [said(role, text("Look:"), block)])

    assert refused.value.param == param
    assert param in refused.value.message


async def test_images_are_refused_in_their_own_words(tenant: TestTenant) -> None:
    """An image is a 400 in Anthropic's form that says that images are not served."""
    message = {"role": "user", "content": [text("What is this?"), IMAGE]}

    answer = await tenant.client.post("/v1/messages", json=body(messages=[message]))

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("messages[0].content[1] is an image, but this model reads only text")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"budget_tokens": 1024}}, "thinking.type"),
        ({"thinking": "adaptive"}, "thinking"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences: an empty stop string"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{**TOOL, "name": "no good"}]}, "tools[0].name: "),
        ({"tools": [SEARCH, {**TOOL, "name": "no good"}]}, "tools[1].name: "),
        ({"tools": [SEARCH, {**TOOL, "strict": True, "input_schema": {"type": 5}}]}, "tools[1].input_schema"),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name is 'web_search'",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice asks for a tool call"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].input_schema"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread is not served"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"container": "container_1"}, "container"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_what_is_not_served_is_named(
    gateway: Gateway, tenant: TestTenant, fields: dict[str, Any], complaint: str
) -> None:
    """An unsupported value is a 400 that names Anthropic's field, and nothing is generated."""
    answer = await tenant.client.post("/v1/messages", json=body(**fields))

    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(complaint)
    assert gateway.engine.requests == []


async def test_what_changes_nothing_is_taken(gateway: Gateway, tenant: TestTenant) -> None:
    """Cache marks, metadata, versions, neutral values and unknown fields are accepted."""
    fields = body(
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}],
        service_tier="standard_only",
        speed="standard",
        from_the_future=[1],
    )
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "anything"}
    gateway.engine.text = f"{CALL}\n{CALL}"

    answer = await tenant.client.post("/v1/messages?beta=true", json=fields, headers=headers)

    assert answer.status_code == 200, answer.text
    assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]


@pytest.mark.parametrize(
    ("choice", "translated"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_weather"}, {"type": "function", "function": {"name": "get_weather"}}),
    ],
)
def test_tool_choice_is_chat_completions_own(choice: dict[str, Any], translated: object) -> None:
    """Each `tool_choice` becomes its counterpart in chat.completions."""
    request = MessagesRequest.model_validate(body(tools=[TOOL], tool_choice=choice))

    assert translate(request, {}).chat.tool_choice == translated


def test_a_schema_for_the_answer_is_passed_on() -> None:
    """`output_config.format` becomes the `response_format` of chat.completions."""
    schema = {"type": "object", "properties": {}}
    request = MessagesRequest.model_validate(body(output_config={"format": {"type": "json_schema", "schema": schema}}))

    response_format = translate(request, {}).chat.response_format
    assert response_format is not None
    assert response_format["json_schema"]["schema"] == schema


async def test_blocks_of_an_answer_with_calls(gateway: Gateway, tenant: TestTenant) -> None:
    """Text and calls are separate blocks with consecutive indices, streamed or not."""
    gateway.engine.text = f"One moment.\n{CALL}\n{CALL.replace('Paris', 'Lyon')}"
    whole = (await tenant.client.post("/v1/messages", json=body(max_tokens=500, tools=[TOOL]))).json()

    streamed = await tenant.client.post("/v1/messages", json=body(max_tokens=500, tools=[TOOL], stream=True))

    frames = session_frames(streamed.text)
    events = [json.loads(frame["data"]) for frame in frames]
    assert [frame["event"] for frame in frames] == [event["type"] for event in events]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    spelled = dict.fromkeys(range(3), "")
    for event in events:
        if event["type"] == "content_block_delta":
            spelled[event["index"]] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
    assert spelled[0] == whole["content"][0]["text"] == "One moment."
    assert [json.loads(spelled[index]) for index in (1, 2)] == [block["input"] for block in whole["content"][1:]]
    assert whole["content"][2]["input"] == {"city": "Lyon"}


async def test_a_call_that_the_limit_cut(gateway: Gateway, tenant: TestTenant) -> None:
    """A call that the limit cuts has the reason max_tokens and an empty input."""
    gateway.engine.text = CALL
    whole = (await tenant.client.post("/v1/messages", json=body(tools=[TOOL], max_tokens=500))).json()
    limit = whole["usage"]["output_tokens"] - 8

    cut = (await tenant.client.post("/v1/messages", json=body(tools=[TOOL], max_tokens=limit))).json()

    assert (cut["stop_reason"], [block["input"] for block in cut["content"]]) == ("max_tokens", [{}])


async def test_count_tokens(gateway: Gateway, tenant: TestTenant) -> None:
    """The count is the length of the generated prompt. The last message may have any role."""
    prompt = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "system": "Be brief.", "tools": [TOOL]}
    await tenant.client.post("/v1/messages", json={**prompt, "max_tokens": 3})
    longer = {**prompt, "messages": [*prompt["messages"], {"role": "assistant", "content": "Hello"}]}

    counted = await tenant.client.post("/v1/messages/count_tokens", json=prompt)
    more = await tenant.client.post("/v1/messages/count_tokens", json=longer)
    unknown = await tenant.client.post("/v1/messages/count_tokens", json={**prompt, "model": "nobody"})

    assert counted.json() == {"input_tokens": len(gateway.engine.requests[0].prompt_token_ids)}
    assert more.json()["input_tokens"] > counted.json()["input_tokens"]
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert len(gateway.engine.requests) == 1


async def test_every_error_has_the_form(gateway: Gateway, tenant: TestTenant) -> None:
    """Invalid JSON and unknown keys get errors in Anthropic's shape, with both request ids."""
    json_type = {"content-type": "application/json"}
    broken = await tenant.client.post("/v1/messages", content=b"{", headers=json_type)
    stranger = await gateway.anonymous.post("/v1/messages", json=body())
    too_long = await tenant.client.post(
        "/v1/messages", json=body(messages=[{"role": "user", "content": "x " * CONTEXT_TOKENS}])
    )

    assert [answer.status_code for answer in (broken, stranger, too_long)] == [400, 401, 400]
    for answer in (broken, stranger, too_long):
        assert set(answer.json()) == {"type", "error", "request_id"}
        assert set(answer.json()["error"]) == {"type", "message"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == answer.json()["request_id"]
    assert stranger.headers["www-authenticate"] == "Bearer"
    message = too_long.json()["error"]["message"]
    assert re.fullmatch(rf"prompt is too long: (\d+) tokens > {CONTEXT_TOKENS} maximum", message)


async def test_a_full_context_is_refused_in_anthropics_words(gateway: Gateway, tenant: TestTenant) -> None:
    """A prompt that fits without one token of an answer is refused with the numbers that Claude Code reads."""
    await tenant.client.post("/v1/messages", json=body(messages=[{"role": "user", "content": "x"}]))
    free = CONTEXT_TOKENS - len(gateway.engine.requests[-1].prompt_token_ids)
    messages = [{"role": "user", "content": "x" * free}]
    fitting = await tenant.client.post("/v1/messages", json=body(messages=messages, max_tokens=9000))
    messages = [{"role": "user", "content": "x" * (free + 1)}]

    full = await tenant.client.post("/v1/messages", json=body(messages=messages, max_tokens=9000))

    assert fitting.status_code == 200, "one token of an answer fits, so max_tokens is cut"
    assert gateway.engine.requests[-1].sampling.max_tokens == 1
    assert full.status_code == 400
    assert full.json()["error"] == {
        "type": "invalid_request_error",
        "message": f"input length and `max_tokens` exceed context limit: {CONTEXT_TOKENS} + 9000 > {CONTEXT_TOKENS}",
    }


async def test_metering_is_that_of_every_answer(tenant: TestTenant) -> None:
    """The usage ledger has the same counts as the message's usage."""
    usage = (await tenant.client.post("/v1/messages", json=body())).json()["usage"]

    (row,) = await tenant.usage()
    assert row["prompt_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert row["completion_tokens"] == usage["output_tokens"]


async def test_ping(sqlite_database: Database) -> None:
    """A stream sends pings while no event comes, and continues afterwards."""
    engine, tasks = FakeEngine(holds_after=2), ServerTasks()
    job = make_job(engine, sqlite_database)
    job.start(tasks)
    head = ResponseHead("msg_1", 0, "tiny", "fp_1", "default")

    frames: list[bytes] = []

    async def write(frame: bytes) -> None:
        frames.append(frame)
        if frame.startswith(b"event: ping\n"):
            engine.release.set()

    await write_anthropic_events(head, job, write, ping_after_s=0.001)
    await tasks.close()

    assert frames[0].startswith(b"event: message_start\n")
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in frames
    told = [frame for frame in frames if not frame.startswith(b"event: ping\n")]
    assert told[-1].endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
