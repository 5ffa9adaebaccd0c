r"""Turns a Lark grammar into one regular expression of ECMA-262.

The text of a custom tool stands in a JSON string, where the grammar engines enforce patterns, but no grammars. A
grammar without recursion describes the same texts as a pattern, so each name is replaced by what it stands for.

    start: "a" b+      b: "(" /[0-9]/ ")"      is the pattern      a(?:\([0-9]\))+

Never accepts what a pattern cannot say: recursion, `%ignore`, `%declare`, look-around and flags are refused. Each
expression between slashes is read alone before it is joined to others, so that it cannot close their groups.
"""

import ast
import re
import warnings
from dataclasses import dataclass, field

from graftwork.engine.grammar.patterns.nodes import PatternError
from graftwork.engine.grammar.patterns.reader import read_whole

_MAX_PATTERN_CHARACTERS = 16 * 1024
_MAX_NESTED = 64
_MAX_COUNT_DIGITS = 9
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")
_NAME = r"[A-Za-z_][A-Za-z_0-9]*"
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t\f\r]+|//[^\n]*)
    |(?P<line>\n\s*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<directive>%[a-z]+[^\n]*)
    |(?P<head>[?!]{{0,2}}{_NAME}(?:\.-?\d+)?[ \t]*:(?!:))
    |(?P<name>{_NAME})
    |(?P<alias>->[ \t]*{_NAME})
    |(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<sign>\.\.|[|()\[\]*+?])
    """,
    re.VERBOSE,
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "LETTER": "[a-zA-Z]",
    "UCASE_LETTER": "[A-Z]",
    "LCASE_LETTER": "[a-z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*",
}
"""The names of Lark's own library that a grammar may import, as patterns."""


class LarkError(ValueError):
    """Raised for a grammar that is malformed, or that no pattern can express. The message says why."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


_OPENINGS = {_Token("sign", "("): _Token("sign", ")"), _Token("sign", "["): _Token("sign", "]")}


def lark_pattern(definition: str) -> str:
    """Returns the pattern that matches the same texts as the rule `start` of the grammar. Raises LarkError."""
    grammar = _Grammar(_rules(definition))
    if "start" not in grammar.rules:
        raise LarkError("it has no rule named start")
    return grammar.pattern_of("start")


def _rules(definition: str) -> dict[str, list[_Token]]:
    """Returns the tokens of each rule, by its name. Imported names are rules too."""
    rules: dict[str, list[_Token]] = {}
    rule: list[_Token] | None = None
    at = 0
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            raise LarkError(f"{definition[at : at + 12]!r} is no Lark that is served")
        at, kind, text = found.end(), found.lastgroup or "", found[0]
        if kind == "directive":
            rules |= _imported(text)
        elif kind == "head":
            name = re.sub(r"\.-?\d+", "", text).strip("?!: \t")
            if name in rules:
                raise LarkError(f"the rule {name} is defined twice")
            rule = rules[name] = []
        elif kind not in ("space", "line"):
            if rule is None:
                raise LarkError(f"{text[:12]!r} stands before the first rule")
            rule.append(_Token(kind, text))
    return rules


def _imported(directive: str) -> dict[str, list[_Token]]:
    found = re.fullmatch(rf"%import\s+common\.({_NAME})\s*+(?:->\s*({_NAME})\s*+)?(?://.*)?", directive.strip())
    if found is None or found[1] not in _COMMON:
        raise LarkError(f"{directive.strip()[:40]!r} is not served, only %import of {', '.join(_COMMON)} from common")
    return {found[2] or found[1]: [_Token("written", _COMMON[found[1]])]}


@dataclass(slots=True)
class _Grammar:
    """The rules of one grammar, and the patterns of the rules that were read so far."""

    rules: dict[str, list[_Token]]
    patterns: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    """The rules that are being read. A rule that needs one of them is recursive."""

    def pattern_of(self, name: str) -> str:
        if name in self.patterns:
            return self.patterns[name]
        if name in self.open:
            raise LarkError(f"the rule {name} is recursive; a grammar for a text must do without recursion")
        if name not in self.rules:
            raise LarkError(f"there is no rule named {name}")
        if len(self.open) >= _MAX_NESTED:
            raise LarkError(f"its rules are more than {_MAX_NESTED} deep")
        self.open.append(name)
        self.patterns[name] = _RuleReader(self, self.rules[name]).read()
        self.open.pop()
        return self.patterns[name]


class _RuleReader:
    """Reads the right side of one rule by recursive descent."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token]) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        pattern = self._choices()
        if self._at < len(self._tokens):
            raise LarkError(f"{self._tokens[self._at].text!r} stands where nothing fits")
        return pattern

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _Token("end", "")

    def _take(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _choices(self) -> str:
        choices = [self._sequence()]
        num_characters = len(choices[0])
        while self._peek().text == "|" and self._peek().kind == "sign":
            self._take()
            choices.append(self._sequence())
            num_characters += len(choices[-1])
            _check_size(num_characters)
        pattern = choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
        _check_size(len(pattern))
        return pattern

    def _sequence(self) -> str:
        parts: list[str] = []
        num_characters = 0
        while (token := self._peek()).kind in ("text", "pattern", "name", "written") or token in _OPENINGS:
            parts.append(self._repeated())
            num_characters += len(parts[-1])
            _check_size(num_characters)
        if token.kind == "alias":
            self._take()
        return "".join(parts)

    def _repeated(self) -> str:
        atom = self._atom()
        token = self._peek()
        if token.kind == "sign" and token.text in ("*", "+", "?"):
            return f"(?:{atom}){self._take().text}"
        if token.kind == "times":
            least, _, most = self._take().text.strip("~ \t").partition("..")
            return f"(?:{atom}){{{_count(least)}{f',{_count(most)}' if most else ''}}}"
        return atom

    def _atom(self) -> str:
        token = self._take()
        if token.kind == "written":
            return token.text
        if token.kind == "name":
            return self._grammar.pattern_of(token.text)
        if token.kind == "pattern":
            body, _, flags = token.text[1:].rpartition("/")
            if flags:
                raise LarkError(f"the flags of {token.text[:20]!r} are not served")
            try:
                read_whole(body)
            except PatternError as error:
                raise LarkError(f"the pattern {token.text[:20]!r} is not served: {error}") from error
            return f"(?:{body})"
        if token.kind == "text":
            if self._peek() == _Token("sign", ".."):
                return self._range(token)
            return "".join(f"\\{one}" if one in _SYNTAX else one for one in _literal(token.text))
        return self._grouped(token)

    def _grouped(self, opening: _Token) -> str:
        """Reads a group in parentheses, or in brackets, which say that it may be missing."""
        self._depth += 1
        if self._depth > _MAX_NESTED:
            raise LarkError(f"its groups are more than {_MAX_NESTED} deep")
        inner = self._choices()
        self._depth -= 1
        if self._take() != _OPENINGS[opening]:
            raise LarkError("a group is not closed")
        return f"(?:{inner})" + ("?" if opening.text == "[" else "")

    def _range(self, first: _Token) -> str:
        self._take()
        last = self._take()
        ends = [_literal(token.text) if token.kind == "text" else "" for token in (first, last)]
        if any(len(end) != 1 for end in ends):
            raise LarkError("a range is not between two characters")
        return f"[\\u{{{ord(ends[0]):x}}}-\\u{{{ord(ends[1]):x}}}]"


def _check_size(num_characters: int) -> None:
    """Call it before patterns are joined: the pattern of one short rule may be repeated many times."""
    if num_characters > _MAX_PATTERN_CHARACTERS:
        raise LarkError("it is too large when each name is replaced by what it stands for")


def _count(digits: str) -> int:
    if len(digits.strip()) > _MAX_COUNT_DIGITS:
        raise LarkError(f"the number {digits.strip()[:12]}… after ~ has more than {_MAX_COUNT_DIGITS} digits")
    return int(digits)


def _literal(quoted: str) -> str:
    if quoted.endswith("i"):
        raise LarkError(f"the flag of {quoted[:20]} is not served")
    try:
        with warnings.catch_warnings(action="error"):
            text = ast.literal_eval(quoted)
        text.encode()
    except (SyntaxError, ValueError, Warning) as error:
        raise LarkError(f"{quoted[:20]} has an escape that is not served") from error
    return str(text)
