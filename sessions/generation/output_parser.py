"""Reads one answer token by token, and splits it into reasoning, text and tool calls. Ends it at a stop string.

    token -> Detokenizer -> ReasoningSplitter -> ReasoningDelta, and the answer behind the reasoning:

    answer -> tool call parser -> text outside of calls -> StopStrings -> space before a call -> TextDelta
                               -> calls ------------------------------------------------------> ToolCall…

Owns all text that is held back between tokens. The parser can find the end of the answer before the engine does.
Invariant: stop strings are searched in plain text only, never in the reasoning, and never inside or across tool calls.
Log-probabilities belong to the tokens of the answer, not to those of the reasoning.
White space before a call is dropped, because chat templates write their own white space there.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from graftwork.engine.core.events import CacheReport, FinishReason, TokenLogprobs
from graftwork.platform.ids import CallId, new_id
from graftwork.sessions.generation.events import (
    GenerationFinished,
    OutputEvent,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.generation.logprobs import LogprobCollector
from graftwork.sessions.generation.reasoning import ReasoningFormat, ReasoningSplitter
from graftwork.sessions.text.stop_strings import StopStrings
from graftwork.sessions.text.tokenizer import Detokenizer, TextTokenizer
from graftwork.sessions.tools.formats import CallSyntax, ToolCallFormat
from graftwork.sessions.tools.json_parser import JsonCallParser
from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText
from graftwork.sessions.tools.python_parser import PythonCallParser


@dataclass(frozen=True, slots=True)
class OutputRules:
    """Rules for reading one answer: where it ends, and whether it contains tool calls."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are not part of its text."""
    min_tokens: int = 0
    """Stop strings are ignored in the text of the first `min_tokens` tokens."""
    tool_calls: ToolCallFormat | None = None
    """The format of tool calls; None if all output is text."""
    parallel_tool_calls: bool = True
    """Whether several calls are allowed. If False, the answer ends with its first call."""
    reasoning: ReasoningFormat | None = None
    """The tags around the model's reasoning; None if all output is the answer."""
    is_reasoning: bool = False
    """Whether the output begins inside the reasoning, because the prompt ends with the opening tag."""
    with_logprobs: bool = False
    """Whether text deltas and the final event contain log-probabilities."""
    with_stop_logprobs: bool = False
    """Whether stop tokens have log-probabilities too, although they are not part of the text."""


class OutputParser:
    """Splits one answer into text and tool calls, token by token. Every method changes the parser's state."""

    def __init__(self, tokenizer: TextTokenizer, rules: OutputRules) -> None:
        """Makes the parser of one answer. Raises InvalidRequest for an empty stop string."""
        self.token_ids: list[int] = []
        """All tokens of the answer, with stop tokens."""
        self.is_over = False
        """Whether a stop string was found, or the only allowed call has ended."""
        self._stop_string: str | None = None
        self._tool_calls: list[ToolCallFinished] = []
        self._num_characters = 0
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, shown=_marker_ids(tokenizer, rules))
        self._splitter = (
            None if rules.reasoning is None else ReasoningSplitter(rules.reasoning, is_open=rules.is_reasoning)
        )
        self._reasoning: list[str] = []
        self._reasoning_starts: list[int] = []
        """For each token that begins inside the reasoning, the characters of the reasoning before it."""
        self._undecided: list[tuple[int, TokenLogprobs]] = []
        """The first tokens, as long as they may belong to the opening tag, with their log-probabilities."""
        self._parser = None if rules.tool_calls is None else _parser(rules.tool_calls)
        self._stops = StopStrings(rules.stop) if rules.stop else None
        self._logprobs = LogprobCollector(tokenizer) if rules.with_logprobs else None
        self._is_plain = self._parser is None and self._splitter is None and not rules.stop and self._logprobs is None
        self._space = ""
        self._call_id = CallId("")
        self._texts: list[str] = []

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[OutputEvent]:
        """Reads the tokens of one engine step, and returns their events. Drops tokens after the answer's end.

        `logprobs` must have one entry for each token if `with_logprobs` of the rules is True.
        """
        events: list[OutputEvent] = []
        if self._is_plain:
            self._push_plain(token_ids, events)
            return events
        for place, token_id in enumerate(token_ids):
            if self.is_over:
                break
            self.token_ids.append(token_id)
            is_stop = token_id in self._rules.stop_token_ids
            text = "" if is_stop else self._detokenizer.push(token_id)
            if self._splitter is not None and not self._splitter.has_ended and not is_stop:
                text = self._read_reasoning(token_id, text, logprobs[place] if logprobs else None, events)
            elif self._logprobs is not None and (not is_stop or self._rules.with_stop_logprobs):
                self._logprobs.add(token_id, logprobs[place], self._next_offset())
            self._num_characters += len(text)
            if not is_stop:
                events += self._with_logprobs(self._read(text))
        return events

    def _read_reasoning(
        self, token_id: int, text: str, logprobs: TokenLogprobs | None, events: list[OutputEvent]
    ) -> str:
        """Reads a token that may belong to the reasoning. Adds the delta of the reasoning, and returns the answer's text.

        A token belongs to the answer if any of its text does, and if it is in neither of the tags.
        """
        splitter = self._splitter
        assert splitter is not None
        was_inside = splitter.is_inside
        if was_inside:
            self._reasoning_starts.append(splitter.num_inside)
        reasoning, answer = splitter.push(text)
        if reasoning:
            self._reasoning.append(reasoning)
            events.append(ReasoningDelta(reasoning))
        if self._logprobs is not None and logprobs is not None and not was_inside and not splitter.is_inside:
            self._undecided.append((token_id, logprobs))
            if not splitter.is_before:
                for own_id, own in self._undecided:
                    self._logprobs.add(own_id, own, self._next_offset())
                self._undecided = []
        if splitter.is_inside:
            self._undecided = []
        return answer

    def _push_plain(self, token_ids: Sequence[int], events: list[OutputEvent]) -> None:
        """Adds the events of tokens to `events`, if all that is shown is text, and nothing in the text can end it."""
        self.token_ids += token_ids
        for token_id in token_ids:
            if token_id not in self._rules.stop_token_ids and (text := self._detokenizer.push(token_id)):
                self._texts.append(text)
                events.append(TextDelta(text))

    def finish(self) -> list[OutputEvent]:
        """Returns the events for the text that the parser has held back. Call this method after the last token."""
        return self._with_logprobs(self._flush())

    def finished(self, engine_reason: FinishReason | None, cache: CacheReport) -> GenerationFinished:
        """Returns the last event of the answer, GenerationFinished. Call this method after `finish`.

        `engine_reason` says why the engine stopped. It is None if the request was cancelled before the engine finished
        it.
        """
        logprobs = self._logprobs
        if logprobs is not None and self._stop_string is not None:
            logprobs.drop_rest()
        return GenerationFinished(
            reason=self._reason(engine_reason),
            token_ids=tuple(self.token_ids),
            text="".join(self._texts),
            tool_calls=tuple(self._tool_calls),
            cache=cache,
            logprobs=None if logprobs is None else tuple(logprobs.logprobs),
            num_logprobs_sent=0 if logprobs is None else logprobs.num_taken,
            stop_string=self._stop_string,
            reasoning="".join(self._reasoning) or None,
            reasoning_tokens=self.reasoning_tokens,
        )

    @property
    def reasoning_tokens(self) -> int:
        """The tokens that begin inside the reasoning, before its closing tag."""
        return 0 if self._splitter is None else bisect_left(self._reasoning_starts, self._splitter.num_inside)

    def _reason(self, engine_reason: FinishReason | None) -> StopReason:
        """Returns why the answer ended. If the length limit cut off a call, the reason is the limit."""
        reached_limit = engine_reason is FinishReason.LENGTH
        if reached_limit and not all(call.complete for call in self._tool_calls):
            return "length"
        if self._tool_calls:
            return "tool_calls"
        return "length" if reached_limit and not self.is_over else "stop"

    def _next_offset(self) -> int:
        """Returns where the next token's text begins, in characters; always 0 if tool calls are parsed."""
        return 0 if self._parser is not None else self._num_characters

    def _with_logprobs(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        """Adds the text of the events to the answer, and log-probabilities to the events."""
        noted: list[OutputEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._texts.append(event.text)
                if self._logprobs is not None:
                    event = TextDelta(event.text, self._logprobs.take_for(event.text))
            noted.append(event)
        return noted

    def _flush(self) -> Iterator[OutputEvent]:
        if not self.is_over:
            yield from self._flush_text()
        if not self.is_over and self._parser is not None:
            yield from self._outputs(self._parser.flush())
        if not self.is_over:
            yield from self._text(self._flush_stops())
        if self._space:
            yield TextDelta(self._space)

    def _flush_text(self) -> Iterator[OutputEvent]:
        """Returns the events of the text that was held back before the tool call parser."""
        text = self._detokenizer.flush()
        if self._splitter is None:
            yield from self._read(text)
            return
        for reasoning, answer in (self._splitter.push(text), self._splitter.flush()):
            if reasoning:
                self._reasoning.append(reasoning)
                yield ReasoningDelta(reasoning)
            yield from self._read(answer)

    def _read(self, text: str) -> Iterator[OutputEvent]:
        yield from self._outputs(self._parser.push(text) if self._parser else [PlainText(text)])

    def _outputs(self, events: Iterable[ParserEvent]) -> Iterator[OutputEvent]:
        for event in events:
            match event:
                case PlainText(text):
                    yield from self._plain_text(text)
                case CallStarted(index, name):
                    yield from self._text(self._flush_stops())
                    self._space = ""
                    self._call_id = CallId(new_id("call"))
                    yield ToolCallStarted(self._call_id, index, name)
                case CallArguments(index, delta):
                    yield ToolCallArgumentsDelta(self._call_id, index, delta)
                case CallFinished(index, name, arguments, complete):
                    call = ToolCallFinished(self._call_id, index, name, arguments, complete)
                    self._tool_calls.append(call)
                    self.is_over = not self._rules.parallel_tool_calls
                    yield call
            if self.is_over:
                return

    def _plain_text(self, text: str) -> Iterator[OutputEvent]:
        """Returns the events of text outside of calls, up to a stop string."""
        if self._stops is None or len(self.token_ids) <= self._rules.min_tokens:
            yield from self._text(text)
            return
        outcome = self._stops.push(text)
        self._stop_string = outcome.matched
        self.is_over = outcome.matched is not None
        yield from self._text(outcome.text)

    def _flush_stops(self) -> str:
        """Returns the text that was held back as a possible start of a stop string."""
        return "" if self._stops is None else self._stops.flush()

    def _text(self, text: str) -> Iterator[OutputEvent]:
        """Returns text that is certainly not part of a stop string.

        Holds back white space that a following call would drop.
        """
        text = self._space + text
        self._space = text[len(text.rstrip()) :] if self._parser is not None else ""
        text = text[: len(text) - len(self._space)]
        if text:
            yield TextDelta(text)


def _parser(tool_call_format: ToolCallFormat) -> JsonCallParser | PythonCallParser:
    return PythonCallParser() if tool_call_format.syntax is CallSyntax.PYTHON else JsonCallParser(tool_call_format)


def _marker_ids(tokenizer: TextTokenizer, rules: OutputRules) -> frozenset[int]:
    """Returns the tags and call markers that are single tokens of the vocabulary. The parsers need their text."""
    forms = [form for form in (rules.tool_calls, rules.reasoning) if form is not None]
    markers = {marker for form in forms for marker in (form.open, form.close)}
    return frozenset(token_id for token_id, text in tokenizer.added_tokens.items() if text in markers)
