"""Presents custom tools to a model as functions, and translates their calls.

A custom tool takes one text instead of JSON arguments. Models are trained to call functions, so the model sees a
function with one string parameter, `input`. Owns this translation in both directions, and the pattern that the text
must match if the tool has a format. Never checks a text: the grammar of the call does.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.tools.json_parser import BrokenJson, JsonMembers
from graftwork.sessions.tools.lark import LarkError, lark_pattern

INPUT = "input"
"""The name of the parameter that has the text."""
_MAX_DEFINITION_CHARACTERS = 64 * 1024
_SHORT_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNPAIRED = "\ufffd"


def is_custom(tool: Mapping[str, Any]) -> bool:
    """Returns whether a tool, in the form of chat completions, is a custom tool."""
    return tool.get("type") == "custom"


def function_of(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function that the model sees instead of a custom tool. It names the grammar of the text, if any."""
    grammar = _grammar(custom)
    about = "The text that the tool takes."
    if grammar is not None:
        about = f"The text that the tool takes, in this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
    described = {"description": custom["description"]} if custom.get("description") else {}
    return {"name": custom["name"], **described, "parameters": _parameters({"type": "string", "description": about})}


def arguments_schema(custom: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Returns the JSON Schema of the calls of a custom tool. `param` is the path of the tool in the request.

    Raises InvalidRequest for a grammar that cannot be enforced. The error names its definition.
    """
    grammar = _grammar(custom)
    if grammar is None:
        return _parameters({"type": "string"})
    place = f"{param}.format.definition"
    definition = grammar["definition"]
    if len(definition) > _MAX_DEFINITION_CHARACTERS:
        raise InvalidRequest(f"{place} has more than {_MAX_DEFINITION_CHARACTERS} characters.", param=place)
    try:
        pattern = lark_pattern(definition) if grammar["syntax"] == "lark" else _without_anchors(definition)
    except LarkError as error:
        raise InvalidRequest(f"{place} is not served: {error}.", param=place, code="unsupported_grammar") from None
    return _parameters({"type": "string", "pattern": f"^(?:{pattern})$"})


def has_grammar(custom: Mapping[str, Any]) -> bool:
    """Returns whether the text of a custom tool must match a grammar."""
    return _grammar(custom) is not None


def arguments_of(text: str) -> str:
    """Returns the arguments, as JSON text, of a call that gives `text` to a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Returns the text that a call gives to a custom tool. `arguments` is JSON text, which may be cut off.

    If there is no text in the arguments, because the model wrote others, returns the arguments as they are.
    """
    reader = CustomInputReader()
    text = reader.push(arguments)
    return text if reader.has_begun or not reader.has_ended else arguments


class CustomInputReader:
    """Takes the text of a custom tool out of the arguments of a call, while the arguments arrive in pieces.

    Invariant: the joined results do not depend on how the arguments are cut into pieces.
    """

    def __init__(self) -> None:
        self._members = JsonMembers()
        self._num_read = 0
        self._is_broken = False

    @property
    def has_begun(self) -> bool:
        """Whether the arguments have a text so far, which may be empty."""
        return self._written[:1] == ['"']

    def push(self, arguments: str) -> str:
        """Reads the next piece of the arguments. Returns the characters of the text that are certain now."""
        for character in arguments:
            if self.has_ended:
                break
            try:
                self._members.feed(character)
            except BrokenJson:
                self._is_broken = True
        if not self.has_begun:
            return ""
        self._num_read = max(self._num_read, 1)
        return "".join(iter(self._next, None))

    @property
    def has_ended(self) -> bool:
        """Whether the arguments are complete, or can be no JSON object any more."""
        return self._members.is_complete or self._is_broken

    @property
    def _written(self) -> list[str]:
        return self._members.values.get(INPUT, [])

    def _next(self) -> str | None:
        """Returns the next character of the text, or None if it is not complete yet."""
        ahead = "".join(self._written[self._num_read : self._num_read + 12])
        if not ahead or ahead == '"' or ahead == "\\":
            return None
        if ahead[0] != "\\":
            self._num_read += 1
            return ahead[0]
        if ahead[1] != "u":
            self._num_read += 2
            return _SHORT_ESCAPES.get(ahead[1], ahead[1])
        return self._escaped(ahead)

    def _escaped(self, ahead: str) -> str | None:
        r"""Returns the character of `\uXXXX`, or of two of them that are a surrogate pair."""
        first = _unit(ahead[:6])
        if len(ahead) < 6:
            return None
        if 0xD800 <= first <= 0xDBFF and _may_be_unit(ahead[6:]):
            if len(ahead) < 12:
                return None
            second = _unit(ahead[6:])
            if 0xDC00 <= second <= 0xDFFF:
                self._num_read += 12
                return chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)
        self._num_read += 6
        return _UNPAIRED if 0xD800 <= first <= 0xDFFF else chr(first)


def _may_be_unit(text: str) -> bool:
    return "\\u".startswith(text[:2])


def _unit(escape: str) -> int:
    digits = re.fullmatch(r"\\u([0-9A-Fa-f]{4})", escape)
    return 0xD800 if digits is None else int(digits[1], 16)


def _parameters(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _grammar(custom: Mapping[str, Any]) -> Mapping[str, Any] | None:
    form = custom.get("format")
    return form["grammar"] if isinstance(form, Mapping) and form.get("type") == "grammar" else None


def _without_anchors(pattern: str) -> str:
    """Returns the pattern without an anchor at each end. The whole text must match it, so they change nothing."""
    pattern = pattern.removeprefix("^")
    if not pattern.endswith("$"):
        return pattern
    before = pattern[:-1]
    num_backslashes = len(before) - len(before.rstrip("\\"))
    return pattern if num_backslashes % 2 else before
