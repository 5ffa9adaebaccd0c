"""Finds JSON tool calls in a text that arrives in pieces: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Owns the markup of a call from its start to its end. Never checks arguments against a schema.
A call's first event is returned when its name is known and its arguments begin. From then on, its arguments are
returned as the model writes them. Markup that is not a valid call is returned as text. If the JSON breaks after the
first event, the call ends with the arguments so far.
Invariant: the joined events do not depend on how the text is cut into pieces.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graftwork.sessions.text.stop_strings import StopStrings
from graftwork.sessions.tools.formats import HERMES, ToolCallFormat
from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText


class JsonCallParser:
    """Splits one generated text into plain text and JSON tool calls.

    Drops the separators between calls, and white space after the last call.
    """

    def __init__(self, tool_call_format: ToolCallFormat = HERMES) -> None:
        self._format = tool_call_format
        self._opening = StopStrings(tool_call_format.opens)
        self._space: str | None = None  # text since the last call; None after any other text
        self._call: _OpenCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> list[ParserEvent]:
        """Reads the next piece of the generated text. Returns the events that are certain now."""
        return list(_joined(self._read(text)))

    def flush(self) -> list[ParserEvent]:
        """Returns the events of the text that the parser still holds back. Call this method after the last piece."""
        abandoned = self._call.abandon() if self._call else []
        return list(_joined([*self._settle(abandoned), *self._text(self._opening.flush())]))

    def _read(self, text: str) -> Iterator[ParserEvent]:
        while text:
            if self._call is None:
                found = self._opening.push(text)
                yield from self._text(found.text)
                if found.matched:
                    self._call = _OpenCall(self._format, self._num_calls, found.matched)
                text = found.rest
            else:
                events, text = self._call.push(text)
                yield from self._settle(events)

    def _settle(self, events: Iterable[ParserEvent]) -> Iterator[ParserEvent]:
        """Passes on the events of the open call, and closes the call when it has ended."""
        for event in events:
            match event:
                case PlainText(text):
                    self._call = None
                    yield from self._text(text)
                case CallFinished():
                    self._num_calls += 1
                    self._space = ""
                    follower = None if self._call is None else self._call.follower
                    self._call = None if follower is None else _OpenCall(self._format, self._num_calls, follower)
                    yield event
                case _:
                    yield event

    def _text(self, text: str) -> Iterator[ParserEvent]:
        """Returns the text outside of calls, without separators between calls."""
        if self._space is not None:
            text = self._space + text
            self._space = text if self._format.between.strip().startswith(text.strip()) else None
        if text and self._space is None:
            yield PlainText(text)


class _OpenCall:
    """The markup of one call, after its opening."""

    def __init__(self, tool_call_format: ToolCallFormat, index: int, opened_by: str) -> None:
        self.follower: str | None = None  # the opening of the next call, if this call was not closed
        self._format = tool_call_format
        self._index = index
        self._members = JsonMembers()
        self._followers = (",",) if tool_call_format.list_opens else tool_call_format.opens
        self._ending = StopStrings((tool_call_format.close, *self._followers)) if tool_call_format.close else None
        self._unannounced = [opened_by]
        self._name: str | None = None
        self._is_announced = False
        self._is_broken = False
        self._num_passed_on = 0  # characters of the arguments
        for character in opened_by if tool_call_format.is_bare else "":
            self._members.feed(character)

    def push(self, text: str) -> tuple[list[ParserEvent], str]:
        """Returns the events of a piece of text, and the rest of the piece after this call."""
        rest = self._read_members(text)
        events = self._progress()
        if not self._members.is_complete and not self._is_broken:
            return events, rest
        if not self._is_announced:
            return [PlainText("".join(self._unannounced))], rest
        if self._ending is None:
            return [*events, self._finished()], rest
        outcome = self._ending.push(rest)
        if outcome.matched:
            self.follower = outcome.matched if outcome.matched in self._followers else None
            events.append(self._finished())
        return events, outcome.rest

    def abandon(self) -> list[ParserEvent]:
        """Returns the last events of an incomplete call after the text has ended."""
        return [self._finished()] if self._is_announced else [PlainText("".join(self._unannounced))]

    def _read_members(self, text: str) -> str:
        """Reads the call's JSON. Returns the text after it, or the text after the first wrong character."""
        end = 0
        while end < len(text) and not self._members.is_complete and not self._is_broken:
            try:
                self._take(text[end])
                end += 1
            except BrokenJson:
                self._is_broken = True
        if not self._is_announced:
            self._unannounced.append(text[:end])
        return text[end:]

    def _take(self, character: str) -> None:
        """Takes the next character into the call's markup. Raises BrokenJson if the text cannot be a call."""
        ended = self._members.feed(character)
        if ended is not None:
            self._check(ended, "".join(self._members.values[ended]))
        if self._arguments[:1] not in ([], ["{"]):
            raise BrokenJson(character)
        if self._members.is_complete and not self._is_ready:
            raise BrokenJson(character)

    def _check(self, key: str, value: str) -> None:
        """Checks a complete member (key and value) of the call's JSON object. Raises BrokenJson.

        The arguments of an announced call may be broken JSON.
        """
        if key == self._format.arguments_key:
            if self._name is None and not _is_object(value):
                raise BrokenJson(value)
        elif key == self._format.name_key:
            name = _parsed(value)
            if not name or not isinstance(name, str):
                raise BrokenJson(value)
            self._name = name
        else:
            _parsed(value)

    @property
    def _arguments(self) -> list[str]:
        """Returns the characters of the arguments so far.

        A call in markers may omit its arguments, which means an empty object. A bare object must have arguments.
        """
        nothing = ["{", "}"] if self._members.is_complete and not self._format.is_bare else []
        return self._members.values.get(self._format.arguments_key, nothing)

    @property
    def _is_ready(self) -> bool:
        return self._name is not None and self._arguments[:1] == ["{"]

    def _progress(self) -> list[ParserEvent]:
        """Returns the events that can be passed on now."""
        if self._name is None or not self._is_ready:
            return []
        events: list[ParserEvent] = [] if self._is_announced else [CallStarted(self._index, self._name)]
        self._is_announced = True
        delta = "".join(self._arguments[self._num_passed_on :])
        self._num_passed_on += len(delta)
        return [*events, CallArguments(self._index, delta)] if delta else events

    def _finished(self) -> CallFinished:
        arguments = "".join(self._arguments)
        return CallFinished(self._index, self._name or "", arguments, complete=_is_object(arguments))


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BrokenJson(value) from error


def _is_object(value: str) -> bool:
    try:
        return isinstance(_parsed(value), dict)
    except BrokenJson:
        return False


def _joined(events: Iterable[ParserEvent]) -> Iterator[ParserEvent]:
    """Returns the events with neighbouring texts joined, and neighbouring pieces of the same arguments joined."""
    last: ParserEvent | None = None
    for event in events:
        match last, event:
            case PlainText(before), PlainText(text):
                last = PlainText(before + text)
            case CallArguments(index, before), CallArguments(_, delta):
                last = CallArguments(index, before + delta)
            case _:
                if last is not None:
                    yield last
                last = event
    if last is not None:
        yield last


WHITE_SPACE = " \t\n\r"


CLOSER = {"{": "}", "[": "]"}


OUTSIDE_OF_STRINGS = frozenset('{}[]:,"+-.eE0123456789truefalsn' + WHITE_SPACE)


class BrokenJson(ValueError):
    """Raised if a text is not valid JSON, or if it is not the JSON of a tool call."""


class JsonMembers:
    """Reads one JSON object from a text, character by character.

    `values` has the text of each value, by key. While a value is incomplete, `values` has the part that was read.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        """The characters of each value's JSON text, by key. The value that was read last may be incomplete."""
        self.is_complete = False
        self._step: Callable[[str], None] = self._object
        self._key = ""
        self._key_characters: list[str] = []
        self._ended_key: str | None = None
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, character: str) -> str | None:
        """Reads the next character of the JSON object.

        If this character completes the value of a member, returns the key of the member. Otherwise returns None.
        Raises BrokenJson if the JSON is not valid.
        """
        self._ended_key = None
        self._step(character)
        return self._ended_key

    def _object(self, character: str) -> None:
        if character == "{":
            self._step = self._first_key
        else:
            _expect_space(character)

    def _first_key(self, character: str) -> None:
        if character == "}":
            self._end_object()
        else:
            self._next_key(character)

    def _next_key(self, character: str) -> None:
        if character == '"':
            self._key_characters = [character]
            self._step = self._in_key
        else:
            _expect_space(character)

    def _in_key(self, character: str) -> None:
        self._key_characters.append(character)
        if not self._ends_string(character):
            return
        try:
            self._key = json.loads("".join(self._key_characters))
        except ValueError as error:
            raise BrokenJson(character) from error
        if self._key in self.values:
            raise BrokenJson(character)
        self._step = self._colon

    def _colon(self, character: str) -> None:
        if character == ":":
            self._step = self._value
        else:
            _expect_space(character)

    def _value(self, character: str) -> None:
        if character in WHITE_SPACE:
            return
        self._step = self._nested if character in '"{[' else self._scalar
        if character not in OUTSIDE_OF_STRINGS or character in "}]:,":
            raise BrokenJson(character)
        self.values[self._key] = []
        self._step(character)

    def _nested(self, character: str) -> None:
        if self._in_string:
            self._in_string = not self._ends_string(character)
        elif character == '"':
            self._in_string = True
        elif character in CLOSER:
            self._closers.append(CLOSER[character])
        elif character in "}]":
            if self._closers.pop() != character:
                raise BrokenJson(character)
        elif character not in OUTSIDE_OF_STRINGS:
            raise BrokenJson(character)
        self.values[self._key].append(character)
        if not self._closers and not self._in_string:
            self._end_value()

    def _scalar(self, character: str) -> None:
        if character in WHITE_SPACE or character in ",}":
            self._end_value()
            self._step(character)
        elif character not in OUTSIDE_OF_STRINGS or character in '{[]:"':
            raise BrokenJson(character)
        else:
            self.values[self._key].append(character)

    def _end_value(self) -> None:
        self._ended_key = self._key
        self._step = self._behind_value

    def _behind_value(self, character: str) -> None:
        if character == ",":
            self._step = self._next_key
        elif character == "}":
            self._end_object()
        else:
            _expect_space(character)

    def _end_object(self) -> None:
        self.is_complete = True
        self._step = _expect_space

    def _ends_string(self, character: str) -> bool:
        ends = character == '"' and not self._escaped
        self._escaped = character == "\\" and not self._escaped
        return ends


def _expect_space(character: str) -> None:
    if character not in WHITE_SPACE:
        raise BrokenJson(character)
