r"""Parses a pattern of module names (a regular expression) into a syntax tree.

Owns the supported part of the regular expression language: characters, classes, groups, alternatives, repeats and
anchors. Refuses any other feature (look-around, back-references, flags, \b) with an error that names the feature. Never
matches a name.
"""

import string
from dataclasses import dataclass

_MAX_NESTING = 16

_ALL = frozenset(map(chr, range(128))) - {"\n"}
_CLASSES = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset(" \t\n\r\f\v"),
}
_ESCAPED_CLASSES = _CLASSES | {name.upper(): (_ALL | {"\n"}) - members for name, members in _CLASSES.items()}
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternRefused(ValueError):
    """Raised for a pattern that has a syntax error, or that uses a feature that is not supported. The message says
    which.
    """


@dataclass(frozen=True, slots=True)
class Characters:
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class Anchor:
    at_start: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    node: "Node"
    least: int
    most: int | None


Node = Characters | Anchor | Sequence | Choice | Repeat


class PatternParser:
    """Parses one pattern. Looks only at the next character to decide what to parse."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternRefused("a ')' closes nothing")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternRefused("it ends too early")
        self._at += 1
        return character

    def _accept(self, expected: str) -> bool:
        if not self._text.startswith(expected, self._at):
            return False
        self._at += len(expected)
        return True

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        return Choice(tuple(options)) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom()))
        return Sequence(tuple(parts))

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._class())
        if character == ".":
            return Characters(_ALL)
        if character in "^$":
            return Anchor(at_start=character == "^")
        if character == "\\":
            return Characters(self._escape())
        if character in "*+?{":
            raise PatternRefused(f"'{character}' has nothing to repeat (write '\\{character}' for the character)")
        return Characters(frozenset(character))

    def _group(self) -> Node:
        if self._peek() == "?" and not self._accept("?:"):
            raise PatternRefused("'(?' other than '(?:' is not matched here")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise PatternRefused(f"groups are nested deeper than {_MAX_NESTING}")
        node = self._choice()
        if not self._accept(")"):
            raise PatternRefused("a '(' is never closed")
        self._depth -= 1
        return node

    def _escape(self) -> frozenset[str]:
        character = self._take()
        if character in _ESCAPED_CLASSES:
            return _ESCAPED_CLASSES[character]
        if character.isascii() and not character.isalnum():
            return frozenset(character)
        raise PatternRefused(f"'\\{character}' is not matched here")

    def _class(self) -> frozenset[str]:
        negated = self._accept("^")
        members: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            members |= self._class_item()
        self._take()
        return (_ALL | {"\n"}) - members if negated else frozenset(members)

    def _class_item(self) -> frozenset[str]:
        low = self._class_character()
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return low
        self._take()
        high = self._class_character()
        if len(low) != 1 or len(high) != 1 or min(low) > min(high):
            raise PatternRefused("a range in '[]' runs backwards or between classes")
        return frozenset(map(chr, range(ord(min(low)), ord(min(high)) + 1)))

    def _class_character(self) -> frozenset[str]:
        character = self._take()
        return self._escape() if character == "\\" else frozenset(character)

    def _quantified(self, node: Node) -> Node:
        bounds = self._quantifier()
        if bounds is None:
            return node
        if isinstance(node, Anchor):
            raise PatternRefused("an anchor cannot be repeated")
        self._accept("?")  # a lazy repeat matches the same names
        if self._peek() in ("*", "+", "?", "{"):
            raise PatternRefused("a repeat of a repeat is not matched here")
        return Repeat(node, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        character = self._peek()
        if character in _QUANTIFIERS:
            self._take()
            return _QUANTIFIERS[character]
        if not self._accept("{"):
            return None
        least, comma, most = self._up_to_brace().partition(",")
        if not comma:
            most = least
        if not all(part == "" or (part.isascii() and part.isdigit() and len(part) < 4) for part in (least, most)):
            raise PatternRefused("'{…}' must hold one or two small numbers")
        bounds = (int(least or 0), int(most) if most else None)
        if (not least and not most) or (bounds[1] is not None and bounds[0] > bounds[1]):
            raise PatternRefused("'{…}' must hold one or two small numbers, the smaller first")
        return bounds

    def _up_to_brace(self) -> str:
        end = self._text.find("}", self._at)
        if end < 0:
            raise PatternRefused("a '{' is never closed")
        inside = self._text[self._at : end]
        self._at = end + 1
        return inside
