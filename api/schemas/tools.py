"""Function tools in chat.completions' form; sessions use the same."""

from typing import Annotated, Any, Literal

from pydantic import Field

from graftwork.api.schemas.bodies import OpenAiBody
from graftwork.sessions.tool_choice import TOOL_NAME, shown_tool

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
        return shown_tool(self.model_dump(exclude_none=True))


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
