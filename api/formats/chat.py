"""Builds chat answers in OpenAI's two forms: one object, or a stream of chunks. Never generates anything.

The first chunk of a choice has the role, and the last chunk has the finish reason. The first delta of a tool call has
the call's index, id, type and name. Later deltas of the call have only the index and a part of the arguments.
"""

from collections.abc import Iterable
from typing import Any

from graftwork.api.formats.chunks import write_chunks
from graftwork.api.formats.logprobs import chat_logprobs, new_logprobs
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


def chat_completion(head: ResponseHead, choices: Iterable[GenerationFinished], job: InferenceJob) -> dict[str, Any]:
    bodies = [_choice(index, finished) for index, finished in enumerate(choices)]
    return head.fields("chat.completion") | {"choices": bodies, "usage": job.usage.as_body()}


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


async def write_chat_chunks(head: ResponseHead, job: InferenceJob, write: Write, *, include_usage: bool) -> None:
    """Writes the chunks of all answers of a chat completion with `write`, until the job ends.

    With `include_usage`, one more chunk at the end has the usage. If the client leaves, the server cancels this
    function and the job.
    """
    shell = head.fields("chat.completion.chunk")
    await write_chunks(job, write, shell, _chunk_choice, include_usage=include_usage)


def _chunk_choice(item: ChoiceEvent) -> dict[str, Any] | None:
    """Converts one event to the choice of a chunk. Returns None for an event that a chat does not show."""
    delta = _delta(item.event)
    if delta is None:
        return None
    reason = item.event.reason if isinstance(item.event, GenerationFinished) else None
    has_logprobs = isinstance(item.event, TextDelta | GenerationFinished) and bool(item.event.logprobs)
    unsent = new_logprobs(item.event) if has_logprobs else ()
    logprobs = chat_logprobs(unsent) if unsent else None
    return {"index": item.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _delta(event: GenerationEvent) -> dict[str, Any] | None:
    if isinstance(event, PromptAdmitted):
        return {"role": "assistant", "content": ""}
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStarted):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}
    return {} if isinstance(event, GenerationFinished) else None
