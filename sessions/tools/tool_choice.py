"""Reads the fields `tools` and `tool_choice` of chat completions.

A tool is a function or a custom tool (custom_tools.py), and may be in a namespace. Owns the shapes of both fields. The fields say which tools an answer may call, and whether the answer must call one.
Other APIs convert their own fields to these two. Never reads the schema of a tool's arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.tools.custom_tools import function_of, is_custom

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
