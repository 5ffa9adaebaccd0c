"""Defines `client.chat.completions` and `client.models`, with the names of OpenAI's SDK."""

import json
from collections.abc import Coroutine
from typing import Any, Literal, TypedDict, Unpack, overload

from graftwork.api.sdk.transport.effects import Call, Connection, Emit, Opened, ReadStream, Steps, deadline_header
from graftwork.api.sdk.transport.errors import APIConnectionError, error_from_description
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.transport.retries import open_stream
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, SyncRuntime
from graftwork.api.sdk.transport.sse import FrameParser
from graftwork.api.sdk.transport.streams import AsyncStream, Stream, start_stream
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.chat import ChatCompletion, ChatCompletionChunk
from graftwork.platform.answers.models import Model


class ChatParameters(TypedDict, total=False):
    """The parameters of a chat completion besides `model`, `messages` and `stream`.

    OpenAI and vLLM use the same names.
    """

    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    attention_window: int
    attention_sinks: int
    kv_budget: int
    seed: int
    n: int
    stop: str | list[str]
    stop_token_ids: list[int]
    max_tokens: int
    max_completion_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    stream_options: dict[str, Any]
    service_tier: str
    prediction: dict[str, Any]
    user: str
    metadata: dict[str, str]
    deadline_ms: int
    """Milliseconds in which the first token must come. If the server expects a later one, it refuses the request at once."""
    extra_body: dict[str, Any]
    """More fields for the request's body, which are sent unchanged."""


Messages = list[dict[str, Any]]


class Completions(Resource[R]):
    """Asks the model to answer conversations. Sends `POST /v1/chat/completions`."""

    @overload
    def create(
        self: "Completions[SyncRuntime]",
        *,
        model: str,
        messages: Messages,
        stream: Literal[True],
        **parameters: Unpack[ChatParameters],
    ) -> Stream[ChatCompletionChunk]: ...
    @overload
    def create(
        self: "Completions[SyncRuntime]",
        *,
        model: str,
        messages: Messages,
        stream: Literal[False] = False,
        **parameters: Unpack[ChatParameters],
    ) -> ChatCompletion: ...
    @overload
    def create(
        self: "Completions[AsyncRuntime]",
        *,
        model: str,
        messages: Messages,
        stream: Literal[True],
        **parameters: Unpack[ChatParameters],
    ) -> AsyncStream[ChatCompletionChunk]: ...
    @overload
    async def create(
        self: "Completions[AsyncRuntime]",
        *,
        model: str,
        messages: Messages,
        stream: Literal[False] = False,
        **parameters: Unpack[ChatParameters],
    ) -> ChatCompletion: ...
    def create(
        self, *, model: str, messages: Messages, stream: bool = False, **parameters: Unpack[ChatParameters]
    ) -> (
        ChatCompletion
        | Coroutine[Any, Any, ChatCompletion]
        | Stream[ChatCompletionChunk]
        | AsyncStream[ChatCompletionChunk]
    ):
        """Asks the model to answer a conversation. With `stream=True`, the answer arrives in chunks."""
        extra_body, headers = parameters.pop("extra_body", {}), deadline_header(parameters.pop("deadline_ms", None))
        body = {"model": model, "messages": messages, **parameters, **extra_body}
        whole_body = {**body, "stream": True} if stream else body
        call = Call("POST", "/v1/chat/completions", json=whole_body, headers=headers)
        if not stream:
            return self._runtime.run(self._read(ChatCompletion, call))
        connection = Connection()
        return start_stream(self._runtime, self._chunks(call, connection), connection)

    def _chunks(self, call: Call, connection: Connection) -> Steps[None]:
        """Sends the request and emits the chunks of the answer.

        A broken stream cannot continue, because the server does not store the answer.
        """
        yield from open_stream(call, connection, self._runtime.policy)
        yield Opened()
        parser = FrameParser()
        while (chunk := (yield ReadStream(connection))) is not None:
            for frame in parser.feed(chunk):
                if frame.data == "[DONE]":
                    return
                body = json.loads(frame.data)
                if "error" in body:
                    raise error_from_description(body["error"], None)
                yield Emit(ChatCompletionChunk.read(body))
        raise APIConnectionError("The stream broke off before the answer was complete.", code="dropped")


class Chat(Resource[R]):
    """Holds the attribute `completions`, so that `client.chat.completions` works as in OpenAI's SDK."""

    @property
    def completions(self) -> Completions[R]:
        return Completions(self._runtime)


class Models(Resource[R]):
    """Lists the base model, the adapters and the aliases that a request can send as `model`."""

    @operation
    def list(self) -> Steps[Page[Model]]:
        """Lists the base model, then this tenant's adapters and their aliases."""
        return (yield from self._page(Model, Call("GET", "/v1/models")))

    @operation
    def get(self, model: str) -> Steps[Model]:
        return (yield from self._read(Model, Call("GET", f"/v1/models/{path_segment(model)}")))
