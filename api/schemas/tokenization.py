"""Defines the bodies of `POST /v1/tokenize` and `POST /v1/detokenize`. They have the same form as in vLLM.

vLLM's own paths, `/tokenize` and `/detokenize`, take the same bodies.
"""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from graftwork.api.schemas.base import OpenAiBody, ToolList, check_prompt_end
from graftwork.api.schemas.shapes import CLOSED_AND_OPEN, MessageList, exactly_one, never


class TokenizeRequest(OpenAiBody):
    """The text to convert to token ids: a prompt or messages, but not both."""

    model_config = ConfigDict(json_schema_extra=exactly_one("prompt", "messages") | never(CLOSED_AND_OPEN))

    model: str | None = None
    """The base model or an adapter; all have the same tokens. The default is the base model."""
    prompt: str | None = None
    """The text to tokenize."""
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    """If false, the prompt ends after the last message. Otherwise it ends with the tokens that begin an answer."""
    continue_final_message: bool | None = None
    """If true, the prompt ends inside the last message, which must be an assistant's text."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names that the model's chat template can read."""
    return_token_strs: bool | None = None
    """If true, the answer has the spelling of each token in the vocabulary."""

    @model_validator(mode="after")
    def require_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        check_prompt_end(self.continue_final_message, self.add_generation_prompt)
        return self


class DetokenizeRequest(OpenAiBody):
    """The token ids that the server converts to text."""

    model: str | None = None
    """The base model or an adapter; all have the same tokens. The default is the base model."""
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 18)]
    """The token ids, in the order of the text."""
