"""Reads the regular expressions of JSON Schema (ECMA-262, unicode).

Never accepts what is not regular: look-around, back references, word boundaries and flags are refused.
"""

from dataclasses import dataclass

from graftwork.engine.grammar.patterns.nodes import (
    ANYTHING,
    LAST_POINT,
    SURROGATES,
    Chars,
    Either,
    Node,
    PatternError,
    Ranges,
    Repeat,
    Run,
    complement,
    normalise,
    points,
)

_MAX_GROUPS = 32
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD = normalise([*_DIGIT, (0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)])
_SPACE = normalise([*points("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)])
_NOT_NEWLINE = complement(points("\n\r\u2028\u2029"))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CLASSES |= {letter.upper(): complement(ranges) for letter, ranges in _CLASSES.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")


@dataclass(frozen=True, slots=True)
class _Alternative:
    """One alternative of a pattern: a sequence, and whether it is anchored at the text's start and end."""

    parts: tuple[Node, ...]
    starts: bool
    ends: bool


class _Reader:
    """Reads one pattern by recursive descent. Raises PatternError if the pattern is malformed or not regular."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> list[_Alternative]:
        found = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("it has a ')' too many")
        return found

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternError("it ends too early")
        self._at += 1
        return character

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self) -> list[_Alternative]:
        found = self._alternative()
        while self._skip("|"):
            found += self._alternative()
        return found

    def _alternative(self) -> list[_Alternative]:
        parts: list[Node] = []
        starts = ends = False
        while self._peek() not in ("", "|", ")"):
            if ends:
                raise PatternError("'$' stands before more text")
            if self._skip("^"):
                if parts:
                    raise PatternError("'^' stands behind other text")
                starts = True
            elif self._skip("$"):
                ends = True
            else:
                term = self._term()
                if isinstance(term, list):  # a group with its own anchors
                    if parts or starts or self._peek() not in ("", "|", ")"):
                        raise PatternError("an anchor stands inside a group among other text")
                    return term
                parts.append(self._quantified(term))
        return [_Alternative(tuple(parts), starts, ends)]

    def _term(self) -> "Node | list[_Alternative]":
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._class())
        if character == ".":
            return Chars(_NOT_NEWLINE)
        if character == "\\":
            return Chars(self._escape(in_class=False))
        if character in "*+?{}]":
            raise PatternError(f"{character!r} stands where nothing can be repeated or closed")
        return Chars(points(character))

    def _group(self) -> "Node | list[_Alternative]":
        if self._skip("?") and not self._skip(":"):
            self._name_or_refuse()
        self._depth += 1
        if self._depth > _MAX_GROUPS:
            raise PatternError(f"its groups are more than {_MAX_GROUPS} deep")
        inner = self._alternatives()
        self._depth -= 1
        if not self._skip(")"):
            raise PatternError("a group is not closed")
        if any(one.starts or one.ends for one in inner):
            return inner
        return Either(tuple(Run(one.parts) for one in inner))

    def _name_or_refuse(self) -> None:
        if not self._skip("<") or self._peek() in ("=", "!"):
            raise PatternError("look-around and flags are not regular or not served")
        while self._take() != ">":
            pass

    def _quantified(self, part: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        self._skip("?")  # a lazy repeat matches the same texts
        if self._peek() in ("*", "+", "?"):
            raise PatternError("a repeat is repeated without a group")
        return Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._peek() in simple:
            return simple[self._take()]
        if not self._skip("{"):
            return None
        least = self._number()
        most: int | None = least
        if self._skip(","):
            most = None if self._peek() == "}" else self._number()
        if not self._skip("}") or (most is not None and most < least):
            raise PatternError("a counted repeat is malformed")
        return least, most

    def _number(self) -> int:
        start = self._at
        while self._peek() in tuple("0123456789"):
            self._at += 1
        if not 0 < self._at - start <= 9:
            raise PatternError("a counted repeat is malformed")
        return int(self._text[start : self._at])

    def _class(self) -> Ranges:
        negated = self._skip("^")
        if self._peek() == "]":
            raise PatternError("an empty class reads differently in different dialects")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._class_atom()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_atom()
                if not (_is_one(low) and _is_one(high)) or high[0][0] < low[0][0]:
                    raise PatternError("a range in a class is malformed")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        return complement(ranges) if negated else normalise(ranges)

    def _class_atom(self) -> Ranges:
        character = self._take()
        return self._escape(in_class=True) if character == "\\" else points(character)

    def _escape(self, *, in_class: bool) -> Ranges:
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return ((_CONTROLS[character],) * 2,)
        if character in "xu":
            return self._code_point(2 if character == "x" else 4)
        if character == "0" and self._peek() not in tuple("0123456789"):
            return ((0, 0),)
        if character == "b" and in_class:
            return ((8, 8),)
        if character.isalnum():
            raise PatternError(f"'\\{character}' is not served")
        if character not in _SYNTAX and not character.isascii():
            raise PatternError(f"'\\{character}' is not an escape")
        return points(character)

    def _code_point(self, digits: int) -> Ranges:
        is_braced = digits == 4 and self._skip("{")
        end = self._text.find("}", self._at) if is_braced else self._at + digits
        text = self._text[self._at : max(end, self._at)]
        if not text or not _HEX_DIGITS.issuperset(text) or (not is_braced and len(text) < digits):
            raise PatternError("a code point is malformed")
        self._at = end + is_braced
        point = int(text, 16)
        if point > LAST_POINT or SURROGATES[0] <= point <= SURROGATES[1]:
            raise PatternError("a code point is none, or half of one")
        return ((point, point),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def read_search(pattern: str) -> Node:
    """Reads a pattern that may match anywhere in a text unless it has anchors, as the JSON Schema keyword `pattern`.

    Raises PatternError if the pattern cannot be enforced.
    """
    return _joined(_Reader(pattern).read(), around=(ANYTHING,))


def read_whole(pattern: str) -> Node:
    """Reads a pattern that must match the whole text. Raises PatternError if it cannot be enforced."""
    return _joined(_Reader(pattern).read(), around=())


def _joined(alternatives: list[_Alternative], around: tuple[Node, ...]) -> Node:
    runs = [Run((*(() if one.starts else around), *one.parts, *(() if one.ends else around))) for one in alternatives]
    return runs[0] if len(runs) == 1 else Either(tuple(runs))
