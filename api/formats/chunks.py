"""Writes the stream of chunks for chat and text completions: one event for each new piece of an answer, then `[DONE]`.

A request can have several answers, which OpenAI's API calls choices.
Owns the order and the encoding of the events. Never knows the fields of a choice: the caller passes a function for
them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from graftwork.api.http.streaming import DONE, TextEvents, Write, data_event, error_event
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.engine.core.events import PromptAdmitted
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.generation.generator import TextDelta

NO_FIELDS: Mapping[str, Any] = {}

ChoiceOf = Callable[[ChoiceEvent], Mapping[str, Any] | None]
"""A function that converts an event to the choice of a chunk. Returns None if the stream does not show the event."""


async def write_chunks(
    job: InferenceJob,
    write: Write,
    shell: Mapping[str, Any],
    choice_of: ChoiceOf,
    *,
    include_usage: bool,
    prompt_fields: Mapping[str, Any] = NO_FIELDS,
) -> None:
    """Writes the chunks of all choices with `write`, until the job ends. A choice is one of the request's answers.

    `shell` has the fields that are equal in every chunk. `choice_of` converts an event to the entry in `choices`.
    `prompt_fields` are further fields of the first chunk of each choice.
    If the job fails, the last event is an `error`. If the client leaves, the server cancels this function.
    """
    chunks = _Chunks({**shell, "usage": None} if include_usage else shell, choice_of, prompt_fields)

    async def take(item: ChoiceEvent) -> None:
        if chunk := chunks.of(item):
            await write(chunk)

    try:
        await job.deliver(take)
    except GraftworkError as error:
        await write(error_event(error))
        return
    if include_usage:
        await write(data_event({**shell, "usage": job.usage.as_body(), "choices": []}))
    await write(DONE)


class _Chunks:
    """Encodes the chunks of one request. Chunks that differ only in text share the encoding of the other fields."""

    def __init__(self, shell: Mapping[str, Any], choice_of: ChoiceOf, prompt_fields: Mapping[str, Any]) -> None:
        self._shell = shell
        self._choice_of = choice_of
        self._prompt_fields = prompt_fields
        self._text_events: dict[int, TextEvents] = {}
        """The encoder for text events of each choice, by the choice's index."""

    def of(self, item: ChoiceEvent) -> bytes:
        """Returns the encoded chunk of an event. Returns empty bytes if the stream does not show the event."""
        event = item.event
        if not isinstance(event, TextDelta) or event.logprobs:
            return self._encoded(item)
        if item.choice not in self._text_events:
            self._text_events[item.choice] = TextEvents(
                lambda text: self._encoded(item._replace(event=TextDelta(text)))
            )
        return self._text_events[item.choice].of(event.text)

    def _encoded(self, item: ChoiceEvent) -> bytes:
        choice = self._choice_of(item)
        if choice is None:
            return b""
        further = self._prompt_fields if isinstance(item.event, PromptAdmitted) else NO_FIELDS
        return data_event({**self._shell, **further, "choices": [choice]})
