"""Parses tool calls that are written as a list of Python calls: `[get_weather(city="Paris"), get_time(city="Oslo")]`.

Owns the whole answer as long as it can be such a list. Returns no call before the list is complete, because its
arguments cannot become JSON earlier. Returns the answer as text as soon as it cannot be such a list.
Never runs the text: arguments must be literals.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterator

from graftwork.sessions.tools.parser_events import CallArguments, CallFinished, CallStarted, ParserEvent, PlainText

_MAY_BE_A_LIST = re.compile(r"\s*(\[\s*([A-Za-z_][\w.\-]*\s*(\(.*)?)?)?", re.DOTALL)
"""A pattern that matches every possible start of a list of calls."""
_MAX_HELD = 1 << 20
"""The most characters that are held back. A longer answer is returned as text."""


class PythonCallParser:
    """Parses one generated text. The whole text is either a Python list of tool calls or plain text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[ParserEvent]:
        """Reads the next piece of the generated text. Returns no event while the text may still be a list of calls."""
        if self._is_text:
            return [PlainText(text)] if text else []
        self._held += text
        if len(self._held) <= _MAX_HELD and _MAY_BE_A_LIST.fullmatch(self._held):
            return []
        return self._as_text()

    def flush(self) -> list[ParserEvent]:
        """Returns the events of the text that the parser still holds back. Call this method after the last piece.

        The events are tool calls if the whole text is a list of calls. Otherwise there is one event with plain text.
        """
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
    """Returns the name of each call in the text, and its arguments as JSON.

    Raises ValueError, SyntaxError or TypeError if the text is not a list of calls.
    """
    with warnings.catch_warnings(action="ignore"):  # a warning would write the text to the log
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
