"""The members of one JSON object, read character by character.

Owns where each key and value begins and ends; the values stay as written, unparsed.
Raises BrokenJson at the first character that no object can have there; what a value's inside means is not looked at.
"""

import json
from collections.abc import Callable

WHITE_SPACE = " \t\n\r"
CLOSER = {"{": "}", "[": "]"}
OUTSIDE_OF_STRINGS = frozenset('{}[]:,"+-.eE0123456789truefalsn' + WHITE_SPACE)


class BrokenJson(ValueError):
    """This character cannot stand here."""


class JsonMembers:
    """Feed it an object; `values` grows with every character of a value."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        """The characters of each value, by key; those of the last one may still be coming."""
        self.is_complete = False
        self._step: Callable[[str], None] = self._object
        self._key = ""
        self._key_characters: list[str] = []
        self._ended_key: str | None = None
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, character: str) -> str | None:
        """Take one character; answers the key whose value it has ended. Raises BrokenJson."""
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
