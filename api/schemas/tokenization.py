"""Defines the bodies of `POST /v1/tokenize` and `POST /v1/detokenize`. They have the same form as in vLLM."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from graftwork.api.schemas.base import OpenAiBody, ToolList
from graftwork.api.schemas.shapes import MessageList, exactly_one


class TokenizeRequest(OpenAiBody):
    """The text to convert to token ids: a prompt or messages, but not both."""

    model_config = ConfigDict(json_schema_extra=exactly_one("prompt", "messages"))

    model: str
    prompt: str | None = None
    """The text to tokenize."""
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    """If false, the prompt ends after the last message. Otherwise it ends with the tokens that begin an answer."""

    @model_validator(mode="after")
    def require_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class DetokenizeRequest(OpenAiBody):
    """The token ids that the server converts to text."""

    model: str
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 18)]
    """The token ids, in the order of the text."""
