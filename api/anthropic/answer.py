"""Builds answers in Anthropic's two forms: one message, or a stream of events.

Owns the content blocks of an answer. Never generates anything: the inference job does.
Invariant: a message and its stream have the same content blocks, because the same code builds both.
A stream has these events, in this order. A `ping` can come at any time. After a failure, the last event is an `error`.

    message_start
    for each content block: content_block_start, any number of content_block_delta, content_block_stop
    message_delta, with the stop reason and the usage
    message_stop
"""

from collections.abc import Iterator
from typing import Any

from graftwork.api.http.error_forms import anthropic_error
from graftwork.api.http.streaming import PING_AFTER_S, Write, heartbeats, named_event
from graftwork.api.inference.job import ChoiceEvent, InferenceJob, ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.generation.generator import (
    GenerationEvent,
    GenerationFinished,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.generation.usage import Usage
from graftwork.sessions.text.messages import parsed_arguments

Event = dict[str, Any]

_PING = named_event("ping", {"type": "ping"})
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ContentBlocks:
    """Builds the content blocks of one answer from the generation events of the engine."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        """All blocks so far. The last block may still grow."""
        self._is_open = False

    def take(self, event: GenerationEvent) -> Iterator[Event]:
        """Adds one generation event to the content blocks.

        Yields the events that Anthropic's stream sends for this change.
        """
        match event:
            case ReasoningDelta(text):
                if not self._is_in("thinking"):
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                self.content[-1]["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case TextDelta(text):
                if not self._is_in("text"):
                    yield from self._open({"type": "text", "text": ""})
                self.content[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case ToolCallStarted(call_id, _, name):
                yield from self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolCallArgumentsDelta(_, _, delta):
                yield self._delta({"type": "input_json_delta", "partial_json": delta})
            case ToolCallFinished(_, _, _, arguments, _):
                self.content[-1]["input"] = _input(arguments)
                yield from self._close()
            case GenerationFinished():
                yield from self._close()

    def _is_in(self, kind: str) -> bool:
        """Returns whether a block of this type may still grow."""
        return self._is_open and self.content[-1]["type"] == kind

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self.content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


async def anthropic_message(head: ResponseHead, job: InferenceJob) -> dict[str, Any]:
    """Waits until the job has ended, and returns its answer as one message of Anthropic's API.

    Raises the job's error.
    """
    blocks = ContentBlocks()
    ending: dict[str, Any] = {}

    async def take(item: ChoiceEvent) -> None:
        for _ in blocks.take(item.event):
            pass
        if isinstance(item.event, GenerationFinished):
            ending.update(_ending(item.event))

    await job.deliver(take)
    return _message(head, job.usage) | {"content": blocks.content} | ending


async def write_anthropic_events(
    head: ResponseHead, job: InferenceJob, write: Write, ping_after_s: float = PING_AFTER_S
) -> None:
    """Writes all events of Anthropic's stream with `write`, until the job ends.

    After each `ping_after_s` seconds without an event, writes a `ping` event. If the job fails, the last event is an
    `error`.
    If the client leaves, the server cancels this function, and the job stops.
    """
    blocks = ContentBlocks()
    async with heartbeats(write, _PING, ping_after_s) as write_event:

        async def take(item: ChoiceEvent) -> None:
            for event in _stream_events(head, job, blocks, item.event):
                await write_event(named_event(event["type"], event))

        try:
            await job.deliver(take)
        except GraftworkError as error:
            await write_event(named_event("error", anthropic_error(error)))


def _stream_events(
    head: ResponseHead, job: InferenceJob, blocks: ContentBlocks, event: GenerationEvent
) -> Iterator[Event]:
    if isinstance(event, PromptAdmitted):
        yield {"type": "message_start", "message": _message(head, job.usage)}
    yield from blocks.take(event)
    if isinstance(event, GenerationFinished):
        yield {"type": "message_delta", "delta": _ending(event), "usage": _usage(job.usage)}
        yield {"type": "message_stop"}


def _message(head: ResponseHead, usage: Usage) -> dict[str, Any]:
    """Returns a message without content."""
    tier = "priority" if head.service_tier == "priority" else "standard"
    return {
        "id": head.answer_id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": _usage(usage) | {"service_tier": tier},
    }


def _ending(finished: GenerationFinished) -> dict[str, Any]:
    """Returns the fields that say why the answer ended. Names the stop string only if that string ended the answer."""
    was_stopped = finished.reason == "stop" and finished.stop_string is not None
    reason = "stop_sequence" if was_stopped else _REASONS[finished.reason]
    return {"stop_reason": reason, "stop_sequence": finished.stop_string if was_stopped else None, "stop_details": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Returns the token counts. The three counts of input tokens add up to the length of the prompt.

    The count for cache creation is always 0, because this server caches every prefix without a request to do so.
    """
    return {
        "input_tokens": usage.cache.recomputed_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _input(arguments: str) -> dict[str, Any]:
    """Parses a tool call's arguments to an object.

    Incomplete or invalid arguments become an empty object, as in prompts.
    """
    parsed = parsed_arguments(arguments)
    return parsed if isinstance(parsed, dict) else {}
