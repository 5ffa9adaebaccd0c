"""Defines the body of `POST /v1/chat/completions`."""

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from graftwork.api.schemas.base import (
    CHAT_UNSUPPORTED,
    EndUserBody,
    FieldError,
    MixtureParts,
    OpenAiBody,
    Prediction,
    PromptLogprobs,
    ResponseFormatBody,
    SamplingBody,
    TierName,
    ToolList,
    check_prompt_end,
    check_prompt_logprobs,
    refuse_unsupported,
)
from graftwork.api.schemas.shapes import CLOSED_AND_OPEN, MessageList, ToolChoiceJson, given, having, never, positive
from graftwork.engine.core.sampling import MAX_TOP_LOGPROBS
from graftwork.sessions.generation.constraints import OutputConstraints

MAX_CHOICES = 128


class StreamOptions(OpenAiBody):
    """The options of a streamed answer."""

    include_usage: bool | None = None
    """If true, the last chunk has the usage of the request."""


class ChatCompletionRequest(SamplingBody, ResponseFormatBody, EndUserBody):
    """A conversation and the settings of its answer. The server refuses fields that it knows but does not support."""

    model_config = ConfigDict(
        json_schema_extra=never(
            CLOSED_AND_OPEN,
            [positive("top_logprobs"), {"not": having("logprobs", True)}],
            [given("prompt_logprobs"), having("stream", True)],
        )
    )

    model: str
    adapters: MixtureParts | None = None
    """An extension of OpenAI's API: a mixture of adapters. The server adds their weight changes to the base model."""
    messages: MessageList
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    logprobs: bool | None = None
    """If true, the answer has the log-probability of each token."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """How many likely tokens to report beside each token, with log-probabilities. This field needs `logprobs`."""
    prompt_logprobs: PromptLogprobs = None
    return_token_ids: bool | None = None
    """If true, the answer has the token ids of the prompt and of each choice."""
    add_generation_prompt: bool | None = None
    """If false, the prompt ends after the last message. By default it ends with the start of the answer."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=64)] = None
    """Further names that the model's chat template can read, such as `enable_thinking`."""
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = None
    """How much the model reasons, if its chat template can say so: such as `low` or `high`. `none` turns it off."""
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    """The most tokens of the model's reasoning. After so many, the reasoning ends and the answer follows."""
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    tools: ToolList | None = None
    tool_choice: ToolChoiceJson = None
    parallel_tool_calls: bool | None = None
    service_tier: TierName | None = None
    prediction: Prediction | None = None
    continue_final_message: bool | None = None
    """If true, the answer continues the text of the last message, which must be the assistant's."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported_fields(cls, body: Any) -> Any:
        return refuse_unsupported(body, CHAT_UNSUPPORTED)

    @model_validator(mode="after")
    def require_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "set logprobs to true to get any")
        return self

    @model_validator(mode="after")
    def refuse_streamed_prompt_logprobs(self) -> Self:
        check_prompt_logprobs(self.prompt_logprobs, is_stream=bool(self.stream))
        return self

    @model_validator(mode="after")
    def open_or_closed(self) -> Self:
        check_prompt_end(self.continue_final_message, self.add_generation_prompt)
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the answer may have. It is None if the request sets no limit.

        The field `max_completion_tokens` is the newer name of `max_tokens`, and has priority.
        """
        return self.max_completion_tokens or self.max_tokens

    @property
    def shows_tools(self) -> bool:
        """Whether the prompt shows the tools. The prompt leaves them out if the model must not call any tool."""
        return bool(self.tools) and self.tool_choice != "none"

    def output_constraints(self) -> OutputConstraints:
        return OutputConstraints(
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ()),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self.response_format_fields(),
        )
