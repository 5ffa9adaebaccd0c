"""The fields by which chat.completions and completions ask for answers of a form; `sessions/generation/response_format.py` reads them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from graftwork.api.schemas.base import NativeBody, OpenAiBody
from graftwork.engine.core.requests import MAX_MIXTURE, MAX_MIXTURE_WEIGHT
from graftwork.sessions.generation.response_format import ResponseFormatFields
from graftwork.sessions.tools.tool_choice import TOOL_NAME, tool_for_prompt


class ResponseFormatBody(OpenAiBody):
    """At most one of them asks for anything. Null and what is empty asks for nothing."""

    response_format: dict[str, Any] | None = None
    regex: str | None = None
    """The whole answer matches it."""
    grammar: str | None = None
    """In EBNF; its rule is `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Calls in text; see engine/grammar/schema/structural_tags.py."""

    def response_format_fields(self) -> ResponseFormatFields:
        return ResponseFormatFields(self.response_format, self.regex, self.grammar, self.structural_tag)


MessageList = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
"""OpenAI's chat messages, oldest first."""


class MixturePart(NativeBody):
    """One adapter's part."""

    model: str
    """`name`, `name@3` or `name@alias`, as in `model`."""
    weight: Annotated[float, Field(ge=-MAX_MIXTURE_WEIGHT, le=MAX_MIXTURE_WEIGHT)] = 1.0


MixtureParts = Annotated[list[MixturePart], Field(min_length=1, max_length=MAX_MIXTURE)]


class PredictionPart(OpenAiBody):
    """A piece of the expected text."""

    type: Literal["text"]
    text: str


class Prediction(OpenAiBody):
    """Drafted from and verified: it makes a right guess faster, and changes no answer."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """All of it; parts are joined as they stand."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


MAX_TOOLS = 128


class FunctionDefinition(OpenAiBody):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema; the model sees it as it came."""
    strict: bool | None = None
    """Refuse what of the schema cannot be enforced; else it is let go and told."""


class FunctionTool(OpenAiBody):
    type: Literal["function"]
    function: FunctionDefinition

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates expect it: without the fields that the caller left out."""
        return tool_for_prompt(self.model_dump(exclude_none=True))


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
