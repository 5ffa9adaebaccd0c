"""Builds chat answers in OpenAI's two forms: one object, or a stream of chunks. Never generates anything.

The first chunk of a choice has the role, and the last chunk has the finish reason. If the choice may have tool calls,
the first chunk's content is null, because an empty text would count as text before the calls. The first delta of a tool call has
the call's index, id, type and name. Later deltas of the call have only the index and a part of the arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graftwork.api.formats.chunks import write_chunks
from graftwork.api.formats.logprobs import chat_logprobs, new_logprobs, vllm_prompt_logprobs
from graftwork.api.http.streaming import Write
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.api.inference.request import ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.sessions.generation.generator import (
    GenerationEvent,
    GenerationFinished,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallStarted,
)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What a chat answer shows besides the messages: token ids, and log-probabilities of the prompt."""

    prompt_token_ids: Sequence[int] | None = None
    """The tokens of the prompt, if the request asks for token ids; else None."""
    prompt_top: int | None = None
    """How many likely tokens each token of the prompt shows; None for no log-probabilities of the prompt."""
    calls_tools: bool = False
    """Whether the answer may have tool calls."""

    @property
    def prompt_fields(self) -> dict[str, Any]:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": list(self.prompt_token_ids)}

    def token_ids(self, finished: GenerationFinished) -> dict[str, Any]:
        """Returns the field with the tokens of a choice, if the request asks for token ids."""
        return {} if self.prompt_token_ids is None else {"token_ids": list(finished.token_ids)}


PLAIN_CHAT = ChatForm()


def chat_completion(
    head: ResponseHead, choices: Sequence[GenerationFinished], job: InferenceJob, form: ChatForm = PLAIN_CHAT
) -> dict[str, Any]:
    bodies = [_choice(index, finished) | form.token_ids(finished) for index, finished in enumerate(choices)]
    answer = head.fields("chat.completion") | {"choices": bodies, "usage": job.usage.as_body()} | form.prompt_fields
    if form.prompt_top is not None:
        answer["prompt_logprobs"] = vllm_prompt_logprobs(choices[0].prompt_logprobs or (), form.prompt_top)
    return answer


def _choice(index: int, finished: GenerationFinished) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": finished.text, "refusal": None}
    if finished.tool_calls:
        message["content"] = finished.text or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in finished.tool_calls
        ]
    logprobs = None if finished.logprobs is None else chat_logprobs(finished.logprobs)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finished.reason}


async def write_chat_chunks(
    head: ResponseHead, job: InferenceJob, write: Write, *, include_usage: bool, form: ChatForm = PLAIN_CHAT
) -> None:
    """Writes the chunks of all answers of a chat completion with `write`, until the job ends.

    With `include_usage`, one more chunk at the end has the usage. If the client leaves, the server cancels this
    function and the job.
    """
    shell = head.fields("chat.completion.chunk")
    choice_of = partial(_chunk_choice, form)
    await write_chunks(job, write, shell, choice_of, include_usage=include_usage, prompt_fields=form.prompt_fields)


def _chunk_choice(form: ChatForm, item: ChoiceEvent) -> dict[str, Any] | None:
    """Converts one event to the choice of a chunk. Returns None for an event that a chat does not show."""
    delta = _delta(form, item.event)
    if delta is None:
        return None
    finished = item.event if isinstance(item.event, GenerationFinished) else None
    reason = None if finished is None else finished.reason
    has_logprobs = isinstance(item.event, TextDelta | GenerationFinished) and bool(item.event.logprobs)
    unsent = new_logprobs(item.event) if has_logprobs else ()
    logprobs = chat_logprobs(unsent) if unsent else None
    choice = {"index": item.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return choice if finished is None else choice | form.token_ids(finished)


def _delta(form: ChatForm, event: GenerationEvent) -> dict[str, Any] | None:
    if isinstance(event, PromptAdmitted):
        return {"role": "assistant", "content": None if form.calls_tools else ""}
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStarted):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}
    return {} if isinstance(event, GenerationFinished) else None
