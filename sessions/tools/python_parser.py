"""Calls in the form of a list of Python calls: `[get_weather(city="Paris", days=3), get_time(city="Oslo")]`.

Owns the whole answer while it may still be such a list: nothing is announced before it is complete, because arguments
become JSON only then. An answer that is none is given back as text, as soon as that is certain.
Never runs what it reads: only literals are arguments.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator

from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText

_MAY_BE_A_LIST = re.compile(r"\s*(\[\s*([A-Za-z_][\w.\-]*\s*(\(.*)?)?)?", re.DOTALL)
"""Every beginning of a list of calls."""
_LONGEST = 1 << 20
"""Characters that are held back at most."""


class PythonicCallParser:
    """The calls of one generated text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[ParserEvent]:
        """What the next piece of text brings."""
        if self._is_text:
            return [PlainText(text)] if text else []
        self._held += text
        if len(self._held) <= _LONGEST and _MAY_BE_A_LIST.fullmatch(self._held):
            return []
        return self._as_text()

    def flush(self) -> list[ParserEvent]:
        """What is left when no text follows."""
        if self._is_text:
            return []
        try:
            calls = list(_calls(self._held))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return self._as_text()
        events: list[ParserEvent] = []
        for index, (name, arguments) in enumerate(calls):
            events += [CallStarted(index, name), CallArguments(index, arguments)]
            events.append(CallFinished(index, name, arguments, complete=True))
        return events

    def _as_text(self) -> list[ParserEvent]:
        held, self._held, self._is_text = self._held, "", True
        return [PlainText(held)] if held else []


def _calls(text: str) -> Iterator[tuple[str, str]]:
    """Names and arguments, as JSON. Raises ValueError, SyntaxError or TypeError for what is no list of calls."""
    with warnings.catch_warnings(action="ignore"):  # a warning would show the text in the log
        body = ast.parse(text.strip(), mode="eval").body
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError(text)
    for call in body.elts:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError(text)
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in given or len(given) < len(call.keywords):
            raise ValueError(text)
        yield ast.unparse(call.func), json.dumps(given, ensure_ascii=False, allow_nan=False)
