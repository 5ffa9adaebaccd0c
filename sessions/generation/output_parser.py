"""One answer, token by token: text, stop strings and tool calls.

    token -> Detokenizer -> ToolCallParser -> text outside of calls -> StopStrings -> space before a call -> TextDelta
                                           -> calls ------------------------------------------------------> ToolCall…

Owns everything that is held back between tokens, and says when the answer is over before the engine does.
Keeps: stop strings are looked for in plain text only, and no two calls share one.
White space in front of a call is swallowed: templates write their own there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graftwork.engine.core.events import FinishReason
from graftwork.platform.ids import CallId, new_id
from graftwork.sessions.generation.events import (
    AnswerEvent,
    StopReason,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from graftwork.sessions.text.detokenizer import Detokenizer
from graftwork.sessions.text.stop_strings import StopStrings
from graftwork.sessions.text.tokenizer import TextTokenizer
from graftwork.sessions.tools.formats import CallSyntax, ToolCallForm
from graftwork.sessions.tools.json_parser import ToolCallParser
from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText
from graftwork.sessions.tools.python_parser import PythonicCallParser


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How one answer is read."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are no part of its text."""
    min_tokens: int = 0
    """Stop strings are not looked for in what these tokens say."""
    tool_calls: ToolCallForm | None = None
    """None: everything is text."""
    parallel_tool_calls: bool = True
    """False: the answer is over with its first call."""


class AnswerReader:
    """Reads one answer."""

    def __init__(self, tokenizer: TextTokenizer, rules: AnswerRules) -> None:
        """Raises InvalidRequest for an empty stop string."""
        self.token_ids: list[int] = []
        self.tool_calls: list[ToolCallFinished] = []
        self.is_over = False
        """A stop string was found, or the only call that is wanted has come."""
        self.stop_string: str | None = None
        """The one that was found."""
        self._num_characters = 0
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, shown=_marker_ids(tokenizer, rules.tool_calls))
        self._parser = None if rules.tool_calls is None else _parser(rules.tool_calls)
        self._stops = StopStrings(rules.stop)
        self._space = ""
        self._call_id = CallId("")
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    @property
    def next_offset(self) -> int:
        """Where the next token's text begins in the answer's; 0 where calls are read, which are no text."""
        return 0 if self._parser is not None else self._num_characters

    def is_spoken(self, token_id: int) -> bool:
        """Whether a token is part of the answer, and not what ends it."""
        return token_id not in self._rules.stop_token_ids

    def push(self, token_id: int) -> list[AnswerEvent]:
        """What one more token brings; not to be called when the answer is over."""
        self.token_ids.append(token_id)
        if not self.is_spoken(token_id):
            return []
        text = self._detokenizer.push((token_id,))
        self._num_characters += len(text)
        return self._heard(self._read(text))

    def finish(self) -> list[AnswerEvent]:
        """What was held back, when no token follows."""
        return self._heard(self._rest())

    def reason(self, engine_reason: FinishReason | None) -> StopReason:
        """Why the answer ended; `engine_reason` is None where the engine was stopped from here.

        A call that the length limit cut short is reported as the limit.
        """
        reached_limit = engine_reason is FinishReason.LENGTH
        if reached_limit and not all(call.complete for call in self.tool_calls):
            return "length"
        if self.tool_calls:
            return "tool_calls"
        return "length" if reached_limit and not self.is_over else "stop"

    def _heard(self, events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
        heard = list(events)
        self._texts += [event.text for event in heard if isinstance(event, TextDelta)]
        return heard

    def _rest(self) -> Iterator[AnswerEvent]:
        if not self.is_over:
            yield from self._read(self._detokenizer.flush())
        if not self.is_over and self._parser is not None:
            yield from self._sorted(self._parser.flush())
        if not self.is_over:
            yield from self._spoken(self._stops.flush())
        if self._space:
            yield TextDelta(self._space)

    def _read(self, text: str) -> Iterator[AnswerEvent]:
        yield from self._sorted(self._parser.push(text) if self._parser else [PlainText(text)])

    def _sorted(self, events: Iterable[ParserEvent]) -> Iterator[AnswerEvent]:
        for event in events:
            match event:
                case PlainText(text):
                    yield from self._plain(text)
                case CallStarted(index, name):
                    yield from self._spoken(self._stops.flush())
                    self._space = ""
                    self._call_id = CallId(new_id("call"))
                    yield ToolCallStarted(self._call_id, index, name)
                case CallArguments(index, delta):
                    yield ToolCallArgumentsDelta(self._call_id, index, delta)
                case CallFinished(index, name, arguments, complete):
                    call = ToolCallFinished(self._call_id, index, name, arguments, complete)
                    self.tool_calls.append(call)
                    self.is_over = not self._rules.parallel_tool_calls
                    yield call
            if self.is_over:
                return

    def _plain(self, text: str) -> Iterator[AnswerEvent]:
        """Text outside of calls, up to a stop string."""
        if len(self.token_ids) <= self._rules.min_tokens:
            yield from self._spoken(text)
            return
        outcome = self._stops.push(text)
        self.stop_string = outcome.matched
        self.is_over = outcome.matched is not None
        yield from self._spoken(outcome.text)

    def _spoken(self, text: str) -> Iterator[AnswerEvent]:
        """Text that is certain, but for the white space that a call behind it would swallow."""
        text = self._space + text
        self._space = text[len(text.rstrip()) :] if self._parser is not None else ""
        text = text[: len(text) - len(self._space)]
        if text:
            yield TextDelta(text)


def _parser(form: ToolCallForm) -> ToolCallParser | PythonicCallParser:
    return PythonicCallParser() if form.syntax is CallSyntax.PYTHON else ToolCallParser(form)


def _marker_ids(tokenizer: TextTokenizer, form: ToolCallForm | None) -> frozenset[int]:
    """Where a call's markers are special tokens, they are text to the parser all the same."""
    markers = (form.open, form.close) if form else ()
    return frozenset(token_id for token_id, text in tokenizer.added_tokens.items() if text in markers)
