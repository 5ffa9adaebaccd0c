"""The stream of chunks that chat and text completions share: one event for each delta of a choice, then `[DONE]`."""

from collections.abc import Callable, Mapping
from typing import Any

from graftwork.api.http.streaming import DONE, TextEvents, Write, data_event, error_event
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.generation.generator import TextDelta

ChoiceOf = Callable[[ChoiceEvent], Mapping[str, Any] | None]
"""One event as a chunk's choice; None for what the stream does not show."""


async def write_chunks(
    job: InferenceJob, write: Write, shell: Mapping[str, Any], choice_of: ChoiceOf, *, include_usage: bool
) -> None:
    """Write the whole stream; `shell` is what every chunk has. If the client leaves, this is cancelled."""
    chunks = _Chunks({**shell, "usage": None} if include_usage else shell, choice_of)
    try:
        while events := await job.next_events():
            if found := b"".join(chunks.of(event) for event in events):
                await write(found)
    except GraftworkError as error:
        await write(error_event(error))
        return
    if include_usage:
        await write(data_event({**shell, "usage": job.usage.as_body(), "choices": []}))
    await write(DONE)


class _Chunks:
    """The chunks of one answer. Of those that have nothing but text, all but the text is encoded once."""

    def __init__(self, shell: Mapping[str, Any], choice_of: ChoiceOf) -> None:
        self._shell = shell
        self._choice_of = choice_of
        self._text_events: dict[int, TextEvents] = {}
        """By choice."""

    def of(self, item: ChoiceEvent) -> bytes:
        """One event's chunk, or nothing."""
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
        return b"" if choice is None else data_event({**self._shell, "choices": [choice]})
