"""Chooses the tools of a request that the model sees. Never runs a tool.

Owns three rules of Anthropic's API. Invariant: the chosen tools keep their order, so equal lists make equal prompts.

    a tool that Anthropic defines or runs   left out; a header names it; refused if `tool_choice` asks for it
    a tool with `defer_loading`             left out, until a message names it, or `tool_choice` does
    `tool_addition`, `tool_removal`         a system message offers a tool, or withdraws it; the last change counts
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graftwork.api.anthropic.schemas import ConversationMessage, CountTokensRequest, CustomTool, ServerTool
from graftwork.platform.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """The tools that the model sees, and those that the server leaves out because it cannot serve them."""

    tools: tuple[tuple[int, CustomTool], ...]
    """Each tool with its index in the request's `tools`."""
    ignored: tuple[str, ...]
    """The path of each tool that the server cannot serve, with its type in parentheses."""


def choose_tools(body: CountTokensRequest) -> ChosenTools:
    """Returns the tools that the model sees. Raises InvalidRequest if `tool_choice` asks for a tool of Anthropic's."""
    every = list(enumerate(body.tools or ()))
    hosted = [(index, tool) for index, tool in every if isinstance(tool, ServerTool)]
    offered = _offered(body)
    chosen = tuple((index, tool) for index, tool in every if isinstance(tool, CustomTool) and offered(tool))
    _check_choice(body, chosen, [tool for _, tool in hosted])
    return ChosenTools(chosen, tuple(f"tools[{index}] ({tool.type})" for index, tool in hosted))


def _offered(body: CountTokensRequest) -> Callable[[CustomTool], bool]:
    """Returns the function that tells whether the model sees a tool."""
    changes = dict(_changes(body.messages))
    if body.tool_choice is not None and body.tool_choice.name is not None:
        changes[body.tool_choice.name] = True
    return lambda tool: changes.get(tool.name, not tool.defer_loading)


def _check_choice(
    body: CountTokensRequest, chosen: Sequence[tuple[int, CustomTool]], hosted: Sequence[ServerTool]
) -> None:
    choice = body.tool_choice
    if choice is None or not hosted:
        return
    if choice.type == "tool" and choice.name in [tool.name or tool.type for tool in hosted]:
        raise InvalidRequest(
            f"tool_choice.name is {choice.name!r}, a tool that Anthropic defines or runs; this server serves only "
            "tools with an `input_schema`.",
            param="tool_choice.name",
        )
    if choice.type == "any" and not chosen:
        raise InvalidRequest(
            "tool_choice asks for a tool call, but all tools are ones that Anthropic defines or runs; this server "
            "serves only tools with an `input_schema`.",
            param="tool_choice",
        )


def _changes(messages: Sequence[ConversationMessage]) -> Iterator[tuple[str, bool]]:
    """Yields the name of each tool that a message offers (True) or withdraws (False), in the order of the messages."""
    for index, message in enumerate(messages):
        for place, block in enumerate(message.content if isinstance(message.content, list) else ()):
            match block.get("type"):
                case "tool_addition" | "tool_removal" as kind:
                    name = _changed_tool(block.get("tool"), f"messages[{index}].content[{place}].tool")
                    yield name, kind == "tool_addition"
                case "tool_result":
                    yield from ((name, True) for name in _references(block.get("content")))


def _changed_tool(tool: object, param: str) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") == "tool_reference" else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f"{param} must be a `tool_reference` with the `name` of one of the request's `tools`.", param=param
        )
    return name


def _references(content: object) -> Iterator[str]:
    for block in content if isinstance(content, list) else ():
        if isinstance(block, Mapping) and block.get("type") == "tool_reference":
            name = block.get("tool_name")
            if isinstance(name, str):
                yield name
