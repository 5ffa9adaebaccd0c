"""Defines fields that several bodies share: answer formats, messages, adapter mixtures, predictions and tools."""

from typing import Annotated, Any, Literal

from pydantic import Field

from graftwork.api.schemas.base import NativeBody, OpenAiBody
from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT
from graftwork.sessions.generation.response_format import ResponseFormatFields
from graftwork.sessions.tools.tool_choice import TOOL_NAME, tool_for_prompt


class ResponseFormatBody(OpenAiBody):
    """The format of the answer. A client may set only one of these fields. A null or empty value counts as missing."""

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    grammar: str | None = None
    """A grammar in EBNF that the answer must follow. The start rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags with JSON Schemas for parts of the answer. See engine/grammar/schema/structural_tags.py."""

    def response_format_fields(self) -> ResponseFormatFields:
        return ResponseFormatFields(self.response_format, self.regex, self.grammar, self.structural_tag)


MessageList = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
"""Messages in OpenAI's chat form, oldest first."""


class MixturePart(NativeBody):
    """One adapter of a mixture, and its weight."""

    model: str
    """The adapter's name in the same form as in `model`: `name`, `name@3` or `name@alias`."""
    weight: Annotated[float, Field(ge=-MAX_MIXTURE_WEIGHT, le=MAX_MIXTURE_WEIGHT)] = 1.0


MixtureParts = Annotated[list[MixturePart], Field(min_length=1, max_length=MAX_MIXTURE)]


class PredictionPart(OpenAiBody):
    """One part of the text that the client expects."""

    type: Literal["text"]
    text: str


class Prediction(OpenAiBody):
    """The text that the client expects in the answer. It can make the answer faster, but never changes it."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """Return the whole text. Parts are joined without separators."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


MAX_TOOLS = 128


class FunctionDefinition(OpenAiBody):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema for the arguments. The model sees it unchanged."""
    strict: bool | None = None
    """If true, the server refuses a schema that it cannot fully enforce.

    If false, it serves the request, and a header of the answer names the parts that it does not enforce.
    """


class FunctionTool(OpenAiBody):
    type: Literal["function"]
    function: FunctionDefinition

    def as_template_input(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect, without missing fields."""
        return tool_for_prompt(self.model_dump(exclude_none=True))


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
