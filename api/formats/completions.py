"""Builds text completions in OpenAI's two forms: one object, or a stream of chunks. Never generates anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.api.formats.chunks import write_chunks
from graftwork.api.formats.logprobs import completion_logprobs, echo_logprobs, vllm_prompt_logprobs
from graftwork.api.http.streaming import Write
from graftwork.api.inference.job import ChoiceEvent, InferenceJob
from graftwork.api.inference.request import ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.sessions.generation.generator import GenerationFinished, PromptReported, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs, PromptTokenLogprobs

_OBJECT = "text_completion"

PromptTokens = Sequence[PromptTokenLogprobs]


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What each answer (choice) of a text completion shows besides its text: token ids, the repeated prompt, and
    log-probabilities of the prompt.
    """

    prompt_token_ids: tuple[tuple[int, ...], ...]
    """The token ids of each choice's prompt."""
    echoes: tuple[str, ...]
    """The prompt text that each choice repeats before its completion; empty texts if the request has no `echo`."""
    with_token_ids: bool
    choices_per_prompt: int = 1
    echo_top: int | None = None
    """How many likely tokens each token of the repeated prompt shows; None for no log-probabilities."""
    prompt_top: int | None = None
    """The same for the field `prompt_logprobs`."""

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt, which may be long."""
        return self.echo_top is not None or self.prompt_top is not None

    def first_choice(self, index: int) -> int:
        """Returns the first choice of the same prompt. Only this one gets the prompt's log-probabilities."""
        return index - index % self.choices_per_prompt

    def choice(
        self,
        index: int,
        text: str,
        finished: GenerationFinished | None,
        scores: Sequence[OutputTokenLogprobs] | None = None,
    ) -> dict[str, Any]:
        reason = finished.reason if finished else None
        logprobs = None if scores is None else completion_logprobs(scores, len(self.echoes[index]))
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self.with_token_ids and finished is not None:
            choice["prompt_token_ids"] = list(self.prompt_token_ids[index])
            choice["token_ids"] = list(finished.token_ids)
        return choice

    def whole(self, index: int, finished: GenerationFinished, prompt: PromptTokens | None) -> dict[str, Any]:
        """Returns a whole choice. `prompt` has the log-probabilities of its prompt, if the request asked for them."""
        echo = self.echoes[index]
        choice = self.choice(index, echo + finished.text, finished, finished.logprobs)
        if prompt is not None and self.echo_top is not None:
            echoed = echo_logprobs(prompt, echo, self.echo_top)
            choice["logprobs"] = {name: [*echoed[name], *own] for name, own in choice["logprobs"].items()}
        if prompt is not None and self.prompt_top is not None:
            choice["prompt_logprobs"] = vllm_prompt_logprobs(prompt, self.prompt_top)
        return choice

    def echoed(self, index: int, prompt: PromptTokens | None) -> dict[str, Any]:
        """Returns the choice of the chunk that repeats the prompt."""
        echo = self.echoes[index]
        logprobs = None
        if prompt is not None and self.echo_top is not None:
            logprobs = echo_logprobs(prompt, echo, self.echo_top)
        return {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None}


def completion(
    head: ResponseHead, form: CompletionForm, answers: Sequence[GenerationFinished], job: InferenceJob
) -> dict[str, Any]:
    choices = [
        form.whole(index, finished, answers[form.first_choice(index)].prompt_logprobs)
        for index, finished in enumerate(answers)
    ]
    return head.fields(_OBJECT) | {"choices": choices, "usage": job.usage.as_body()}


async def write_completion_chunks(
    head: ResponseHead, form: CompletionForm, job: InferenceJob, write: Write, *, include_usage: bool
) -> None:
    """Writes the chunks of all answers of a text completion with `write`, until the job ends.

    If the request asks for token ids, the last chunk of each answer has all token ids of that answer.
    """
    await write_chunks(job, write, head.fields(_OBJECT), _ChunkChoices(form).of, include_usage=include_usage)


class _ChunkChoices:
    """Converts events to the choices of chunks. Keeps the log-probabilities of a prompt for all its answers."""

    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        self._prompts: dict[int, PromptTokens] = {}
        """The log-probabilities of each prompt, by its first choice. That choice's events come first."""

    def of(self, item: ChoiceEvent) -> dict[str, Any] | None:
        form, event = self._form, item.event
        if isinstance(event, TextDelta):
            return form.choice(item.choice, event.text, None, event.logprobs or None)
        if isinstance(event, GenerationFinished):
            return form.choice(item.choice, "", event, event.unsent_logprobs or None)
        is_first = item.choice == form.first_choice(item.choice)
        if isinstance(event, PromptReported):
            self._prompts[item.choice] = event.tokens
        elif not isinstance(event, PromptAdmitted) or (form.echo_top is not None and is_first):
            return None  # the echo waits for the prompt's log-probabilities
        prompt = self._prompts.get(form.first_choice(item.choice))
        return form.echoed(item.choice, prompt) if form.echoes[item.choice] else None
