"""Converts the tools of the Responses API to the form of chat completions.

A tool is a function, a custom tool, or a namespace that holds such tools. Tools that OpenAI itself runs, such as web
search, do not exist here: they are left out, and the answer says so. Never reads a schema or a grammar.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.sessions.tools.tool_choice import CallForms, call_forms, qualified_name

HOSTED_TYPES = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
"""The types of tools that OpenAI runs or trains for. The dated names of a type begin with the name and `_20`."""

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")

Tool = Mapping[str, Any]
"""A tool in the form of the Responses API."""


@dataclass(frozen=True, slots=True)
class PlacedTool:
    """A tool in the form of chat completions, and the path of the field of the request that has it."""

    tool: dict[str, Any]
    path: str
    """For example `tools[0]`, or `tools[1].tools[3]` in a namespace."""


def is_hosted(kind: object) -> bool:
    """Returns whether `kind` is the type of a tool that OpenAI runs."""
    return isinstance(kind, str) and (kind in HOSTED_TYPES or kind.partition("_20")[0] in HOSTED_TYPES)


def placed_tools(tools: Sequence[Tool]) -> Iterator[PlacedTool]:
    """Yields the tools that are served, in order. Those of a namespace follow each other."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool["type"] == "namespace":
            for place, inner in enumerate(tool["tools"]):
                if not is_hosted(inner["type"]):
                    yield PlacedTool(_in_chat_form(inner, tool["name"]), f"{path}.tools[{place}]")
        elif not is_hosted(tool["type"]):
            yield PlacedTool(_in_chat_form(tool, None), path)


def ignored_tools(tools: Sequence[Tool]) -> list[str]:
    """Returns the paths of the tools that are not served, each with its type in parentheses."""
    ignored: list[str] = []
    for index, tool in enumerate(tools):
        inner = [(f"tools[{index}]", tool)]
        if tool["type"] == "namespace":
            inner = [(f"tools[{index}].tools[{place}]", each) for place, each in enumerate(tool["tools"])]
        ignored += [f"{path} ({each['type']})" for path, each in inner if is_hosted(each["type"])]
    return ignored


def response_call_forms(tools: Sequence[Tool]) -> CallForms:
    """Returns how clients see the calls of these tools of the Responses API."""
    return call_forms([placed.tool for placed in placed_tools(tools)])


def _in_chat_form(tool: Tool, namespace: str | None) -> dict[str, Any]:
    """Returns one tool in the form of chat completions.

    Leaves out `strict: false`, which means the same as a missing `strict`.
    """
    name = qualified_name(namespace, tool["name"])
    around = {} if namespace is None else {"namespace": namespace}
    if tool["type"] == "custom":
        given = {"name": name, "description": tool.get("description"), "format": _custom_format(tool.get("format"))}
        return {"type": "custom", "custom": {field: value for field, value in given.items() if value}, **around}
    fields = {field: tool.get(field) for field in _FUNCTION_FIELDS} | {"name": name}
    function = {field: value for field, value in fields.items() if value is not None and value is not False}
    return {"type": "function", "function": function, **around}


def _custom_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given["type"] != "grammar":
        return None
    return {"type": "grammar", "grammar": {"syntax": given["syntax"], "definition": given["definition"]}}
