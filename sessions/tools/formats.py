"""How families of models write calls of tools, as data: one entry a family, for the parser and the grammar alike.

Owns the table and the signs in a chat template by which a family is known. A new family is a new entry; one that
writes neither JSON objects nor a list of Python calls needs a parser of its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from graftwork.platform.errors import ValidationFailed

AUTO_FORM = "auto"
"""The form that the chat template shows."""


_ARGUMENTS_ROOT = "https://graftwork.invalid/arguments"


class CallSyntax(StrEnum):
    """What a call is written in."""

    JSON = "json"
    """One object with the name and the arguments."""
    PYTHON = "python"
    """A list of calls with keyword arguments, which is the whole answer."""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """How a family of models writes its calls."""

    open: str
    """What text never holds: a call, or a list of calls, begins with it."""
    close: str
    """What ends a call, or a list of calls; empty where the call's object itself does."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    gap: str = ""
    """What the model's template writes between the markers and the object."""
    between: str = ""
    """What it writes between two calls."""
    list_opens: tuple[str, ...] = ()
    """With one list around all calls: what stands between `open` and the first, in the template's spelling first."""
    is_bare: bool = False
    """`open` is no marker, but how the call's object itself begins."""
    syntax: CallSyntax = CallSyntax.JSON

    @property
    def opens(self) -> tuple[str, ...]:
        """Every text that a call may follow."""
        return tuple(self.open + tail for tail in self.list_opens or ("",))

    @property
    def has_grammar(self) -> bool:
        """Whether an answer can be held to this form while it is made."""
        return self.syntax is CallSyntax.JSON

    def call_tag(self, name: str, schema: Any) -> dict[str, Any]:
        """One tool as a call of a structural tag."""
        head = f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '
        if self.is_bare or self.list_opens:
            return {"begin": head, "schema": schema, "end": "}"}
        return {"begin": self.open + self.gap + head, "schema": schema, "end": "}" + self.gap + self.close}

    def whole_call_tag(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a bare object that stands beside an answer which is an object too: all of it is schema."""
        own_root = {"$id": _ARGUMENTS_ROOT, **schema}  # what refers to `#` in it means itself
        call = {
            "type": "object",
            "properties": {self.name_key: {"const": name}, self.arguments_key: own_root},
            "required": [self.name_key, self.arguments_key],
            "additionalProperties": False,
        }
        return {"begin": "", "schema": call, "end": ""}

    def frame(self) -> dict[str, Any]:
        """What of a structural tag is the same whichever tools there are."""
        around = {"opening": self.opens[0], "closing": self.close} if self.list_opens else {}
        return {"separator": self.between, **around}


HERMES = ToolCallForm(open="<tool_call>", close="</tool_call>", gap="\n", between="\n")
"""Hermes, Qwen and those that learned from them: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`."""

LLAMA3_JSON = ToolCallForm(open='{"name":', close="", arguments_key="parameters", between="; ", is_bare=True)
"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}` without markers."""

MISTRAL = ToolCallForm(open="[TOOL_CALLS]", close="]", between=", ", list_opens=("[", " ["))
"""Mistral up to its third tokenizer: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`."""

PYTHONIC = ToolCallForm(open="[", close="]", syntax=CallSyntax.PYTHON)
"""Llama 4 and small Llama 3.2: `[get_weather(city="Paris"), …]`. Read, never enforced."""

TOOL_CALL_FORMS: Mapping[str, ToolCallForm] = MappingProxyType(
    {"hermes": HERMES, "qwen": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL, "pythonic": PYTHONIC}
)
"""By the names that the setting `tool_call_form` takes."""

_SIGNS = (
    ("[TOOL_CALLS]", MISTRAL),
    ('{"name": function name, "parameters":', LLAMA3_JSON),
    ("[func_name1(", PYTHONIC),
)
"""What only the templates of a family hold, tried in this order."""


def tool_call_form(template_source: str | None, chosen: str = AUTO_FORM) -> ToolCallForm:
    """The form that is chosen by name, or that of the family whose template this is; Hermes where no sign is found.

    Raises ValidationFailed for a name that is in no table.
    """
    if chosen != AUTO_FORM and chosen not in TOOL_CALL_FORMS:
        names = ", ".join((AUTO_FORM, *TOOL_CALL_FORMS))
        raise ValidationFailed(
            f"There is no form of tool calls named {chosen!r}: give one of {names}.", param="tool_call_form"
        )
    source = template_source or ""
    found = next((form for sign, form in _SIGNS if sign in source), HERMES)
    form = found if chosen == AUTO_FORM else TOOL_CALL_FORMS[chosen]
    return replace(form, list_opens=_as_spelled(form, source)) if form.list_opens else form


def _as_spelled(form: ToolCallForm, source: str) -> tuple[str, ...]:
    """The template's own spelling first."""
    return tuple(sorted(form.list_opens, key=lambda tail: form.open + tail not in source))
