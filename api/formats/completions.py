"""Builds the answers of chat completions and text completions in OpenAI's two forms: one object, or a stream of chunks.

A stream has one event for each new piece of an answer, then `[DONE]`. A request can have several answers, which
OpenAI's API calls choices. In a chat, the first chunk of a choice has the role, and the last chunk has the finish
reason. If the choice may have tool calls, the first chunk's content is null, because an empty text would count as text
before the calls. The first delta of a tool call has the call's index, id, type and name. Later deltas of the call have
only the index and a part of the arguments.
Owns the order and the encoding of the events. Never generates anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graftwork.api.formats.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    new_logprobs,
    vllm_prompt_logprobs,
)
from graftwork.api.http.streaming import DONE, TextEvents, Write, data_event, error_event
from graftwork.api.inference.job import ChoiceEvent, InferenceJob, ResponseHead
from graftwork.engine.core.events import PromptAdmitted
from graftwork.platform.errors import GraftworkError
from graftwork.sessions.generation.generator import (
    GenerationEvent,
    GenerationFinished,
    PromptReported,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallStarted,
)
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs, PromptTokenLogprobs

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
) -> bytes:
    """Writes the chunks of all choices with `write`, until the job ends. A choice is one of the request's answers. Returns
    the last event.

    `shell` has the fields that are equal in every chunk. `choice_of` converts an event to the entry in `choices`.
    `prompt_fields` are further fields of the first chunk of each choice.
    If the job fails, the last event is an `error`. If the client leaves, the server cancels this function.
    """
    chunks = _ChunkWriter({**shell, "usage": None} if include_usage else shell, choice_of, prompt_fields, write)
    try:
        await job.deliver(chunks.take)
    except GraftworkError as error:
        return error_event(error)
    if include_usage:
        await write(data_event({**shell, "usage": job.usage.as_body(), "choices": []}))
    return DONE


class _ChunkWriter:
    """Writes the chunks of one request. Chunks that differ only in text share the encoding of the other fields."""

    def __init__(
        self, shell: Mapping[str, Any], choice_of: ChoiceOf, prompt_fields: Mapping[str, Any], write: Write
    ) -> None:
        self._shell = shell
        self._choice_of = choice_of
        self._prompt_fields = prompt_fields
        self._write = write
        self._text_events: dict[int, TextEvents] = {}
        """The encoder for text events of each choice, by the choice's index."""

    async def take(self, item: ChoiceEvent) -> None:
        """Writes the chunk of an event. Writes nothing if the stream does not show the event."""
        choice, event = item
        if isinstance(event, TextDelta) and not event.logprobs:
            events = self._text_events.get(choice) or self._new_text_events(item)
            await self._write(events.of(event.text))
        elif chunk := self._encoded(item):
            await self._write(chunk)

    def _new_text_events(self, item: ChoiceEvent) -> TextEvents:
        events = TextEvents(lambda text: self._encoded(item._replace(event=TextDelta(text))))
        self._text_events[item.choice] = events
        return events

    def _encoded(self, item: ChoiceEvent) -> bytes:
        choice = self._choice_of(item)
        if choice is None:
            return b""
        further = self._prompt_fields if isinstance(item.event, PromptAdmitted) else NO_FIELDS
        return data_event({**self._shell, **further, "choices": [choice]})


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
) -> bytes:
    """Writes the chunks of all answers of a text completion with `write`, until the job ends. Returns the last event.

    If the request asks for token ids, the last chunk of each answer has all token ids of that answer.
    """
    return await write_chunks(job, write, head.fields(_OBJECT), _ChunkChoices(form).of, include_usage=include_usage)


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
    if finished.reasoning is not None:
        message["reasoning_content"] = finished.reasoning
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
) -> bytes:
    """Writes the chunks of all answers of a chat completion with `write`, until the job ends. Returns the last event.

    With `include_usage`, one more chunk at the end has the usage. If the client leaves, the server cancels this
    function and the job.
    """
    shell = head.fields("chat.completion.chunk")
    choice_of = partial(_chunk_choice, form)
    return await write_chunks(
        job, write, shell, choice_of, include_usage=include_usage, prompt_fields=form.prompt_fields
    )


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
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStarted):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}
    return {} if isinstance(event, GenerationFinished) else None
