"""Function tools in chat.completions' form; sessions use the same."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from graftwork.api.schemas.bodies import OpenAiBody

MAX_TOOLS = 128


class FunctionDefinition(OpenAiBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema; the model sees it as it came."""
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def strict_is_not_served(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("strict arguments are not served yet; leave it out")
        return value


class FunctionTool(OpenAiBody):
    type: Literal["function"]
    function: FunctionDefinition

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates expect it: without the fields that the caller left out."""
        return self.model_dump(exclude_none=True)


ToolList = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]
