"""Describes how families of models write tool calls, as data for the parsers and the grammar.

Owns the table of formats, and the texts in a chat template that identify a family. Never parses a call.
A new family needs a new format in the table. If the family writes neither JSON objects nor a list of Python calls, it
also needs a parser.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from graftwork.platform.errors import ValidationFailed

AUTO_FORMAT = "auto"
"""The value of the setting `tool_call_form` that chooses the format by the chat template."""


_ARGUMENTS_ROOT = "https://graftwork.invalid/arguments"


class CallSyntax(StrEnum):
    """The syntax in which a model writes a tool call: JSON or Python."""

    JSON = "json"
    """A JSON object with the name and the arguments."""
    PYTHON = "python"
    """A Python list of calls with keyword arguments. The list is the whole answer."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How one family of models writes tool calls: the syntax, the texts around a call, and the JSON keys."""

    open: str
    """The text that begins a call or a list of calls."""
    close: str
    """The text that ends a call or a list of calls; empty if the end of the JSON object ends the call."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    gap: str = ""
    """The white space between `open` and the JSON object of a call, and between the JSON object and `close`."""
    between: str = ""
    """The text between two calls."""
    list_opens: tuple[str, ...] = ()
    """The texts that may come between `open` and the first call, the usual one first.

    It is empty if the format has no list of calls.
    """
    is_bare: bool = False
    """Whether `open` is the start of the call's JSON object instead of a marker."""
    syntax: CallSyntax = CallSyntax.JSON

    @property
    def opens(self) -> tuple[str, ...]:
        """All texts with which a call, or a list of calls, may begin."""
        return tuple(self.open + tail for tail in self.list_opens or ("",))

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar can make the model keep to this format."""
        return self.syntax is CallSyntax.JSON

    def call_tag(self, name: str, schema: Any) -> dict[str, Any]:
        """Returns the grammar tag for calls of the tool `name`. A structural tag grammar is a list of such tags.

        The tag has the text before the arguments, the schema of the arguments, and the text after them. `schema` is the
        JSON schema of the arguments.
        """
        head = f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        if self.is_bare or self.list_opens:
            return {"begin": head, "schema": schema, "end": "}"}
        return {"begin": self.open + self.gap + head, "schema": schema, "end": "}" + self.gap + self.close}

    def whole_call_tag(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the grammar tag for calls of the tool `name`, for requests that also ask for an answer in JSON.

        It is for formats in which a call is a JSON object without markers. The tag has one JSON schema for the whole
        call, because calls and other answers begin alike. `schema` is the JSON schema of the call's arguments.
        """
        own_root = {
            "$id": _ARGUMENTS_ROOT,
            **schema,
        }  # references to `#` in the schema then still mean the schema itself
        call = {
            "type": "object",
            "properties": {self.name_key: {"const": name}, self.arguments_key: own_root},
            "required": [self.name_key, self.arguments_key],
            "additionalProperties": False,
        }
        return {"begin": "", "schema": call, "end": ""}

    def frame(self) -> dict[str, Any]:
        """Returns the fields of a structural tag grammar that do not depend on the tools.

        They are the texts before the first call, between calls and after the last call.
        """
        around = {"opening": self.opens[0], "closing": self.close} if self.list_opens else {}
        return {"separator": self.between, **around}


HERMES = ToolCallFormat(open="<tool_call>", close="</tool_call>", gap="\n", between="\n")
"""The format of Hermes, Qwen and models trained on it: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`."""

LLAMA3_JSON = ToolCallFormat(open='{"name":', close="", arguments_key="parameters", between="; ", is_bare=True)
"""The format of Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}` without markers."""

MISTRAL = ToolCallFormat(open="[TOOL_CALLS]", close="]", between=", ", list_opens=("[", " ["))
"""The format of Mistral up to its third tokenizer: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`."""

PYTHONIC = ToolCallFormat(open="[", close="]", syntax=CallSyntax.PYTHON)
"""The format of Llama 4 and small Llama 3.2: `[get_weather(city="Paris"), …]`. A grammar cannot enforce this format."""

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {"hermes": HERMES, "qwen": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL, "pythonic": PYTHONIC}
)
"""Maps each name that the setting `tool_call_form` accepts, except `auto`, to its format."""

_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ('{"name": function name, "parameters":', LLAMA3_JSON),
    ("[func_name1(", PYTHONIC),
)
"""Texts that only the templates of one family contain. They are tried in this order."""


def tool_call_format(template_source: str | None, chosen: str = AUTO_FORMAT) -> ToolCallFormat:
    """Returns the tool call format with the name `chosen`.

    If `chosen` is `auto`, finds the format by the source of the chat template. If the source shows no known format,
    takes Hermes.
    Raises ValidationFailed if no format has this name.
    """
    if chosen != AUTO_FORMAT and chosen not in TOOL_CALL_FORMATS:
        names = ", ".join((AUTO_FORMAT, *TOOL_CALL_FORMATS))
        raise ValidationFailed(
            f"There is no form of tool calls named {chosen!r}: give one of {names}.", param="tool_call_form"
        )
    source = template_source or ""
    found = next((form for sign, form in _SIGNS if sign in source), HERMES)
    form = found if chosen == AUTO_FORMAT else TOOL_CALL_FORMATS[chosen]
    return replace(form, list_opens=_as_spelled(form, source)) if form.list_opens else form


def _as_spelled(form: ToolCallFormat, source: str) -> tuple[str, ...]:
    """Returns the format's `list_opens`, sorted so that the text in the template's source comes first."""
    return tuple(sorted(form.list_opens, key=lambda tail: form.open + tail not in source))
