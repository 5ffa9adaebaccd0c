"""Builds text completions in OpenAI's two forms: one object, or a stream of chunks. Never generates anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graftwork.api.formats.chunks import write_chunks
from graftwork.api.formats.logprobs import completion_logprobs
from graftwork.api.http.streaming import Write
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.api.inference.request import ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.sessions.generation.generator import GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs

_OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What each answer (choice) of a text completion shows besides its text: token ids, and the repeated prompt."""

    prompt_token_ids: tuple[tuple[int, ...], ...]
    """The token ids of each choice's prompt."""
    echoes: tuple[str, ...]
    """The prompt text that each choice repeats before its completion; empty texts if the request has no `echo`."""
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
    """Writes the chunks of all answers of a text completion with `write`, until the job ends.

    If the request asks for token ids, the last chunk of each answer has all token ids of that answer.
    """
    choice_of = partial(_chunk_choice, form)
    await write_chunks(job, write, head.fields(_OBJECT), choice_of, include_usage=include_usage)


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
