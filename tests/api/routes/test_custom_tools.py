"""Tests of custom tools, namespaces and OpenAI's own tools in the Responses API."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.in_process_gateway import Gateway, TestTenant, session_frames
from tests.api.routes.test_responses import ask
from tests.sessions.tokenizer_and_templates import text_tokenizer

WRITE = {"type": "custom", "name": "write", "description": "Write a file."}
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
FILES = {"type": "namespace", "name": "files", "tools": [READ, WRITE]}
TEXT = 'a "b"\n\\ é'
OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


async def stream(tenant: TestTenant, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": "Hello", "stream": True, **fields}
    answer = await tenant.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(frame["data"]) for frame in session_frames(answer.text)]


def prompt(gateway: Gateway, index: int = -1) -> str:
    return text_tokenizer().decode(gateway.engine.requests[index].prompt_token_ids)


async def test_a_call_of_a_custom_tool(gateway: Gateway, tenant: TestTenant) -> None:
    """The call has the text itself, streamed and whole, and can be fetched again."""
    gateway.engine.text = f"Look. {call('write', input=TEXT)}"

    events = await stream(tenant, tools=[WRITE])
    body = events[-1]["response"]
    again = (await tenant.client.get(f"/v1/responses/{body['id']}")).json()

    for event in events:
        OPENAI_EVENT.validate_python(event)
    message, made = body["output"]
    assert (message["type"], made["type"], made["name"], made["input"]) == (
        "message",
        "custom_tool_call",
        "write",
        TEXT,
    )
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == TEXT
    assert {event["item_id"] for event in events if "custom_tool_call" in event["type"]} == {made["id"]}
    assert again == body
    assert body["tools"] == [{**WRITE, "format": {"type": "text"}}]


async def test_the_model_sees_a_function(gateway: Gateway, tenant: TestTenant) -> None:
    """The prompt has a function with one text, with the grammar in its description, and a strict grammar follows it."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}

    await ask(tenant, tools=[{**WRITE, "format": grammar}])

    assert '"name": "write"' in prompt(gateway)
    assert 'start: \\"x\\"+' in prompt(gateway)
    assert '"pattern"' not in prompt(gateway)
    source = gateway.engine.requests[-1].grammar
    assert source is not None
    assert source.strict
    schema = json.loads(source.text)["calls"][0]["schema"]
    assert schema["properties"]["input"] == {"type": "string", "pattern": "^(?:(?:x)+)$"}


async def test_outputs_of_custom_tools(gateway: Gateway, tenant: TestTenant) -> None:
    """The next response continues with the output, and the same history as input has the same prompt."""
    gateway.engine.text = call("write", input=TEXT)
    first = await ask(tenant, tools=[WRITE])
    (made,) = first["output"]
    output = {
        "type": "custom_tool_call_output",
        "call_id": made["call_id"],
        "output": [{"type": "input_text", "text": "ok"}],
    }
    gateway.engine.text = "Done."

    missing = await tenant.client.post(
        "/v1/responses", json={"model": "tiny", "input": "Hi", "previous_response_id": first["id"]}
    )
    second = await ask(tenant, input=[output], tools=[WRITE], previous_response_id=first["id"])
    await ask(tenant, input=[{"role": "user", "content": "Hello"}, made, output], tools=[WRITE])

    assert missing.status_code == 400
    assert second["status"] == "completed"
    assert gateway.engine.requests[1].prompt_token_ids == gateway.engine.requests[2].prompt_token_ids
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in prompt(gateway)
    listed = (await tenant.client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    assert [(item["type"], item["output"]) for item in listed] == [("custom_tool_call_output", "ok")]


async def test_a_conversation_keeps_custom_calls(gateway: Gateway, tenant: TestTenant) -> None:
    """The items of a conversation have the calls as the responses had them, and may be named by their ids."""
    conversation = (await tenant.client.post("/v1/conversations", json={})).json()["id"]
    gateway.engine.text = call("files.write", input=TEXT)

    (made,) = (await ask(tenant, tools=[FILES], conversation=conversation))["output"]

    items = (await tenant.client.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert items[0] == made
    session = (await tenant.client.get(f"/v1/sessions/{conversation}")).json()
    assert (session["status"], session["awaiting"]) == ("awaiting_tool", [made["call_id"]])


async def test_namespaces(gateway: Gateway, tenant: TestTenant) -> None:
    """Calls of the tools in a namespace have its name beside their own, streamed, whole and in the history."""
    gateway.engine.text = call("files.read") + "\n" + call("files.write", input="x") + "\n" + call("read")

    events = await stream(tenant, tools=[FILES, READ])
    made = events[-1]["response"]["output"]
    outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in made]
    await ask(tenant, input=[*made, *outputs], tools=[FILES, READ])

    kinds = [(item["type"], item.get("namespace"), item["name"]) for item in made]
    assert kinds == [
        ("function_call", "files", "read"),
        ("custom_tool_call", "files", "write"),
        ("function_call", None, "read"),
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("namespace") for item in added] == ["files", "files", None]
    assert '"name": "files.write", "arguments": {"input": "x"}' in prompt(gateway)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "write"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "write"}, {"type": "mcp"}]},
    ],
)
async def test_a_custom_tool_can_be_chosen(gateway: Gateway, tenant: TestTenant, choice: dict[str, Any]) -> None:
    """`tool_choice` may name a custom tool, alone or in a list."""
    gateway.engine.text = call("write", input="x")

    body = await ask(tenant, tools=[READ, WRITE], tool_choice=choice)

    source = gateway.engine.requests[-1].grammar
    assert source is not None
    tag = json.loads(source.text)
    assert (tag["required"], len(tag["calls"])) == (True, 1)
    assert body["tool_choice"] == choice


async def test_tools_of_openai_are_ignored(gateway: Gateway, tenant: TestTenant) -> None:
    """What the server cannot run is left out, and a header of the answer names it."""
    hosted = {"type": "web_search", "external_web_access": False}
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "Hi"}]
    space = {"type": "namespace", "name": "n", "tools": [{"type": "tool_search"}, READ]}
    body = {"model": "tiny", "input": items, "tools": [READ, hosted, {"type": "web_search_preview_2025_03_11"}, space]}

    answers = [await tenant.client.post("/v1/responses", json={**body, "stream": each}) for each in (False, True)]
    plain = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hi"})

    for answer in answers:
        assert answer.headers["x-graftwork-ignored"] == (
            "tools[1] (web_search), tools[2] (web_search_preview_2025_03_11), tools[3].tools[0] (tool_search), "
            "input[0] (reasoning)"
        )
    assert [tool["type"] for tool in answers[0].json()["tools"]] == ["function", "namespace"]
    assert "web_search" not in prompt(gateway, 0)
    assert "x-graftwork-ignored" not in plain.headers


async def test_what_is_not_enforced_is_named_by_its_place(tenant: TestTenant) -> None:
    """After a tool that is left out, and in a namespace, the header has the paths of the request."""
    loose = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"format": "color"}}},
    }
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [READ, loose]}]

    answer = await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": tools})

    assert answer.headers["x-graftwork-unenforced"].startswith("tools[1].tools[1].parameters#/")


async def test_a_shell_of_another_model(gateway: Gateway, tenant: TestTenant) -> None:
    """Calls of OpenAI's tool for a shell in a history are calls of a function to this model."""
    action = {"type": "exec", "command": ["ls"]}
    said = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": action, "status": "completed"}
    for output in ({"call_id": "c1"}, {"id": "c1"}):
        await ask(tenant, input=[said, {"type": "local_shell_call_output", **output, "output": "a.txt"}])

        assert '{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}' in prompt(gateway)
        assert "a.txt" in prompt(gateway)


async def test_a_call_that_is_cut(gateway: Gateway, tenant: TestTenant) -> None:
    """A call that the token limit cuts has the text up to there, streamed and stored."""
    gateway.engine.text = call("write", input="x" * 200)

    events = await stream(tenant, tools=[WRITE], max_output_tokens=80)

    body = events[-1]["response"]
    (made,) = body["output"]
    assert (body["status"], made["status"]) == ("incomplete", "incomplete")
    assert set(made["input"]) == {"x"}
    assert (await tenant.client.get(f"/v1/responses/{body['id']}")).json() == body
