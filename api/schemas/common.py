"""Fields that several bodies share: answer formats, messages, adapter mixtures, predictions and tools."""

from typing import Annotated, Any, Literal

from pydantic import Field

from graftwork.api.schemas.base import NativeBody, OpenAiBody
from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT
from graftwork.sessions.generation.response_format import ResponseFormatFields
from graftwork.sessions.tools.tool_choice import TOOL_NAME, tool_for_prompt


class ResponseFormatBody(OpenAiBody):
    """The format of the answer. At most one field may be set; null and empty values set nothing."""

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    """The whole answer matches this regular expression."""
    grammar: str | None = None
    """A grammar in EBNF. The start rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags around JSON in the answer; see engine/grammar/schema/structural_tags.py."""

    def response_format_fields(self) -> ResponseFormatFields:
        return ResponseFormatFields(self.response_format, self.regex, self.grammar, self.structural_tag)


MessageList = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
"""OpenAI's chat messages, oldest first."""


class MixturePart(NativeBody):
    """One adapter of a mixture, and its weight."""

    model: str
    """`name`, `name@3` or `name@alias`, as in `model`."""
    weight: Annotated[float, Field(ge=-MAX_MIXTURE_WEIGHT, le=MAX_MIXTURE_WEIGHT)] = 1.0


MixtureParts = Annotated[list[MixturePart], Field(min_length=1, max_length=MAX_MIXTURE)]


class PredictionPart(OpenAiBody):
    """One part of the expected text."""

    type: Literal["text"]
    text: str


class Prediction(OpenAiBody):
    """Text that the answer is expected to repeat. A right prediction makes the answer faster and never changes it."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The whole text, its parts joined without separators."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


MAX_TOOLS = 128


class FunctionDefinition(OpenAiBody):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema. The model sees it unchanged."""
    strict: bool | None = None
    """If true, a schema that cannot be enforced is refused. Otherwise the answer's header names what is not enforced."""


class FunctionTool(OpenAiBody):
    type: Literal["function"]
    function: FunctionDefinition

    def as_template_input(self) -> dict[str, Any]:
        """The tool as chat templates expect it, without absent fields."""
        return tool_for_prompt(self.model_dump(exclude_none=True))


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
