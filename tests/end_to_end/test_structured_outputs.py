"""Tests of tools and structured answers from the demo model on every API."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from graftwork import Graftwork
from graftwork.demo.tasks import TOOLS, held_out_cases
from tests.end_to_end.conftest import DemoServer

MODEL = "graftwork-demo"
WEATHER: Any = TOOLS["get_weather"]
PARAMETERS: Any = WEATHER["function"]["parameters"]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris today?"}]
GREETING: Any = [{"role": "user", "content": "Hello"}]


class Trip(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=30)
    stops: list[Literal["a", "b"]] = Field(max_length=2)


FORM: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "trip",
        "schema": Trip.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    },
}


@pytest.fixture
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("Plain")) as client:
        yield client


def test_constrained_calls_are_the_model_s_own(client: openai.OpenAI) -> None:
    """Under `auto` the greedy answers to held-out cases are the expected calls, so masks forbid nothing that fits."""
    cases = [case for kind in ("call", "answer", "chat") for case in held_out_cases("base", 6, seed=3, kind=kind)]

    for case in cases:
        for call in (call for message in case.messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        messages: Any = case.messages
        tools: Any = case.tools
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools or openai.omit, temperature=0, max_tokens=120
        )
        message = answer.choices[0].message
        written = [
            f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments}}}\n</tool_call>'
            for call in message.tool_calls or ()
            if call.type == "function"
        ]

        assert "\n".join([*([message.content] if message.content else []), *written]) == case.expected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for_comes(client: openai.OpenAI, choice: Any) -> None:
    """A required call comes even in answer to a greeting at high temperature; finished calls parse and validate."""
    finished = 0
    for seed in range(5):
        answer = client.chat.completions.create(
            model=MODEL, messages=GREETING, tools=[WEATHER], tool_choice=choice, temperature=1.5, seed=seed, max_tokens=200,
            parallel_tool_calls=False,
        )  # fmt: skip
        call = next(iter(answer.choices[0].message.tool_calls or ()), None)
        if answer.choices[0].finish_reason == "tool_calls" and call is not None and call.type == "function":
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
            finished += 1
        else:
            assert answer.choices[0].finish_reason == "length"

    assert finished


def test_answers_of_a_schema_validate_on_every_face(server: DemoServer, client: openai.OpenAI) -> None:
    """An answer with a schema validates in every API, at low and high temperature."""
    texts = []
    for temperature in (0.0, 1.0):
        parsed = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Trip, temperature=temperature, max_tokens=150
        )
        assert parsed.choices[0].message.parsed is not None
        response = client.responses.parse(
            model=MODEL, input="Where?", text_format=Trip, temperature=temperature, max_output_tokens=150
        )
        assert response.output_parsed is not None
        plain = client.completions.create(
            model=MODEL, prompt="Once", temperature=temperature, max_tokens=150, extra_body={"response_format": FORM}
        )
        texts.append(plain.choices[0].text)
        with anthropic.Anthropic(base_url=server.url, api_key=server.key("Plain")) as messages:
            schema = FORM["json_schema"]["schema"]
            told = messages.messages.create(
                model=MODEL, max_tokens=150, messages=ASK, extra_body={"temperature": temperature},
                output_config={"format": {"type": "json_schema", "schema": schema}},
            )  # fmt: skip
            assert told.content[0].type == "text"
            texts.append(told.content[0].text)
        with Graftwork(server.url, api_key=server.key("Plain")) as ours:
            session = ours.sessions.create(model=MODEL)
            turn = session.turn(
                "Where?", response_format=FORM, sampling={"temperature": temperature, "max_tokens": 150}
            )
            texts.append(turn.text)

    for text in texts:
        Trip.model_validate_json(text)


def test_tools_and_a_form_in_one_request(client: openai.OpenAI) -> None:
    """A request with tools and a schema gets a call first, and an answer of the schema after the result."""
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER], response_format=FORM, temperature=0, max_tokens=150
    )
    call = (first.choices[0].message.tool_calls or [])[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 20}'}
    history: Any = [*ASK, first.choices[0].message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(
        model=MODEL, messages=history, tools=[WEATHER], response_format=FORM, temperature=0, max_tokens=150
    )

    message = second.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    if message.tool_calls:
        assert message.tool_calls[0].type == "function"
        jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), PARAMETERS)
    else:
        Trip.model_validate_json(message.content or "")


def test_what_cannot_be_kept_ends_that_request_alone(client: openai.OpenAI) -> None:
    """A grammar that does not compile or has a dead end is a 400 with its field, and the server continues."""
    for grammar in ("root ::= nope", 'root ::= root "a"'):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"grammar": grammar})
        assert refused.value.param == "grammar"

    answer = client.completions.create(model=MODEL, prompt="Once", extra_body={"regex": "[a-c]{3}"})
    assert set(answer.choices[0].text) <= set("abc")
