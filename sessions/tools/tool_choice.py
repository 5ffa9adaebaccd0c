"""Reads the fields `tools` and `tool_choice` of chat completions.

Owns the shapes of both fields. The fields say which tools an answer may call, and whether the answer must call one.
Other APIs convert their own fields to these two. Never reads the schema of a tool's arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.platform.errors import InvalidRequest

ToolDefinition = Mapping[str, Any]
"""A tool in the shape of OpenAI's chat completions."""

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
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidRequest(f"{param} must be a function tool.", param=param)
        names.append(_name(function.get("name"), f"{param}.function.name"))
        if names[-1] in names[:-1]:
            raise InvalidRequest(
                f"{param}.function.name: another tool is named {names[-1]!r}.", param=f"{param}.function.name"
            )
    return tuple(names)


def tool_for_prompt(tool: ToolDefinition) -> dict[str, Any]:
    """Returns a tool in the form that the prompt shows to the model.

    The result has no field `strict`, because only the server reads this field.
    """
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


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


def _name(name: object, param: str) -> str:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequest(f"{param} must be 1 to 64 letters, digits, '_', '-' or '.'.", param=param)
    return name


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")
