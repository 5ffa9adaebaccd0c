"""Defines the tools in the body of `POST /v1/responses`: functions, custom tools, namespaces, and OpenAI's own tools."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from graftwork.api.schemas.base import OpenAiBody
from graftwork.sessions.responses.tools import HOSTED_TYPES, is_hosted
from graftwork.sessions.tools.tool_choice import MAX_TOOLS, TOOL_NAME

ToolName = Annotated[str, Field(pattern=TOOL_NAME)]


def _type_of(given: Any) -> Any:
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


class ResponseTool(OpenAiBody):
    """A function that the client itself runs."""

    type: Literal["function"]
    name: ToolName
    """The name that the model calls. No two tools of a request have the same name."""
    description: str | None = None
    """What the function does, for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON Schema for the arguments. The model sees it unchanged."""
    strict: bool | None = None

    def echo(self) -> dict[str, Any]:
        return self.model_dump()


class CustomToolText(OpenAiBody):
    """The format of a custom tool that takes any text."""

    type: Literal["text"]


class CustomToolGrammar(OpenAiBody):
    """The format of a custom tool whose text must match a grammar.

    The server refuses a grammar that it cannot enforce.
    """

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    """The language of the grammar. A Lark grammar must do without recursion."""
    definition: Annotated[str, Field(min_length=1)]
    """The grammar. A regular expression must match the whole text."""


CustomToolFormat = Annotated[
    Annotated[CustomToolText, Tag("text")] | Annotated[CustomToolGrammar, Tag("grammar")],
    Discriminator(lambda given: "grammar" if _type_of(given) == "grammar" else "text"),
]


class ResponseCustomTool(OpenAiBody):
    """A tool that the client itself runs, and that takes one text instead of JSON arguments."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "custom", "name": "run_code"}]})

    type: Literal["custom"]
    name: ToolName
    """The name that the model calls. No two tools of a request have the same name."""
    description: str | None = None
    """What the tool does, for the model."""
    format: CustomToolFormat | None = None
    """What the tool's text must look like. By default it is any text."""

    def echo(self) -> dict[str, Any]:
        return {**self.model_dump(exclude={"format"}), "format": self._format_echo()}

    def _format_echo(self) -> dict[str, Any]:
        return {"type": "text"} if self.format is None else self.format.model_dump()


class HostedTool(OpenAiBody):
    """A tool that OpenAI itself runs. The server leaves it out, and a header of the answer says so."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"type": "web_search"}]})

    type: Annotated[str, Field(json_schema_extra={"examples": list(HOSTED_TYPES)})]
    """Which of OpenAI's own tools this is."""

    def echo(self) -> None:
        return None


def _kind(tool: Any) -> str:
    """Returns the tag of a tool's class. Other types are read as a function, whose error names the type."""
    kind = _type_of(tool)
    if is_hosted(kind):
        return "hosted"
    return kind if isinstance(kind, str) and kind in ("custom", "namespace") else "function"


NestedTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[ResponseCustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(lambda tool: "function" if (kind := _kind(tool)) == "namespace" else kind),
]
"""A tool in a namespace."""


class NamespaceTool(OpenAiBody):
    """Tools under a common name. The calls of its tools have the field `namespace`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}]
        }
    )

    type: Literal["namespace"]
    name: ToolName
    """The name of the namespace."""
    description: str | None = None
    """What the tools are for. The model does not see it."""
    tools: Annotated[list[NestedTool], Field(max_length=MAX_TOOLS)]
    """The tools of the namespace. No two have the same name."""

    def echo(self) -> dict[str, Any]:
        tools = [echo for tool in self.tools if (echo := tool.echo()) is not None]
        return {**self.model_dump(exclude={"tools"}), "tools": tools}


AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[ResponseCustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
]
ResponseTools = Annotated[list[AnyResponseTool], Field(max_length=MAX_TOOLS)]
