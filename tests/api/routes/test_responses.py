"""Tests of the routes of the Responses API."""

import json
from typing import Any

from graftwork.api.formats.responses import ResponsesRoute
from graftwork.api.routes import responses
from graftwork.platform.errors import Unavailable, ValidationFailed
from graftwork.platform.quotas.quota import Quota
from tests.api.in_process_gateway import Gateway, TestTenant, session_frames

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "write"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'


def lark(definition: str) -> dict[str, str]:
    """The format of a custom tool whose text follows a Lark grammar."""
    return {"type": "grammar", "syntax": "lark", "definition": definition}


async def ask(tenant: TestTenant, **fields: Any) -> dict[str, Any]:
    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hello", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
    (
        {"input": [{"type": "function_call", "namespace": 1, "call_id": "c", "name": "f", "arguments": "{}"}]},
        "input[0].namespace",
    ),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_é"}]}, "input[0].id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"instructions": ["Be brief."]}, "instructions"),
    ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools[0].format.type"),
    (
        {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]},
        "tools[0].format.syntax",
    ),
    ({"tools": [{"type": "web_search"}, {**CUSTOM, "format": lark("start: a")}]}, "tools[1].format.definition"),
    ({"tools": [{**CUSTOM, "format": lark('start: "(" start? ")"')}]}, "tools[0].format.definition"),
    (
        {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)"}}]},
        "tools[0].format.definition",
    ),
    ({"tools": [CUSTOM, {**TOOL, "name": "write"}]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "teleport"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "mcp"}, {"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]}, "tools[1].tools[1].name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": "loudest"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"truncation": "middle"}, "truncation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"store": "no"}, "store"),
    ({"store": False, "background": True}, "background"),
    ({"store": False, "conversation": "conv_1"}, "conversation"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {}}, "conversation"),
    ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
]
"""Fields of a body, and the one of them that is to blame."""


async def test_bad_bodies(gateway: Gateway, tenant: TestTenant) -> None:
    """An invalid value is a 400 with this API's field name, and nothing reaches the engine."""
    found = []
    for fields, _ in BAD_FIELDS:
        answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hello", **fields})
        found.append((answer.status_code, answer.json()["error"]["param"]))

    assert found == [(400, param) for _, param in BAD_FIELDS]
    assert gateway.engine.requests == []


def test_fields_have_this_api_s_names() -> None:
    """Errors of the session service have this API's field names."""
    route = next(route for route in responses.router.routes if isinstance(route, ResponsesRoute))
    pairs = {
        "tools[3].function.strict": "tools[3].strict",
        "tools[3].function": "tools[3]",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "sampling.max_completion_tokens": "max_output_tokens",
        "sampling.top_p": "top_p",
        "input": "input",
    }

    told = [route.as_route_error(ValidationFailed(f"{param} is not served.", param=param)) for param in pairs]

    assert [error.status for error in told] == [400] * len(pairs)
    assert [error.param for error in told] == list(pairs.values())
    assert [error.message for error in told] == [f"{name} is not served." for name in pairs.values()]


async def test_what_is_ignored(tenant: TestTenant) -> None:
    """Hints and unknown fields do not change the answer."""
    body = await ask(
        tenant,
        user="u",
        service_tier="auto",
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        prompt_cache_key="k",
        safety_identifier="s",
        text={"format": {"type": "text"}, "verbosity": "low"},
        tools=[],
        conversation=None,
        stream_options={"include_obfuscation": False},
        brand_new_field={"a": 1},
    )

    assert body["status"] == "completed"
    assert (body["text"], body["truncation"]) == ({"format": {"type": "text"}}, "disabled")


async def test_the_request_is_echoed(tenant: TestTenant) -> None:
    """A response repeats the request's fields, with tools in their original form."""
    tool = {**TOOL, "description": None, "strict": False}

    body = await ask(
        tenant, tools=[tool], tool_choice="none", parallel_tool_calls=False, max_output_tokens=9, top_p=0.5, seed=1
    )

    assert body["tools"] == [tool]
    assert (body["tool_choice"], body["parallel_tool_calls"], body["max_output_tokens"]) == ("none", False, 9)
    assert (body["temperature"], body["top_p"], body["service_tier"]) == (1.0, 0.5, "default")


async def test_every_sampling_field_reaches_the_engine(gateway: Gateway, tenant: TestTenant) -> None:
    """Sampling fields of chat completions work here too."""
    await ask(tenant, presence_penalty=0.5, logit_bias={"7": -1}, stop_token_ids=[5], seed=3)

    sampling = gateway.engine.requests[-1].sampling
    assert (sampling.presence_penalty, sampling.logit_bias) == (0.5, ((7, -1.0),))
    assert (sampling.stop_token_ids, sampling.seed) == ((5,), 3)


async def test_tool_choice_none(gateway: Gateway, tenant: TestTenant) -> None:
    """With `none` a call in the output is text, and with `auto` it is a call."""
    gateway.engine.text = CALL

    as_text = await ask(tenant, tools=[TOOL], tool_choice="none")
    as_call = await ask(tenant, tools=[TOOL])

    assert as_text["output"][0]["content"][0]["text"] == CALL
    assert [item["type"] for item in as_call["output"]] == ["function_call"]


async def test_stream_frames(tenant: TestTenant) -> None:
    """Each frame has the name of its event's type, and the last frame is the terminal event without a `[DONE]`."""
    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hello", "stream": True})

    frames = session_frames(answer.text)
    data = [json.loads(frame["data"]) for frame in frames]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [frame["event"] for frame in frames] == [entry["type"] for entry in data]
    assert data[-1]["type"] == "response.completed"


async def test_replay_is_the_original(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream that is fetched later has the bytes of the original, from any number on."""
    gateway.engine.text = f"Let me look. {CALL}"
    body = {"model": "tiny", "input": "Hello", "stream": True, "tools": [TOOL]}
    original = (await tenant.client.post("/v1/responses", json=body)).text
    frames = original.split("\n\n")[:-1]
    response_id = json.loads(session_frames(original)[0]["data"])["response"]["id"]
    path = f"/v1/responses/{response_id}?stream=true"

    whole = (await tenant.client.get(path)).text
    parts = [(await tenant.client.get(f"{path}&starting_after={number}")).text for number in (0, 5, len(frames) - 1)]

    assert whole == original
    assert parts == ["".join(f"{frame}\n\n" for frame in frames[start:]) for start in (1, 6, len(frames))]


async def test_queries(tenant: TestTenant) -> None:
    """`starting_after` without a stream, or with a text that is no number, is refused with its name."""
    path = f"/v1/responses/{(await ask(tenant))['id']}"

    alone = await tenant.client.get(f"{path}?starting_after=3")
    wrong = await tenant.client.get(f"{path}?stream=true&starting_after=x")
    order = await tenant.client.get(f"{path}/input_items?order=sideways")

    for answer, param in ((alone, "starting_after"), (wrong, "starting_after"), (order, "order")):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_quota_holds(gateway: Gateway) -> None:
    """A response obeys the tenant's limits, and a refused one leaves nothing stored."""
    poor = await gateway.tenant("Poor", Quota(requests_per_minute=1, max_sessions=0))
    async with poor.client:
        first = await poor.client.post("/v1/responses", json={"model": "tiny", "input": "Hello"})
        second = await poor.client.post("/v1/responses", json={"model": "tiny", "input": "Hello"})

    assert (first.status_code, second.status_code) == (200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "1"


async def test_a_failure_before_the_answer_is_an_error(gateway: Gateway, tenant: TestTenant) -> None:
    """A refusal by the engine is an error, streamed or not; in the background it is a failed response."""
    gateway.engine.refusal = Unavailable("No engine.")
    body = {"model": "tiny", "input": "Hello"}

    plain = await tenant.client.post("/v1/responses", json=body)
    streamed = await tenant.client.post("/v1/responses", json={**body, "stream": True})
    background = await tenant.client.post("/v1/responses", json={**body, "background": True, "stream": True})

    assert (plain.status_code, streamed.status_code) == (503, 503)
    last = json.loads(session_frames(background.text)[-1]["data"])
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "No engine.")


async def test_conversations(tenant: TestTenant) -> None:
    """A conversation is created, changed, listed and deleted, and other ids are not found."""
    made = (await tenant.client.post("/v1/conversations", json={"metadata": {"a": "b"}})).json()
    path = f"/v1/conversations/{made['id']}"
    session_id = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]

    changed = (await tenant.client.post(path, json={"metadata": {"c": "d"}})).json()
    items = (await tenant.client.get(f"{path}/items")).json()
    session = await tenant.client.get(f"/v1/conversations/{session_id}")
    gone = (await tenant.client.delete(path)).json()

    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    assert changed == {**made, "metadata": {"c": "d"}}
    assert (items["object"], items["data"]) == ("list", [])
    assert session.status_code == 404
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert (await tenant.client.get(path)).status_code == 404


async def test_a_conversation_begins_with_what_was_said(gateway: Gateway, tenant: TestTenant) -> None:
    """The first response in a conversation has the same prompt as one that gets the conversation's items as input."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = [{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    new = {"role": "user", "content": "And?"}
    made = (await tenant.client.post("/v1/conversations", json={"items": said})).json()
    path = f"/v1/conversations/{made['id']}"

    items = (await tenant.client.get(f"{path}/items?order=asc")).json()["data"]
    inside = [await ask(tenant, input=[new], conversation=made["id"], tools=[TOOL]) for _ in range(2)]
    first = await ask(tenant, input=[*said, new], tools=[TOOL])
    await ask(tenant, input=[new], previous_response_id=first["id"], tools=[TOOL])
    asked = (await tenant.client.get(f"/v1/responses/{inside[0]['id']}/input_items")).json()["data"]

    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
    one, two, same_as_one, same_as_two = [request.prompt_token_ids for request in gateway.engine.requests]
    assert (one, two) == (same_as_one, same_as_two)
    assert [item["content"][0]["text"] for item in asked] == ["And?"]
    assert len((await tenant.client.get(f"{path}/items")).json()["data"]) == 7


async def test_a_conversation_refuses_what_it_cannot_begin_with(tenant: TestTenant) -> None:
    """A refused item of a new conversation is named."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    for items, param in (
        ([{"role": "robot", "content": "x"}], "items[0].role"),
        ([{"type": "compaction"}], "items[0].type"),
        ([call], "items"),
        ([output], "items[0].call_id"),
        ([call, output, output], "items[2].call_id"),
    ):
        refused = await tenant.client.post("/v1/conversations", json={"items": items})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_unstored_responses_cannot_be_fetched(gateway: Gateway, tenant: TestTenant) -> None:
    """With `store: false` the response cannot be fetched, streamed or not."""
    plain = await ask(tenant, store=False)
    answer = await tenant.client.post(
        "/v1/responses", json={"model": "tiny", "input": "Hello", "store": False, "stream": True}
    )
    streamed = json.loads(session_frames(answer.text)[-1]["data"])["response"]

    assert (plain["store"], streamed["status"]) == (False, "completed")
    for body in (plain, streamed):
        assert (await tenant.client.get(f"/v1/responses/{body['id']}")).status_code == 404


async def test_idempotency_of_streams(gateway: Gateway, tenant: TestTenant) -> None:
    """A repeated background stream is the same stream; any other was cancelled with its client and is generated again."""
    body, key = {"model": "tiny", "input": "Hello", "stream": True}, {"idempotency-key": "one"}

    first = await tenant.client.post("/v1/responses", json=body | {"background": True}, headers=key)
    again = await tenant.client.post("/v1/responses", json=body | {"background": True}, headers=key)
    alone = [await tenant.client.post("/v1/responses", json=body, headers={"idempotency-key": "two"}) for _ in range(2)]

    assert again.headers["idempotent-replayed"] == "true"
    assert again.text == first.text
    assert "response.completed" in again.text
    assert all("response.completed" in answer.text for answer in alone)
    assert alone[0].text != alone[1].text
    assert len(gateway.engine.requests) == 3


async def test_idempotency(gateway: Gateway, tenant: TestTenant) -> None:
    """The same key and body get the same response in its current state; without `store` it is generated again."""
    body, key = {"model": "tiny", "input": "Hello"}, {"idempotency-key": "one"}
    unstored = {**body, "store": False}

    first = await tenant.client.post("/v1/responses", json=body, headers=key)
    again = await tenant.client.post("/v1/responses", json=body, headers=key)
    other = await tenant.client.post("/v1/responses", json=unstored | {"store": True}, headers=key)
    anew = [
        (await tenant.client.post("/v1/responses", json=unstored, headers={"idempotency-key": "two"})).json()["id"]
        for _ in range(2)
    ]
    await tenant.client.delete(f"/v1/responses/{first.json()['id']}")
    deleted = await tenant.client.post("/v1/responses", json=body, headers=key)

    assert (again.status_code, again.json()) == (200, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    assert (other.status_code, deleted.status_code) == (409, 404)
    assert len(set(anew)) == 2
    assert len(gateway.engine.requests) == 3
