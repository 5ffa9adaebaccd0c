"""Text completions in OpenAI's two shapes: one object, and a stream of chunks."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from graftwork.api.formats.logprobs import completion_logprobs
from graftwork.api.http.sse import DONE, TextEvents, Write, data_event, error_event
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.api.inference.request import ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.generation.generator import GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs

_OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What to show of each choice."""

    prompt_token_ids: tuple[tuple[int, ...], ...]
    """By choice."""
    echoes: tuple[str, ...]
    """By choice: the text before the completion, empty without `echo`."""
    with_token_ids: bool

    def choice(
        self,
        index: int,
        text: str,
        finished: GenerationFinished | None,
        scores: Sequence[OutputTokenLogprobs] | None = None,
    ) -> dict[str, Any]:
        reason = finished.reason if finished else None
        logprobs = None if scores is None else completion_logprobs(scores)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self.with_token_ids and finished is not None:
            choice["prompt_token_ids"] = list(self.prompt_token_ids[index])
            choice["token_ids"] = list(finished.token_ids)
        return choice


def completion(
    head: ResponseHead, form: CompletionForm, answers: Sequence[GenerationFinished], job: InferenceJob
) -> dict[str, Any]:
    choices = [
        form.choice(index, form.echoes[index] + finished.text, finished, finished.logprobs)
        for index, finished in enumerate(answers)
    ]
    return head.fields(_OBJECT) | {"choices": choices, "usage": job.usage.as_body()}


async def write_completion_chunks(
    head: ResponseHead, form: CompletionForm, job: InferenceJob, write: Write, *, include_usage: bool
) -> None:
    """Write the whole stream. The last chunk of a choice has all its token ids, if they were requested."""
    shell = head.fields(_OBJECT) | ({"usage": None} if include_usage else {})
    text_chunks: dict[int, TextEvents] = {}
    async with aclosing(job.events()) as events:
        try:
            async for item in events:
                event = item.event
                if isinstance(event, TextDelta) and not event.logprobs:
                    if item.choice not in text_chunks:
                        text_chunks[item.choice] = _text_chunks(shell, form, item.choice)
                    await write(text_chunks[item.choice].of(event.text))
                elif (choice := _chunk_choice(form, item)) is not None:
                    await write(data_event(shell | {"choices": [choice]}))
        except GraftworkError as error:
            await write(error_event(error))
            return
    if include_usage:
        await write(data_event(shell | {"choices": [], "usage": job.usage.as_body()}))
    await write(DONE)


def _text_chunks(shell: Mapping[str, Any], form: CompletionForm, index: int) -> TextEvents:
    """The chunks of a choice that have nothing but text in them."""
    return TextEvents(lambda text: data_event({**shell, "choices": [form.choice(index, text, None)]}))


def _chunk_choice(form: CompletionForm, item: ChoiceEvent) -> dict[str, Any] | None:
    event = item.event
    if isinstance(event, PromptAdmitted):
        echo = form.echoes[item.choice]
        return form.choice(item.choice, echo, None) if echo else None
    if isinstance(event, TextDelta):
        return form.choice(item.choice, event.text, None, event.logprobs or None)
    if isinstance(event, GenerationFinished):
        return form.choice(item.choice, "", event, event.unsent_logprobs or None)
    return None
