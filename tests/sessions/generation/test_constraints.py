"""Tests of the constraint planner: what its grammars accept, how calls are parsed, and what is refused."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from benchmarks.suite_cases import BYTES, Judge

from graftwork.engine.core.requests import GrammarKind
from graftwork.engine.grammar.matching.matcher import Compiled
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.generation.constraints import (
    ConstraintPlanner,
    OutputConstraints,
    OutputPlan,
    ResponseFormatFields,
)
from graftwork.sessions.tools.formats import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, ToolCallFormat
from graftwork.sessions.tools.json_parser import JsonCallParser
from graftwork.sessions.tools.parser_events import CallFinished, PlainText

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"], "additionalProperties": False}  # fmt: skip
LOOSE = {"type": "object", "properties": {"a": {"type": "string", "format": "color"}}}
TOOL_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


WEATHER, PLAN = tool("get_weather", CITY), tool("plan", DAYS)
ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": DAYS}}
NAMED = {"type": "function", "function": {"name": "plan"}}

ROME, OSLO, THREE = ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"}), ("plan", {"days": 3})
NOWHERE = ("get_weather", {"city": "Nowhere"})

Call = tuple[str, dict[str, Any]]
Writer = Callable[..., str]


def hermes(*calls: Call) -> str:
    bodies = (json.dumps({"name": name, "arguments": given}) for name, given in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama(*calls: Call) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def mistral(*calls: Call) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": given} for name, given in calls])


WRITERS: dict[str, Writer] = {"hermes": hermes, "llama3_json": llama, "mistral": mistral}


def plan(written: ToolCallFormat = HERMES, /, **wanted: Any) -> OutputPlan:
    return ConstraintPlanner(written).plan(OutputConstraints(**wanted))


def compiled(judge: Judge, found: OutputPlan) -> Compiled:
    assert found.grammar is not None
    return judge.compiled(lint(found.grammar.source))


def accepted(grammar: Compiled, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete()


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_what_each_choice_lets_an_answer_be(judge: Judge, tool_format: str) -> None:
    """For each format and tool choice, the grammar accepts exactly the texts, calls and answers that it should."""
    write = WRITERS[tool_format]
    texts = ["Hi.", write(ROME), write(THREE), write(ROME, OSLO), write(NOWHERE), '{"days": 4}']
    tools = [WEATHER, PLAN]
    expected: list[tuple[dict[str, Any], list[bool]]] = [
        ({}, [True, True, True, True, False, True]),
        ({"parallel_tool_calls": False}, [True, True, True, False, False, True]),
        ({"tool_choice": "required"}, [False, True, True, True, False, False]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [False, True, True, False, False, False]),
        ({"tool_choice": NAMED}, [False, False, True, False, False, False]),
        ({"response_format": ResponseFormatFields(ANSWER)}, [False, True, True, True, False, True]),
        (
            {"response_format": ResponseFormatFields(ANSWER), "tool_choice": "none"},
            [False, False, False, False, False, True],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            [False, False, True, False, False, False],
        ),
    ]

    for wanted, verdicts in expected:
        grammar = compiled(judge, plan(TOOL_FORMATS[tool_format], tools=tools, **wanted))

        assert [accepted(grammar, text) for text in texts] == verdicts, wanted


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_the_text_of_a_custom_tool_follows_its_grammar(judge: Judge, tool_format: str) -> None:
    """A call of a custom tool has any text, or only a text of its Lark grammar or regular expression."""
    write = WRITERS[tool_format]
    verdicts = []
    for form in (None, ("lark", 'start: "a\\n" B+\nB: /[^x]/'), ("regex", "^a\\n[^x]+$")):
        grammar = {} if form is None else {"syntax": form[0], "definition": form[1]}
        custom = {"name": "run", "format": {"type": "grammar", "grammar": grammar}} if grammar else {"name": "run"}
        compiled_plan = compiled(judge, plan(TOOL_FORMATS[tool_format], tools=[{"type": "custom", "custom": custom}]))
        texts = ('a\n"y\\', "a\nx", "ab", "")
        verdicts.append([accepted(compiled_plan, write(("run", {"input": text}))) for text in texts])
        assert not accepted(compiled_plan, write(("run", {"text": "a"})))

    assert verdicts == [[True] * 4, [True, False, False, False], [True, False, False, False]]


def test_a_grammar_that_no_call_can_be_held_to_is_refused() -> None:
    """A model whose calls cannot be constrained takes custom tools of free text, and refuses those with a grammar."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    free = {"type": "custom", "custom": {"name": "run"}}

    assert plan(PYTHONIC, tools=[free]).calls_tools
    with pytest.raises(InvalidRequest) as refused:
        plan(PYTHONIC, tools=[free, {"type": "custom", "custom": {"name": "sum", "format": grammar}}])
    assert refused.value.param == "tools[1].custom.format"


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_references_in_a_tool_s_schema_are_its_own(judge: Judge, tool_format: str) -> None:
    """In a tool's schema, `#` refers to that schema and not to the whole grammar."""
    schema = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"const": "Rome"}}}
    write = WRITERS[tool_format]

    for fields in (ResponseFormatFields(), ResponseFormatFields(ANSWER)):
        grammar = compiled(
            judge, plan(TOOL_FORMATS[tool_format], tools=[tool("get_weather", schema)], response_format=fields)
        )
        assert (accepted(grammar, write(ROME)), accepted(grammar, write(OSLO))) == (True, False)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_are_read_in_the_form_that_they_are_written_in(tool_format: str) -> None:
    """Calls and the text around them are found, however the text is cut."""
    text = ("Let me see. " if tool_format != "llama3_json" else "") + WRITERS[tool_format](ROME, THREE)

    for size in (1, 3, 1000):
        parser = JsonCallParser(TOOL_FORMATS[tool_format])
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
        calls = [event for event in events if isinstance(event, CallFinished)]

        assert [(call.name, json.loads(call.arguments)) for call in calls] == [ROME, THREE]
        assert "".join(event.text for event in events if isinstance(event, PlainText)).strip() in ("", "Let me see.")


def walk(grammar: Compiled, noise: random.Random, most: int = 600) -> str | None:
    """The output of a model that draws random allowed bytes; None if it did not end."""
    matcher, said = grammar.matcher(), bytearray()
    words = np.zeros(-(-BYTES.size // 32), dtype=np.int32)
    for _ in range(most):
        if matcher.is_complete() and noise.random() < 0.2:
            return said.decode()
        assert matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:256]
        allowed = [int(byte) for byte in np.flatnonzero(bits)]
        if not allowed:
            return said.decode() if matcher.is_complete() else None
        plain = [byte for byte in allowed if chr(byte) in '"}],:{[0123456789']
        said.append(noise.choice(plain if plain and noise.random() < 0.8 else allowed))
        assert matcher.accept(said[-1])
    return None


def any_schema(noise: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema with the usual keywords of tools."""
    kinds = ["string", "integer", "number", "boolean", "enum", *(["array", "object"] if depth < 2 else [])]
    match noise.choice(kinds) if depth else "object":
        case "string":
            return noise.choice([{"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^[a-f]{2,4}$"}])
        case "integer":
            return {"type": "integer", "minimum": noise.randint(-9, 5), "maximum": noise.randint(6, 900)}
        case "number" | "boolean" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": noise.sample(["a", 1, None, True, {"x": []}, "b c"], 3)}
        case "array":
            return {"type": "array", "items": any_schema(noise, depth + 1), "maxItems": noise.randint(1, 3)}
        case _:
            names = noise.sample(["a", "b", "city", "when?", 'q"'], noise.randint(1, 3))
            properties = {name: any_schema(noise, depth + 1) for name in names}
            required = [name for name in names if noise.random() < 0.7]
            closed = {"additionalProperties": False} if noise.random() < 0.9 else {}
            return {"type": "object", "properties": properties, "required": required, **closed}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_every_finished_call_of_a_random_model_validates(judge: Judge, tool_format: str) -> None:
    """For random schemas and random bytes, each call names a given tool and matches its schema."""
    noise = random.Random(tool_format)
    finished = 0
    for _ in range(12):
        schemas = {name: any_schema(noise) for name in ("first", "second")}
        tools = [tool(name, schema, strict=True) for name, schema in schemas.items()]
        grammar = compiled(judge, plan(TOOL_FORMATS[tool_format], tools=tools, tool_choice="required"))
        for _ in range(6):
            text = walk(grammar, noise)
            parser = JsonCallParser(TOOL_FORMATS[tool_format])
            events = [] if text is None else [*parser.push(text), *parser.flush()]
            for call in (event for event in events if isinstance(event, CallFinished)):
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
                finished += 1
            assert not any(isinstance(event, PlainText) and event.text.strip() for event in events)

    assert finished > 20


def test_what_is_let_go_is_listed_where_it_is_not_strict() -> None:
    """Without `strict`, or with false, unsupported keywords are reported; with true they are refused, with their place."""
    for strict in ({}, {"strict": False}):
        found = plan(tools=[WEATHER, tool("paint", LOOSE, **strict)])
        assert found.grammar is not None
        assert found.grammar.unenforced == ("tools[1].function.parameters#/properties/a/format",)
        assert not found.grammar.source.strict
    with pytest.raises(InvalidRequest) as refused:
        plan(tools=[WEATHER, tool("paint", LOOSE, strict=True)])

    assert refused.value.param == "tools[1].function.parameters"
    assert "#/properties/a/format" in refused.value.message
    assert refused.value.details == {"pointer": "#/properties/a/format"}


def test_what_is_enforced_wholly_is_strict_and_listed_nowhere() -> None:
    """A schema without unsupported keywords is enforced wholly without `strict`."""
    found = plan(tools=[WEATHER], response_format=ResponseFormatFields(ANSWER))

    assert found.grammar is not None
    assert (found.grammar.source.strict, found.grammar.unenforced) == (True, ())


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        (ResponseFormatFields({"type": "json_object"}), GrammarKind.JSON_OBJECT, "response_format"),
        (ResponseFormatFields(ANSWER), GrammarKind.JSON_SCHEMA, "response_format.json_schema.schema"),
        (ResponseFormatFields(regex="[ab]+"), GrammarKind.REGEX, "regex"),
        (ResponseFormatFields(grammar='root ::= "a"'), GrammarKind.EBNF, "grammar"),
        (ResponseFormatFields(structural_tag={"calls": [{"begin": "<", "schema": {}, "end": ">"}]}), GrammarKind.STRUCTURAL_TAG, "structural_tag"),
    ],
)  # fmt: skip
def test_each_form_is_a_kind_of_grammar(fields: ResponseFormatFields, kind: GrammarKind, param: str) -> None:
    """Each format becomes one kind of grammar, and remembers its request field."""
    found = plan(response_format=fields).grammar

    assert found is not None
    assert (found.source.kind, found.param) == (kind, param)


@pytest.mark.parametrize(
    "fields",
    [ResponseFormatFields(), ResponseFormatFields({"type": "text"}), ResponseFormatFields(regex="", structural_tag={})],
)
def test_nothing_asked_is_nothing_held(fields: ResponseFormatFields) -> None:
    """Free text needs no grammar."""
    assert plan(response_format=fields) == OutputPlan()
    assert plan(tools=[WEATHER], tool_choice="none", response_format=fields) == OutputPlan()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [tool("no spaces")]}, "tools[0].function.name"),
    ({"tools": [tool("line\n")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", {"type": "bogus"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", {"properties": {"a": {"type": "bogus"}}})]}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "loudest"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": 1}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ({"response_format": ResponseFormatFields({"type": "xml"})}, "response_format.type"),
    ({"response_format": ResponseFormatFields({"type": "json_schema"})}, "response_format.json_schema"),
    ({"response_format": ResponseFormatFields({"type": "json_schema", "json_schema": {"name": "x"}})}, "response_format.json_schema.schema"),
    ({"response_format": ResponseFormatFields({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}})}, "response_format.json_schema.strict"),
    ({"response_format": ResponseFormatFields({"type": "json_schema", "json_schema": {"schema": False}})}, "response_format.json_schema.schema"),
    ({"response_format": ResponseFormatFields(ANSWER, regex="a")}, "regex"),
    ({"response_format": ResponseFormatFields({"type": "json_object"}, grammar='root ::= "a"')}, "grammar"),
    ({"response_format": ResponseFormatFields(regex="a", structural_tag="{}")}, "structural_tag"),
    ({"response_format": ResponseFormatFields(regex="(")}, "regex"),
    ({"response_format": ResponseFormatFields(structural_tag={"calls": []})}, "structural_tag"),
    ({"tools": [WEATHER], "response_format": ResponseFormatFields(regex="a")}, "regex"),
    ({"tools": [tool(f"f{n}", CITY | {"description": "x" * 4000}) for n in range(128)]}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "param"), REFUSED)
def test_what_is_refused_names_its_field(wanted: dict[str, Any], param: str) -> None:
    """The planner refuses an unsupported request and names the field."""
    with pytest.raises(InvalidRequest) as refused:
        plan(**wanted)

    assert refused.value.param == param
    assert param in refused.value.message or refused.value.code == "unsupported_grammar" or param == "tools"


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f", CITY, strict=True)]}, "tools[0].function.strict"),
        ({"response_format": ResponseFormatFields(ANSWER)}, "response_format.json_schema.schema"),
    ],
)
def test_a_format_that_is_only_read_promises_nothing(wanted: dict[str, Any], param: str) -> None:
    """Python calls have no grammar, so a request that needs one is refused."""
    assert plan(PYTHONIC, tools=[WEATHER]) == OutputPlan(None, calls_tools=True)
    with pytest.raises(InvalidRequest) as refused:
        plan(PYTHONIC, **({"tools": [WEATHER]} | wanted))

    assert refused.value.param == param


def test_errors_of_the_engine_name_the_clients_field() -> None:
    """An engine's error about a grammar names the client's field; other errors stay unchanged."""
    grammar = plan(response_format=ResponseFormatFields(grammar="root ::= nope")).grammar
    assert grammar is not None
    other = InvalidRequest("Too long.", param="prompt")

    named = grammar.name_field(InvalidRequest("No rule nope.", param="#", code="unsupported_grammar"))

    assert (named.param, named.code) == ("grammar", "unsupported_grammar")
    assert grammar.name_field(other) is other


@pytest.mark.parametrize("choice", [None, "auto", "none", "required", "any", NAMED])
@pytest.mark.parametrize("tools", [(), (WEATHER,)])
@pytest.mark.parametrize(
    "asked", [{}, {"response_format": {"type": "text"}}, {"response_format": ANSWER}, {"regex": "a"}]
)
async def test_the_event_loop_plans_as_a_thread_does(choice: Any, tools: Any, asked: dict[str, Any]) -> None:
    """Where there is nothing to plan, no thread is asked, and what a thread would say is the same."""
    fields = OutputConstraints(tools, choice, response_format=ResponseFormatFields(**asked))
    by_thread, by_loop = ConstraintPlanner(), ConstraintPlanner()

    assert await outcome(by_loop.plan_off_loop(fields)) == await outcome(asyncio.to_thread(by_thread.plan, fields))


async def outcome(planning: Awaitable[OutputPlan]) -> OutputPlan | str:
    """The plan, or the message of the refusal."""
    try:
        return await planning
    except InvalidRequest as error:
        return error.message
