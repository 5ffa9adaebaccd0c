"""Tests of tools and structured answers on every API."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.platform.errors import InvalidRequest
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks

HEADER = "x-graftwork-unenforced"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
LOOSE = {"type": "object", "properties": {"a b": {"type": "string", "format": "color"}}}
PLACE = "#/properties/a%20b/format"
ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def tool(parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters or CITY, **fields}}


def flat_tool(parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """As the Responses API has it."""
    return {"type": "function", "name": "get_weather", "parameters": parameters or CITY, **fields}


class GetWeather(BaseModel):
    """Weather in a city."""

    city: str


class Trip(BaseModel):
    city: str
    days: int


@pytest.fixture
async def client(gateway: Gateway, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client


def grammar_of(gateway: Gateway) -> GrammarSource:
    grammar = gateway.engine.requests[-1].grammar
    assert grammar is not None
    return grammar


async def test_the_sdk_parses_answers_into_models(gateway: Gateway, client: AsyncOpenAI) -> None:
    """With `parse` and `stream` the engine gets the Pydantic model's schema, and the caller an instance."""
    gateway.engine.text = '{"city": "Paris", "days": 3}'
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Where?"}],
        "response_format": Trip,
    }

    whole = await client.chat.completions.parse(**ask)
    async with client.chat.completions.stream(**ask) as stream:
        streamed = await stream.get_final_completion()

    assert whole.choices[0].message.parsed == Trip(city="Paris", days=3)
    assert streamed.choices[0].message.parsed == Trip(city="Paris", days=3)
    for request in gateway.engine.requests:
        assert request.grammar is not None
        assert (request.grammar.kind, request.grammar.strict) == (GrammarKind.JSON_SCHEMA, True)
        assert json.loads(request.grammar.text)["required"] == ["city", "days"]


async def test_the_sdk_parses_strict_tools(gateway: Gateway, client: AsyncOpenAI) -> None:
    """With `pydantic_function_tool` the arguments of a call arrive as instances, streamed or not."""
    gateway.engine.text = CALL.replace("get_weather", "GetWeather")
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    ask |= {"tools": [pydantic_function_tool(GetWeather)], "tool_choice": "required"}

    whole = await client.chat.completions.parse(**ask)
    async with client.chat.completions.stream(**ask) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_completion()

    for answer in (whole, streamed):
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].function.parsed_arguments == GetWeather(city="Paris")
        assert answer.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in kinds
    tag = json.loads(grammar_of(gateway).text)
    assert (tag["required"], tag["calls"][0]["begin"]) == (True, '<tool_call>\n{"name": "GetWeather", "arguments": ')


async def test_the_sdk_parses_responses(gateway: Gateway, client: AsyncOpenAI) -> None:
    """With `responses.parse` the engine gets the schema of `text_format`, and the caller an instance."""
    gateway.engine.text = '{"city": "Paris", "days": 3}'

    answer = await client.responses.parse(model="tiny", input="Where?", text_format=Trip)

    assert answer.output_parsed == Trip(city="Paris", days=3)
    assert grammar_of(gateway).kind is GrammarKind.JSON_SCHEMA


async def test_every_face_asks_for_the_same_grammar(gateway: Gateway, tenant: TestTenant) -> None:
    """All APIs give the engine the same grammar for the same tools and choice."""
    http = tenant.client
    messages = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    answers = [
        await http.post("/v1/chat/completions", json=chat(tools=[tool()], tool_choice=named)),
        await http.post(
            "/v1/messages",
            json=messages
            | {
                "tools": [{"name": "get_weather", "input_schema": CITY}],
                "tool_choice": {"type": "tool", "name": "get_weather"},
            },
        ),
        await http.post(
            "/v1/responses",
            json={
                "model": "tiny",
                "input": "x",
                "tools": [flat_tool()],
                "tool_choice": {"type": "function", "name": "get_weather"},
            },
        ),
    ]
    session = (await http.post("/v1/sessions", json={"model": "tiny", "tools": [tool()]})).json()["id"]
    turns = f"/v1/sessions/{session}/turns"
    answers.append(await http.post(turns, json={"input": "x", "tool_choice": named}))

    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    grammars = {request.grammar for request in gateway.engine.requests}
    assert len(grammars) == 1
    assert json.loads(grammar_of(gateway).text)["required"]
    assert all(HEADER not in answer.headers for answer in answers)


async def test_every_face_tells_what_it_lets_go(gateway: Gateway, tenant: TestTenant) -> None:
    """The header names the fields that are not enforced as the API's clients know them, streamed or not."""
    http = tenant.client
    messages = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
    messages |= {"tools": [{"name": "get_weather", "input_schema": LOOSE}]}
    responses = {"model": "tiny", "input": "x", "tools": [flat_tool(LOOSE)]}
    session = (await http.post("/v1/sessions", json={"model": "tiny", "tools": [tool(LOOSE)]})).json()["id"]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": LOOSE}}

    for stream in (False, True):
        told = [
            await http.post("/v1/chat/completions", json=chat(tools=[tool(LOOSE)], stream=stream)),
            await http.post("/v1/messages", json=messages | {"stream": stream}),
            await http.post("/v1/responses", json=responses | {"stream": stream}),
            await http.post(f"/v1/sessions/{session}/turns", json={"input": "x", "stream": stream}),
            await http.post(
                "/v1/completions", json={"model": "tiny", "prompt": "x", "response_format": schema, "stream": stream}
            ),
        ]

        assert [answer.headers.get(HEADER) for answer in told] == [
            f"tools[0].function.parameters{PLACE}",
            f"tools[0].input_schema{PLACE}",
            f"tools[0].parameters{PLACE}",
            f"tools[0].function.parameters{PLACE}",
            f"response_format.json_schema.schema{PLACE}",
        ]


async def test_the_header_is_bounded(tenant: TestTenant) -> None:
    """The header stays short enough for proxies, however many places it has to name."""
    schema = {"type": "object", "properties": {f"p{n}": {"format": "color"} for n in range(60)}}
    body = chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})

    header = (await tenant.client.post("/v1/chat/completions", json=body)).headers[HEADER]

    places = header.split(", ")
    assert len(header) < 2100
    assert 10 < len(places) < 60
    assert places[-1] == f"+{60 - (len(places) - 1)} more"


STRICT = tool(LOOSE, strict=True)
BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/chat/completions", {"tools": [STRICT]}, 400, "tools[0].function.parameters"),
    ("/v1/chat/completions", {"tools": [tool(), tool()]}, 400, "tools[1].function.name"),
    ("/v1/chat/completions", {"tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"tools": [tool()], "tool_choice": "loudest"}, 400, "tool_choice"),
    ("/v1/chat/completions", {"response_format": ANSWER, "regex": "a"}, 400, "regex"),
    ("/v1/chat/completions", {"response_format": ANSWER, "grammar": 'root ::= "a"'}, 400, "grammar"),
    ("/v1/chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ("/v1/chat/completions", {"structural_tag": {"calls": []}}, 400, "structural_tag"),
    ("/v1/completions", {"prompt": "x", "regex": "("}, 400, "regex"),
    ("/v1/completions", {"prompt": "x", "regex": "a", "response_format": ANSWER}, 400, "regex"),
    ("/v1/responses", {"input": "x", "tools": [flat_tool(LOOSE, strict=True)]}, 400, "tools[0].parameters"),
    ("/v1/responses", {"input": "x", "tools": [flat_tool()], "tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": LOOSE, "strict": True}}}, 400, "text.format.schema"),
    ("/v1/responses", {"input": "x", "regex": "a"}, 400, "regex"),
    ("/v1/sessions", {"tools": [STRICT]}, 422, "tools[0].function.parameters"),
    ("/v1/sessions", {"tools": [tool() | {"function": {"name": "a b"}}]}, 422, "tools[0].function.name"),
    ("/v1/sessions", {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, 422, "response_format.json_schema.schema"),
]  # fmt: skip


async def test_bad_values_name_their_field(gateway: Gateway, tenant: TestTenant) -> None:
    """A bad value is refused with its field before anything is reserved or sent to the engine."""
    found = []
    for route, fields, _, _ in BAD:
        body = (chat() if "chat" in route else {"model": "tiny"}) | fields
        answer = await tenant.client.post(route, json=body)
        found.append((route, fields, answer.status_code, answer.json()["error"]["param"]))

    assert found == BAD
    assert gateway.engine.requests == []


async def test_messages_complain_in_their_own_words(gateway: Gateway, tenant: TestTenant) -> None:
    """Errors of the Messages API name Anthropic's fields."""
    tools: list[Any] = [{"name": "get_weather", "input_schema": LOOSE, "strict": True}]

    async with gateway_on_port(gateway) as url, anthropic.AsyncAnthropic(base_url=url, api_key=tenant.key) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(
                model="tiny", max_tokens=9, messages=[{"role": "user", "content": "x"}], tools=tools
            )

    assert "tools[0].input_schema" in refused.value.message
    assert "#/properties/a b/format" in refused.value.message


async def test_what_the_engine_finds_is_blamed_on_the_field(gateway: Gateway, tenant: TestTenant) -> None:
    """A grammar that does not compile is a 400 with its field, and a failed turn in a session."""
    gateway.engine.refusal = InvalidRequest("No rule nope.", param="#", code="unsupported_grammar")
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]

    streamed = await tenant.client.post("/v1/chat/completions", json=chat(grammar="root ::= nope", stream=True))
    responses = await tenant.client.post(
        "/v1/responses", json={"model": "tiny", "input": "x", "text": {"format": {"type": "json_object"}}}
    )
    turn = await tenant.client.post(
        f"/v1/sessions/{session}/turns", json={"input": "x", "response_format": {"type": "json_object"}}
    )

    told = [(answer.status_code, answer.json()["error"]["param"]) for answer in (streamed, responses, turn)]
    assert told == [(400, "grammar"), (400, "text.format"), (422, "response_format")]


async def test_a_dead_end_ends_that_answer_alone(gateway: Gateway, tenant: TestTenant) -> None:
    """A dead end after the first tokens is an error event with its code, without [DONE]."""
    gateway.engine.breaks_after = 2
    gateway.engine.breakage = InvalidRequest("No token fits.", code="grammar_dead_end")

    text = (await tenant.client.post("/v1/chat/completions", json=chat(regex="a+", stream=True))).text

    assert json.loads(text.rsplit("data: ", 1)[1])["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": "regex", "code": "grammar_dead_end",
    }  # fmt: skip


async def test_strict_is_not_shown_to_the_model(gateway: Gateway, tenant: TestTenant) -> None:
    """`strict` changes what is enforced, and does not change the prompt."""
    spellings: list[dict[str, Any]] = [{}, {"strict": True}, {"strict": False}]
    for fields in spellings:
        await tenant.client.post("/v1/chat/completions", json=chat(tools=[tool(**fields)]))

    assert len({request.prompt_token_ids for request in gateway.engine.requests}) == 1


async def test_a_streamed_call_has_no_empty_text_before_it(gateway: Gateway, tenant: TestTenant) -> None:
    """In a stream with tools the first delta has null content, as OpenAI's, so that no text stands before the call."""
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    gateway.engine.text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'

    called = chunks((await tenant.client.post("/v1/chat/completions", json=chat(tools=tools, stream=True))).text)
    gateway.engine.text = "Sunny."
    plain = chunks((await tenant.client.post("/v1/chat/completions", json=chat(stream=True))).text)

    deltas = [chunk["choices"][0]["delta"] for chunk in called]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert not any("content" in delta for delta in deltas[1:])
    assert deltas[1]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
