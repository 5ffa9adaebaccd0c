"""Turns the tools, the tool choice and the output format of a request into one grammar.

The format comes from `response_format`, `regex`, `grammar` or `structural_tag`; a request has at most one of them.
Depending on the request, the grammar accepts text with well-formed tool calls in it, only tool calls, or either tool
calls or an answer in the format.
Owns the shapes of these fields, and the checks of all schemas. The checks run before quota is reserved. An error names
the request field and the keyword in its schema. Some schema keywords cannot be enforced. If the field has `strict:
true`, such a keyword is refused. Otherwise it is ignored, and the path of the keyword is reported to the client.
Never compiles a grammar: the engine does that.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from threading import Lock
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.tools.formats import HERMES, ToolCallFormat
from graftwork.sessions.tools.tool_choice import (
    ToolChoice,
    ToolDefinition,
    function_for_model,
    has_grammar,
    is_custom,
    read_tool_choice,
    tool_names,
)
from graftwork.sessions.tools.tool_choice import arguments_schema as custom_arguments

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


_FIELDS = {
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}
"""Maps each field except `response_format` to the kind of grammar in it."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format that an answer must have: a regular expression, a grammar, a structural tag or a JSON schema."""

    kind: GrammarKind
    param: str
    """The request field that asks for this format."""
    text: str = ""
    """The grammar's text; empty for a JSON schema."""
    schema: Any = None
    """The JSON schema; None for other kinds."""
    is_strict: bool = False
    """If True, schema keywords that cannot be enforced are refused. If False, they are ignored and reported."""


@dataclass(frozen=True, slots=True)
class AskedFormat:
    """A format that a field with another name asks for, such as `guided_json`."""

    param: str
    """The path of the field in the request."""
    kind: GrammarKind
    text: str = ""
    """The grammar's text; empty for a JSON schema."""
    schema: Any = None
    """The JSON schema; None for other kinds."""


@dataclass(frozen=True, slots=True)
class ResponseFormatFields:
    """The fields of a request that can ask for an output format, as the client sent them.

    None and empty values ask for no format.
    """

    response_format: Any = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    others: tuple[AskedFormat, ...] = ()
    """The formats that fields with other names ask for."""

    def read(self) -> ResponseFormat | None:
        """Reads these fields. Returns the format that they ask for, or None for free text.

        Raises InvalidRequest for wrong values, or if two fields ask for a format.
        """
        found = list(self._found())
        if len(found) > 1:
            first, second = (one.param.partition(".")[0] for one in found[:2])
            raise InvalidRequest(f"{first} and {second} exclude each other: leave one of them out.", param=second)
        return found[0] if found else None

    def _found(self) -> Iterator[ResponseFormat]:
        """Yields the format of each field that asks for one."""
        if (given := read_response_format(self.response_format)) is not None:
            yield given
        for name, kind in _FIELDS.items():
            if value := getattr(self, name):
                yield ResponseFormat(kind, name, value if isinstance(value, str) else json.dumps(value))
        for other in self.others:
            yield ResponseFormat(other.kind, other.param, other.text, other.schema)


FREE_FORMAT = ResponseFormatFields()


def read_response_format(value: Any) -> ResponseFormat | None:
    """Reads the request field `response_format`. Returns the format that it asks for, or None for free text.

    Raises InvalidRequest if the field has a wrong value.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat(GrammarKind.JSON_OBJECT, "response_format", schema=ANY_OBJECT)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    raise InvalidRequest(
        "response_format.type must be 'text', 'json_object' or 'json_schema'.", param="response_format.type"
    )


def _json_schema(given: Any) -> ResponseFormat:
    param = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a name and a schema.", param=param)
    schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{param}.schema must be a JSON Schema.", param=f"{param}.schema")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{param}.strict must be true or false.", param=f"{param}.strict")
    return ResponseFormat(GrammarKind.JSON_SCHEMA, f"{param}.schema", schema=schema, is_strict=strict is True)


_KEPT_CHECKS = 4096
"""How many results of schema checks are cached."""


_MAX_GAPS = 64
"""The most keywords that are reported for one schema because they cannot be enforced."""


_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


_GRAMMAR_CODES = ("grammar_", "unsupported_grammar")


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """The fields of a request that limit what the model may write, in the shapes of OpenAI's chat completions."""

    tools: Sequence[ToolDefinition] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormatFields = FREE_FORMAT

    @property
    def allow_all(self) -> bool:
        """Whether these fields let the output be any text, without tools to call."""
        return not self.tools and self.tool_choice in (None, "auto", "none") and self.response_format == FREE_FORMAT


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """The grammar that an output must match, and the request field that asked for this grammar."""

    source: GrammarSource
    param: str
    """The request field that asked for this grammar."""
    unenforced: tuple[str, ...] = ()
    """The paths of the schema keywords that the grammar ignores.

    Each path is the name of the request field, `#`, and a JSON pointer into the schema of this field.
    """

    def name_field(self, error: InvalidRequest) -> InvalidRequest:
        """Returns the engine's error with the name of the request field that asked for this grammar.

        If the error is not about a grammar, returns it unchanged.
        """
        if not error.code.startswith(_GRAMMAR_CODES):
            return error
        return InvalidRequest(error.message, param=self.param, code=error.code)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The plan for one output: the grammar that the output must match, and whether the output may have tool calls."""

    grammar: OutputGrammar | None = None
    """The grammar; None allows any text."""
    calls_tools: bool = False
    """Whether the parser looks for tool calls in the output."""
    parallel_tool_calls: bool = True


FREE_OUTPUT = OutputPlan()
"""The plan of an output that is plain text without constraints."""


class ConstraintPlanner:
    """Makes the output plans (grammar and parsing) for the requests to one model. All methods are thread-safe.

    Large schemas take time to read, so the event loop calls `plan_off_loop`. The planner caches the
    checks of recent schemas, because a session sends the same schemas with every turn.
    """

    def __init__(self, tool_call_format: ToolCallFormat = HERMES) -> None:
        self.tool_call_format = tool_call_format
        """How the model writes tool calls."""
        self._checks: OrderedDict[tuple[str, bytes], tuple[str, ...] | InvalidRequest] = OrderedDict()
        """By the tenant and the digest of the grammar, in the order of use."""
        self._lock = Lock()
        self._owner = ""

    def of(self, owner: str) -> "ConstraintPlanner":
        """Returns a planner for one tenant, with the same cache.

        It finds only the tenant's own results there. So the time of a check says nothing about other tenants.
        """
        planner = copy(self)
        planner._owner = owner
        return planner

    def num_checks(self, owner: str) -> int:
        """Returns how many results of one tenant are in the cache."""
        with self._lock:
            return sum(key[0] == owner for key in self._checks)

    def forget(self, owner: str) -> None:
        """Removes all results of one tenant from the cache."""
        with self._lock:
            for key in [key for key in self._checks if key[0] == owner]:
                del self._checks[key]

    async def plan_off_loop(self, constraints: OutputConstraints) -> OutputPlan:
        """Returns the same as `plan`. Plans on a worker thread, unless there is nothing to plan."""
        if constraints.allow_all:
            return FREE_OUTPUT
        return await asyncio.to_thread(self.plan, constraints)

    def plan(self, constraints: OutputConstraints) -> OutputPlan:
        """Returns the plan for one output: the grammar to match, and whether the output may contain tool calls.

        Raises InvalidRequest for wrong or unsupported fields. The error names the field.
        """
        choice = read_tool_choice(constraints.tool_choice, tool_names(constraints.tools))
        response_format = constraints.response_format.read()
        if not choice.may_call:
            return OutputPlan(None if response_format is None else self._format_grammar(response_format))
        if response_format is not None and response_format.schema is None:
            raise InvalidRequest(
                f"{response_format.param} cannot be combined with tools: use response_format, or tool_choice 'none'.",
                param=response_format.param,
            )
        is_parallel = constraints.parallel_tool_calls and not choice.is_single
        grammar = self._call_grammar(constraints.tools, choice, response_format, is_parallel=is_parallel)
        return OutputPlan(grammar, calls_tools=True, parallel_tool_calls=is_parallel)

    # ---- grammars ---------------------------------------------------------------------------------------------

    def _format_grammar(self, response_format: ResponseFormat) -> OutputGrammar:
        """Returns the grammar of an answer in a format, without tools."""
        text = response_format.text if response_format.schema is None else _json(response_format.schema)
        unenforced = self._unenforced(
            GrammarSource(response_format.kind, text, response_format.is_strict), response_format.param
        )
        return OutputGrammar(
            GrammarSource(response_format.kind, text, strict=not unenforced), response_format.param, unenforced
        )

    def _call_grammar(
        self, tools: Sequence[ToolDefinition], choice: ToolChoice, answer: ResponseFormat | None, *, is_parallel: bool
    ) -> OutputGrammar | None:
        """Returns the grammar of calls, and of the text or answer next to the calls; None if nothing is enforced."""
        arguments = {index: _arguments_schema(tools[index], index) for index in choice.indices}
        names = {index: function_for_model(tools[index])["name"] for index in choice.indices}
        if not self.tool_call_format.has_grammar:
            self._check_unenforced(tools, choice, answer)
            return None
        unenforced: tuple[str, ...] = ()
        for index, schema in arguments.items():
            source = GrammarSource(GrammarKind.JSON_SCHEMA, _json(schema), _strict_field(tools[index]) is not None)
            unenforced += self._unenforced(source, f"tools[{index}].{_schema_field(tools[index])}")
        is_beside_objects = self.tool_call_format.is_bare and answer is not None and not choice.is_required
        tag_of = self.tool_call_format.whole_call_tag if is_beside_objects else self.tool_call_format.call_tag
        tag: dict[str, Any] = {
            **self.tool_call_format.frame(),
            "calls": [tag_of(names[index], schema) for index, schema in arguments.items()],
            "parallel": is_parallel,
        }
        if choice.is_required:
            tag["required"] = True
        elif answer is not None:
            unenforced += self._unenforced(
                GrammarSource(GrammarKind.JSON_SCHEMA, _json(answer.schema), answer.is_strict), answer.param
            )
            tag["answer"] = answer.schema
        else:
            tag |= {"text": True, "triggers": [self.tool_call_format.open]}
        return OutputGrammar(_within_limits(_json(tag), is_strict=not unenforced), "tools", unenforced)

    def _check_unenforced(
        self, tools: Sequence[ToolDefinition], choice: ToolChoice, answer: ResponseFormat | None
    ) -> None:
        """Raises InvalidRequest if calls have a constraint, but no grammar exists for this model's call format."""
        strict = ((index, _strict_field(tools[index])) for index in choice.indices)
        param = "tool_choice" if choice.is_required else None
        param = next((f"tools[{index}].{field}" for index, field in strict if field is not None), param)
        param = answer.param if answer is not None else param
        if param is not None:
            raise InvalidRequest(
                f"This model writes calls in a form that cannot be enforced, so {param} cannot be kept beside tools: "
                "leave it out.",
                param=param,
                code="unsupported_value",
            )

    # ---- reading ----------------------------------------------------------------------------------------------

    def _unenforced(self, source: GrammarSource, param: str) -> tuple[str, ...]:
        """Returns the paths of keywords that cannot be enforced. Raises InvalidRequest for an unsupported grammar."""
        found = self._check(source)
        if isinstance(found, InvalidRequest):
            pointer = found.param
            raise InvalidRequest(
                f"{param}: {found.message}", param=param, code=found.code, details={"pointer": pointer}
            )
        return tuple(param + pointer for pointer in found)

    def _check(self, source: GrammarSource) -> tuple[str, ...] | InvalidRequest:
        key = self._owner, hashlib.sha256(f"{source.kind}/{source.strict}/{source.text}".encode()).digest()
        with self._lock:
            if (kept := self._checks.get(key)) is not None:
                self._checks.move_to_end(key)
                return kept
        found: tuple[str, ...] | InvalidRequest
        try:
            found = tuple(pointer for pointer, _ in lint(source).unenforced[:_MAX_GAPS])
        except InvalidRequest as error:
            found = error
        with self._lock:
            self._checks[key] = found
            while len(self._checks) > _KEPT_CHECKS:
                self._checks.popitem(last=False)
        return found


def _schema_field(tool: ToolDefinition) -> str:
    """Returns the field of a tool that says which arguments its calls have."""
    return "custom.format.definition" if is_custom(tool) else "function.parameters"


def _strict_field(tool: ToolDefinition) -> str | None:
    """Returns the field of a tool that asks for exact arguments; None if keywords may be ignored."""
    if is_custom(tool):
        return "custom.format" if has_grammar(tool["custom"]) else None
    return "function.strict" if tool["function"].get("strict") is True else None


def _arguments_schema(tool: ToolDefinition, index: int) -> Mapping[str, Any]:
    """Returns a tool's parameters as the schema of an object. A tool without parameters takes no arguments."""
    if is_custom(tool):
        return custom_arguments(tool["custom"], f"tools[{index}].custom")
    param = f"tools[{index}].function.parameters"
    schema = tool["function"].get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    kind = schema.get("type", "object") if isinstance(schema, Mapping) else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"{param} must be a JSON Schema of type 'object'.", param=param)
    return {**schema, "type": "object"}


def _within_limits(text: str, *, is_strict: bool) -> GrammarSource:
    """Returns the grammar of all tools together. Raises InvalidRequest if its text is too large."""
    most = LintLimits().text_bytes
    if len(text.encode()) > most:
        raise InvalidRequest(
            f"The tools make a grammar of more than {most} bytes: send fewer, or smaller ones.", param="tools"
        )
    return GrammarSource(GrammarKind.STRUCTURAL_TAG, text, is_strict)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
