"""Reads the fields `tools` and `tool_choice` of chat completions.

A tool is a function or a custom tool, and may be in a namespace. Owns the shapes of both fields. The fields say which
tools an answer may call, and whether the answer must call one. Other APIs convert their own fields to these two.
A custom tool takes one text instead of JSON arguments. Models are trained to call functions, so the model sees a
function with one string parameter, `input`. Owns this translation in both directions, and the pattern that the text
must match if the tool has a format. Never checks a text: the grammar of the call does.
Never reads the schema of a tool's arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.engine.grammar.patterns.nodes import PatternError
from graftwork.engine.grammar.patterns.reader import read_whole
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.tools.json_parser import BrokenJson, JsonMembers
from graftwork.sessions.tools.lark import LarkError, lark_pattern

INPUT = "input"
"""The name of the parameter that has the text."""
_MAX_DEFINITION_CHARACTERS = 64 * 1024
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNPAIRED = "\ufffd"


def is_custom(tool: Mapping[str, Any]) -> bool:
    """Returns whether a tool, in the form of chat completions, is a custom tool."""
    return tool.get("type") == "custom"


def function_of(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function that the model sees instead of a custom tool. It names the grammar of the text, if any."""
    grammar = _grammar(custom)
    about = "The text that the tool takes."
    if grammar is not None:
        about = f"The text that the tool takes, in this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    described = {"description": custom["description"]} if custom.get("description") else {}
    return {"name": custom["name"], **described, "parameters": _parameters({"type": "string", "description": about})}


def arguments_schema(custom: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Returns the JSON Schema of the calls of a custom tool. `param` is the path of the tool in the request.

    Raises InvalidRequest for a grammar that cannot be enforced. The error names its definition.
    """
    grammar = _grammar(custom)
    if grammar is None:
        return _parameters({"type": "string"})
    place = f"{param}.format.definition"
    definition = grammar["definition"]
    if len(definition) > _MAX_DEFINITION_CHARACTERS:
        raise InvalidRequest(f"{place} has more than {_MAX_DEFINITION_CHARACTERS} characters.", param=place)
    try:
        pattern = lark_pattern(definition) if grammar["syntax"] == "lark" else _whole_pattern(definition)
    except (LarkError, PatternError) as error:
        raise InvalidRequest(f"{place} is not served: {error}.", param=place, code="unsupported_grammar") from None
    return _parameters({"type": "string", "pattern": f"^(?:{pattern})$"})


def has_grammar(custom: Mapping[str, Any]) -> bool:
    """Returns whether the text of a custom tool must match a grammar."""
    return _grammar(custom) is not None


def arguments_of(text: str) -> str:
    """Returns the arguments, as JSON text, of a call that gives `text` to a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the text that a call gives to a custom tool. `arguments` is JSON text, which may be cut off.

    If there is no text in the arguments, because the model wrote others, returns the arguments as they are.
    """
    reader = CustomInputReader()
    text = reader.push(arguments)
    return text if reader.has_begun or not reader.has_ended else arguments


class CustomInputReader:
    """Takes the text of a custom tool out of the arguments of a call, while the arguments arrive in pieces.

    Invariant: the joined results do not depend on how the arguments are cut into pieces.
    """

    def __init__(self) -> None:
        self._members = JsonMembers()
        self._num_read = 0
        self._is_broken = False

    @property
    def has_begun(self) -> bool:
        """Whether the arguments have a text so far, which may be empty."""
        return self._written[:1] == ['"']

    def push(self, arguments: str) -> str:
        """Reads the next piece of the arguments. Returns the characters of the text that are certain now."""
        for character in arguments:
            if self.has_ended:
                break
            try:
                self._members.feed(character)
            except BrokenJson:
                self._is_broken = True
        if not self.has_begun:
            return ""
        self._num_read = max(self._num_read, 1)
        return "".join(iter(self._next, None))

    @property
    def has_ended(self) -> bool:
        """Whether the arguments are complete, or can be no JSON object any more."""
        return self._members.is_complete or self._is_broken

    @property
    def _written(self) -> list[str]:
        return self._members.values.get(INPUT, [])

    def _next(self) -> str | None:
        """Returns the next character of the text, or None if it is not complete yet."""
        ahead = "".join(self._written[self._num_read : self._num_read + 12])
        if not ahead or ahead == '"' or ahead == "\\":
            return None
        if ahead[0] != "\\":
            self._num_read += 1
            return ahead[0]
        if ahead[1] != "u":
            self._num_read += 2
            return _SHORT_ESCAPES.get(ahead[1], ahead[1])
        return self._escaped(ahead)

    def _escaped(self, ahead: str) -> str | None:
        r"""Returns the character of `\uXXXX`, or of two of them that are a surrogate pair."""
        first = _unit(ahead[:6])
        if len(ahead) < 6:
            return None
        if 0xD800 <= first <= 0xDBFF and _may_be_unit(ahead[6:]):
            if len(ahead) < 12:
                return None
            second = _unit(ahead[6:])
            if 0xDC00 <= second <= 0xDFFF:
                self._num_read += 12
                return chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)
        self._num_read += 6
        return _UNPAIRED if 0xD800 <= first <= 0xDFFF else chr(first)


def _may_be_unit(text: str) -> bool:
    return "\\u".startswith(text[:2])


def _unit(escape: str) -> int:
    digits = re.fullmatch(r"\\u([0-9A-Fa-f]{4})", escape)
    return 0xD800 if digits is None else int(digits[1], 16)


def _parameters(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _grammar(custom: Mapping[str, Any]) -> Mapping[str, Any] | None:
    form = custom.get("format")
    return form["grammar"] if isinstance(form, Mapping) and form.get("type") == "grammar" else None


def _whole_pattern(definition: str) -> str:
    """Returns a regular expression that can stand in a group. Raises PatternError if it cannot be enforced alone.

    Without this check, `a)|(b` would close the group around it, and the text could hold more than its pattern allows.
    """
    pattern = _without_anchors(definition)
    read_whole(pattern)
    return pattern


def _without_anchors(pattern: str) -> str:
    """Returns the pattern without an anchor at each end. The whole text must match it, so they change nothing."""
    pattern = pattern.removeprefix("^")
    if not pattern.endswith("$"):
        return pattern
    before = pattern[:-1]
    num_backslashes = len(before) - len(before.rstrip("\\"))
    return pattern if num_backslashes % 2 else before


ToolDefinition = Mapping[str, Any]
"""A tool in the shape of OpenAI's chat completions.

The field `namespace` of our own is the namespace of the tool, for APIs that have namespaces. The tool's name then is
the name that the model sees: the namespace, a dot, and the name that the client gave.
"""

MAX_TOOLS = 128
"""The most tools in a request."""

TOOL_NAME = r"^[A-Za-z0-9_.-]{1,64}$"
"""A pattern that a tool's name must match.

It is narrow, because names appear in markup, in paths and in other programs.
"""
_TOOL_NAME = re.compile(TOOL_NAME.removesuffix("$"))

_FORMS = (
    "'auto', 'none', 'required', {'type': 'function', 'function': {'name': …}} or {'type': 'allowed_tools', "
    "'allowed_tools': {'mode': 'auto' or 'required', 'tools': […]}}"
)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an answer may call, and whether the answer must call one."""

    indices: tuple[int, ...] = ()
    """The indices of the tools that may be called; empty if none may be called."""
    is_required: bool = False
    is_single: bool = False
    """Whether the request names one tool, which must be called exactly once."""

    @property
    def may_call(self) -> bool:
        return bool(self.indices)


def tool_names(tools: Sequence[ToolDefinition]) -> tuple[str, ...]:
    """Returns the names of the tools, in the order of `tools`.

    Raises InvalidRequest if a tool or its name is invalid, or if two tools have the same name.
    """
    names: list[str] = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        kind = tool.get("type")
        definition = tool.get(kind) if kind in ("function", "custom") else None
        if not isinstance(definition, Mapping):
            raise InvalidRequest(f"{param} must be a function tool.", param=param)
        place = f"{param}.{kind}.name"
        names.append(_name(definition.get("name"), place, tool.get("namespace")))
        if names[-1] in names[:-1]:
            raise InvalidRequest(f"{place}: another tool is named {names[-1]!r}.", param=place)
    return tuple(names)


def qualified_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool of a namespace; None stands for no namespace."""
    return name if namespace is None else f"{namespace}.{name}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How clients see the calls of one tool."""

    name: str
    """The tool's name, without its namespace."""
    namespace: str | None = None
    is_custom: bool = False
    """Whether the tool is a custom tool, whose calls have a text instead of JSON arguments."""


CallForms = Mapping[str, CallForm]
"""Maps the names by which the model knows its tools to the form of their calls. Other calls are plain functions."""


def call_forms(tools: Sequence[ToolDefinition]) -> CallForms:
    """Returns the form of the calls of each tool that is not a plain function."""
    forms: dict[str, CallForm] = {}
    for tool in tools:
        name, namespace = tool[tool["type"]]["name"], tool.get("namespace")
        if namespace is not None or is_custom(tool):
            forms[name] = CallForm(name.removeprefix(f"{namespace}."), namespace, is_custom(tool))
    return forms


def function_for_model(tool: ToolDefinition) -> Mapping[str, Any]:
    """Returns the function as which the model sees a tool."""
    function: Mapping[str, Any] = function_of(tool["custom"]) if is_custom(tool) else tool["function"]
    return function


def tool_for_prompt(tool: ToolDefinition) -> dict[str, Any]:
    """Returns a tool in the form that the prompt shows to the model.

    The result has no field `strict` and no `namespace`, because only the server reads these fields.
    """
    function = {name: value for name, value in function_for_model(tool).items() if name != "strict"}
    return {"type": "function", "function": function}


def read_tool_choice(choice: Any, names: Sequence[str]) -> ToolChoice:
    """Reads the request field `tool_choice`. Returns which tools the answer may call, and whether it must call one.

    `names` are the names of the request's tools, in order.
    Raises InvalidRequest if the field has an unknown form, or if it names a tool that is not in `names`.
    """
    everything = tuple(range(len(names)))
    if choice in (None, "auto"):
        return ToolChoice(everything)
    if choice == "none":
        return ToolChoice()
    if choice == "required":
        return ToolChoice(_some(everything), is_required=True)
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function":
            return ToolChoice((_index(choice, names),), is_required=True, is_single=True)
        if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
            return _allowed(choice["allowed_tools"], names)
    raise _bad(f"tool_choice must be {_FORMS}.")


def _allowed(allowed: Mapping[str, Any], names: Sequence[str]) -> ToolChoice:
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise _bad(f"tool_choice must be {_FORMS}.")
    indices = tuple(dict.fromkeys(_index(tool, names) for tool in tools))
    return ToolChoice(_some(indices), is_required=mode == "required")


def _index(tool: object, names: Sequence[str]) -> int:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _bad("tool_choice must name a tool: {'type': 'function', 'function': {'name': …}}.")
    if name not in names:
        raise _bad(f"tool_choice names the tool {name!r}, which is not among the tools.")
    return names.index(name)


def _some(indices: tuple[int, ...]) -> tuple[int, ...]:
    if not indices:
        raise _bad("tool_choice asks for calls, and there are no tools to call.")
    return indices


def _name(name: object, param: str, namespace: str | None) -> str:
    given = name if namespace is None or not isinstance(name, str) else name.removeprefix(f"{namespace}.")
    if not isinstance(name, str) or not isinstance(given, str) or not _TOOL_NAME.fullmatch(given):
        raise InvalidRequest(f"{param} must be 1 to 64 letters, digits, '_', '-' or '.'.", param=param)
    return name


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")
