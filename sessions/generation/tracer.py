"""Notes the times of one generation in the trace of its request.

Turns what the engine reports into the terms of `platform/tracing`. An untraced generation costs four looks at the clock.
A traced one times the parser and the writes for its first tokens and for those after each report of the engine, which come
about once a second: a token between them costs nothing, as the caches of a gateway lose between two steps whatever more a
token touches.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from graftwork.engine.core.events import CacheReport, StepsTraced, TokenLogprobs
from graftwork.engine.core.step_spans import EngineSpan
from graftwork.platform.tracing.logs import TOKEN_LOGGER
from graftwork.platform.tracing.request_trace import RequestTrace, Span, Stage
from graftwork.sessions.generation.events import OutputEvent
from graftwork.sessions.generation.usage import Usage

Push = Callable[[Sequence[int], Sequence[TokenLogprobs]], list[OutputEvent]]
"""Reads the tokens of one step, and returns their events, as `OutputParser.push` does."""

TimedPush = Callable[[Sequence[int], Sequence[TokenLogprobs]], Iterable[OutputEvent]]
"""The same, perhaps with its time measured."""

_token_log = logging.getLogger(TOKEN_LOGGER)

_FIGURES = EngineSpan._fields[3:]
"""The fields of a span behind its name and its times."""


class GenerationTracer:
    """Notes when one generation did what."""

    push: TimedPush
    """Reads the tokens of one step, and returns their events: those of the first step and of one after each report of the
    engine with their time measured, if the request is traced.
    """

    def __init__(self, trace: RequestTrace, generation_id: str) -> None:
        """The generation is sent to the engine now."""
        self._trace = trace
        self._generation = trace.generation(generation_id)
        trace.mark(Stage.START)

    def time(self, push: Push) -> None:
        """Reads the tokens of each step with `push`."""
        self._push = self.push = push

    def _measure_next(self) -> None:
        if self._trace.is_traced:
            self.push = self._measured

    def _measured(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Iterator[OutputEvent]:
        """Yields the events of one step. Notes how long the parser took, and if each event is written to the client as it
        comes, how long their reader had them.
        """
        self.push = self._push
        now, generation = self._trace.now, self._generation
        began_at = now()
        events = self._push(token_ids, logprobs)
        read_at = now()
        generation.detokenise.add(read_at - began_at)
        yield from events
        if events and self._trace.is_written_as_generated:
            generation.writes.add(now() - read_at, len(events))

    def admitted(self, cache: CacheReport) -> None:
        self._trace.mark(Stage.QUEUE)
        generation = self._generation
        generation.admitted_at = self._trace.now()
        generation.prompt_tokens_by_tier = {
            "device": cache.device_tokens,
            "host": cache.host_tokens,
            "disk": cache.disk_tokens,
            "recomputed": cache.recomputed_tokens,
        }
        generation.miss_reason = None if cache.miss_reason is None else str(cache.miss_reason)
        self._measure_next()

    def first_token(self) -> None:
        self._trace.mark(Stage.PREFILL)
        self._generation.first_token_at = self._trace.now()

    def add_steps(self, event: StepsTraced) -> None:
        """Takes over what the engine reports of the request's steps."""
        self._generation.add_spans(event.run, self._trace.now() - event.sent_s, [_span(one) for one in event.spans])
        self._measure_next()

    def ended(self, usage: Usage | None) -> None:
        """Notes the end of the engine's work. `usage` is None if the engine had admitted no prompt."""
        generation = self._generation
        if generation.first_token_at is not None:
            self._trace.mark(Stage.DECODE)
        generation.ended_at = self._trace.now()
        self.count(usage)
        detokenise, writes = generation.detokenise, generation.writes
        if detokenise.measured:  # each step brings one token beside its accepted drafts
            detokenise.calls = generation.completion_tokens - generation.accepted_tokens
            writes.calls = round(writes.measured * detokenise.calls / detokenise.measured)

    def log_tokens(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Logs the token ids of prompt and answer, if the operator has asked for them. They are as good as the text."""
        trace = self._trace
        if trace.logs_token_ids:
            fields = {
                "request_id": self._generation.generation_id,
                "tenant_id": trace.tenant_id,
                "session_id": trace.session_id,
                "model": trace.adapter or trace.model,
                "prompt_token_ids": list(prompt),
                "completion_token_ids": list(answer),
            }
            _token_log.info("token_ids", extra=fields)

    def count(self, usage: Usage | None) -> None:
        """Notes how many tokens count. Tokens after a stop string do not, which is known only after the end."""
        generation = self._generation
        if usage is not None:
            generation.completion_tokens = usage.completion_tokens
            generation.drafted_tokens = usage.drafts.drafted_tokens
            generation.accepted_tokens = usage.drafts.accepted_tokens


def _span(span: EngineSpan) -> Span:
    name, start_s, duration_s, *figures = span
    return Span(
        name.value, start_s, duration_s, {field: value for field, value in zip(_FIGURES, figures, strict=True) if value}
    )
