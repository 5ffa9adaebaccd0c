r"""Reads structural tags, and writes them as grammars. A structural tag describes an answer with tool calls.

There are three kinds of tags. The first allows text with calls in it. The second allows calls without text. The third
allows either calls without text, or a value that fits a schema. This module never checks an answer itself.

The text of a structural tag is JSON:

    {"calls": [{"begin": "<tool_call>{\"name\": \"f\", \"arguments\": ", "schema": {…}, "end": "}</tool_call>"}],
     "triggers": ["<tool_call>"],     text never contains them; each call (or `opening`) begins with one of them
     "text": true,                    text is allowed before, between and after calls
     "required": false,               at least one call
     "parallel": true,                more than one call; else an answer ends after its call
     "opening": "", "separator": "", "closing": "",    texts before, between and after adjacent calls
     "answer": {…}}                   without text: the answer may be a value of this schema instead of calls

In a format whose calls are whole JSON values (`{"name": "f", "parameters": {…}}`), `begin` and `end` are empty and the
schema covers the whole value. `begin`, `end`, `opening`, `separator` and `closing` may contain special tokens. Every
schema is checked like a separate grammar. The JSON pointer in an error starts at the root of the tag.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.grammar.patterns.nodes import ANYTHING, Chars, Run, written
from graftwork.engine.grammar.schema.core_schema import CoreWriter
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.llguidance_schema import spelled
from graftwork.engine.grammar.schema.schema_size import check_size
from graftwork.platform.errors import InvalidRequest

_TEXT_FIELDS = ("opening", "separator", "closing")
_FLAGS = {"text": False, "required": False, "parallel": True}
_KNOWN = {"calls", "triggers", "answer", *_TEXT_FIELDS, *_FLAGS}


@dataclass(frozen=True, slots=True)
class Call:
    """One tool that an answer may call: the text before and after the arguments, and the schema of the arguments."""

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A structural tag that was parsed and checked. It describes an answer with tool calls."""

    calls: tuple[Call, ...]
    triggers: tuple[str, ...] = ()
    text: bool = False
    required: bool = False
    parallel: bool = True
    opening: str = ""
    separator: str = ""
    closing: str = ""
    answer: Any = None


def read_tag(value: Any, limits: LintLimits) -> StructuralTag:
    """Parses a structural tag (a description of an answer with tool calls).

    Raises InvalidRequest if the tag is malformed, or if free text could be mistaken for a tool call.
    """
    if not isinstance(value, dict) or not value.keys() <= _KNOWN:
        raise refused("#", f"a structural tag is an object of {', '.join(sorted(_KNOWN))}.")
    for name in _TEXT_FIELDS:
        _check(value.get(name, ""), str, f"#/{name}")
    for name in _FLAGS:
        _check(value.get(name, False), bool, f"#/{name}")
    triggers = value.get("triggers", [])
    _check(triggers, list, "#/triggers")
    for index, trigger in enumerate(triggers):
        _check(trigger, str, f"#/triggers/{index}")
    calls = value.get("calls", [])
    _check(calls, list, "#/calls")
    if not 1 <= len(calls) <= limits.tags:
        raise refused("#/calls", f"there are 1 to {limits.tags} calls.")
    tag = StructuralTag(
        calls=tuple(_call(one, f"#/calls/{index}") for index, one in enumerate(calls)),
        triggers=tuple(triggers),
        answer=value.get("answer"),
        **{name: value.get(name, "") for name in _TEXT_FIELDS},
        **{name: value.get(name, default) for name, default in _FLAGS.items()},
    )
    _check_triggers(tag)
    return tag


def _check(value: Any, kind: type, pointer: str) -> None:
    if not isinstance(value, kind):
        raise refused(pointer, f"it is a {kind.__name__}.")


def _call(value: Any, pointer: str) -> Call:
    if not isinstance(value, dict) or value.keys() != {"begin", "schema", "end"}:
        raise refused(pointer, "a call has a begin, a schema and an end.")
    _check(value["begin"], str, f"{pointer}/begin")
    _check(value["end"], str, f"{pointer}/end")
    return Call(value["begin"], value["schema"], value["end"])


def _check_triggers(tag: StructuralTag) -> None:
    if not tag.text:
        return
    if tag.answer is not None:
        raise refused("#/answer", "an answer of a schema and free text exclude each other.")
    if not tag.triggers or not all(tag.triggers):
        raise refused("#/triggers", "free text needs triggers to tell calls by.")
    heads = {"#/opening": tag.opening} if tag.opening else {
        f"#/calls/{index}/begin": call.begin for index, call in enumerate(tag.calls)
    }  # fmt: skip
    for pointer, head in heads.items():
        if len([trigger for trigger in tag.triggers if head.startswith(trigger)]) != 1:
            raise refused(pointer, "it begins with exactly one of the triggers.")


@dataclass(slots=True)
class TagWriter:
    """Writes a structural tag (a description of an answer with tool calls) as a Lark grammar for llguidance."""

    tag: StructuralTag
    limits: LintLimits
    unenforced: UnenforcedKeywords
    specials: Mapping[str, int] = field(default_factory=dict)
    """Ids of special tokens, by their content. Special tokens are matched as tokens, not as text."""

    def write(self) -> str:
        tag = self.tag
        rules = [
            f"call_{index}_arguments: {self._json(call.schema, f'#/calls/{index}/schema')}"
            for index, call in enumerate(tag.calls)
        ]
        if tag.answer is not None:
            rules.append(f"answer: {self._json(tag.answer, '#/answer')}")
        rules += [f"call: {' | '.join(self._call(index, call.begin) for index, call in enumerate(tag.calls))}"]
        rules += self._text_rules() if tag.text else self._bare_rules()
        return "\n".join([*rules, ""])

    def _json(self, schema: Any, pointer: str) -> str:
        """Returns a schema in Lark form. If it cannot be enforced, the error names the schema's place in the tag."""
        check_size(schema, self.limits)
        inner = UnenforcedKeywords(self.unenforced.strict)
        try:
            core = CoreWriter(schema, self.limits, inner).write()
        except InvalidRequest as error:
            at = pointer + (error.param or "#")[1:]
            raise InvalidRequest(error.message.replace(error.param or "#", at, 1), param=at, code=error.code) from None
        self.unenforced.pointers |= {pointer + at[1:]: reason for at, reason in inner.pointers.items()}
        return f"%json {spelled(core)}"

    def _call(self, index: int, begin: str) -> str:
        return " ".join([*self._literal(begin), f"call_{index}_arguments", *self._literal(self.tag.calls[index].end)])

    def _group(self) -> str:
        """Returns the Lark rule of a group of calls."""
        more = " ".join(["(", *self._literal(self.tag.separator), "call", ")*"]) if self.tag.parallel else ""
        return " ".join([*self._literal(self.tag.opening), "call", more, *self._literal(self.tag.closing)])

    def _bare_rules(self) -> list[str]:
        choices = [self._group()]
        if self.tag.answer is not None:
            choices.append("answer")
        elif not self.tag.required:
            choices.append('""')
        return [f"start: {' | '.join(f'({choice})' for choice in choices)}"]

    def _text_rules(self) -> list[str]:
        """Returns the Lark rules of free text, which ends at the first complete trigger."""
        tag = self.tag
        rules = [f"TEXT: /{written(ANYTHING)}/ & {' & '.join(f'~/{_holding(one)}/' for one in tag.triggers)}"]
        for index, trigger in enumerate(tag.triggers):
            if trigger in self.specials:
                rules.append(f"trigger_{index}: TEXT <[{self.specials[trigger]}]>")
            else:
                rules.append(f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"run: {' | '.join(self._runs())}")
        if not tag.parallel:
            rules.append(f"start: {'run' if tag.required else 'TEXT | run'}")
        else:
            rules.append(f"start: {'run' if tag.required else ''} run* TEXT")
        return rules

    def _runs(self) -> Iterator[str]:
        """Yields the Lark rules of text, then a trigger, then the rest of a call that begins with this trigger."""
        tag = self.tag
        for index, trigger in enumerate(tag.triggers):
            if tag.opening.startswith(trigger):
                rest = self._literal(tag.opening[len(trigger) :])
                more = " ".join(["(", *self._literal(tag.separator), "call", ")*"]) if tag.parallel else ""
                yield " ".join([f"trigger_{index}", *rest, "call", more, *self._literal(tag.closing)])
            elif not tag.opening:
                calls = [(number, call) for number, call in enumerate(tag.calls) if call.begin.startswith(trigger)]
                for number, call in calls:
                    closing = self._literal(tag.closing)
                    yield " ".join([f"trigger_{index}", self._call(number, call.begin[len(trigger) :]), *closing])

    def _literal(self, text: str) -> Iterator[str]:
        """Yields a text as parts in Lark form. Special tokens in the text are written by id."""
        if not self.specials:
            yield from [json.dumps(text)] if text else []
            return
        for part in re.split(f"({'|'.join(map(re.escape, self.specials))})", text):
            if part in self.specials:
                yield f"<[{self.specials[part]}]>"
            elif part:
                yield json.dumps(part)


def _holding(text: str) -> str:
    """Returns a pattern of every text that contains `text`."""
    return written(Run((ANYTHING, *(Chars(((ord(one), ord(one)),)) for one in text), ANYTHING)))
