"""From what a request asks of its answer to the one grammar that the engine holds it to.

Tools, the choice among them and the answer's form become one source: text with well-formed calls in it, calls alone, or
either calls or an answer of the form. Everything is read here first, so that what is not served is refused before
anything is reserved, with the field that says it and the JSON pointer into its schema.
`strict: true` refuses what cannot be enforced wholly; otherwise it is let go, and its place is listed.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.lint import lint
from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.generation.response_format import FREE, AnswerForm, FormFields
from graftwork.sessions.tools.formats import HERMES, ToolCallForm
from graftwork.sessions.tools.tool_choice import ToolChoice, ToolDefinition, read_tool_choice, tool_names

_KEPT_READINGS = 4096
_MOST_GAPS = 64
"""Places of one schema that are listed."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_GRAMMAR_CODES = ("grammar_", "unsupported_grammar")


@dataclass(frozen=True, slots=True)
class AnswerDemands:
    """What a request asks of its answer, in chat.completions' forms."""

    tools: Sequence[ToolDefinition] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    form: FormFields = FREE


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What the engine is given, and what to tell the client of it."""

    source: GrammarSource
    param: str
    """The field that asked for it."""
    unenforced: tuple[str, ...] = ()
    """Places that are let go: a field, `#`, and a JSON pointer into its schema."""

    def blamed(self, error: InvalidRequest) -> InvalidRequest:
        """An error of the engine about this grammar, with the field that the client knows."""
        if not error.code.startswith(_GRAMMAR_CODES):
            return error
        return InvalidRequest(error.message, param=self.param, code=error.code)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How an answer is made and read."""

    grammar: AnswerGrammar | None = None
    """None leaves it free."""
    calls_tools: bool = False
    """Whether it is read for calls."""
    parallel_tool_calls: bool = True


FREE_ANSWER = AnswerPlan()
"""Text that nothing is asked of."""


class AnswerPlanner:
    """Plans the answers of one model. Its verbs may be called from any thread, and are best called off the loop's.

    Keeps what it found in the schemas that it has read last: those of a session come again with every turn.
    """

    def __init__(self, form: ToolCallForm = HERMES) -> None:
        self.form = form
        """How this model writes calls."""
        self._readings: OrderedDict[bytes, tuple[str, ...] | InvalidRequest] = OrderedDict()
        self._lock = Lock()

    def plan(self, demands: AnswerDemands) -> AnswerPlan:
        """Raises InvalidRequest naming the field."""
        choice = read_tool_choice(demands.tool_choice, tool_names(demands.tools))
        form = demands.form.read()
        if not choice.may_call:
            return AnswerPlan(None if form is None else self._alone(form))
        if form is not None and form.schema is None:
            raise InvalidRequest(
                f"{form.param} cannot be combined with tools: use response_format, or tool_choice 'none'.",
                param=form.param,
            )
        is_parallel = demands.parallel_tool_calls and not choice.is_single
        grammar = self._calls(demands.tools, choice, form, is_parallel=is_parallel)
        return AnswerPlan(grammar, calls_tools=True, parallel_tool_calls=is_parallel)

    # ---- grammars ---------------------------------------------------------------------------------------------

    def _alone(self, form: AnswerForm) -> AnswerGrammar:
        """An answer of a form, without tools."""
        text = form.text if form.schema is None else _json(form.schema)
        gaps = self._gaps(GrammarSource(form.kind, text, form.is_strict), form.param)
        return AnswerGrammar(GrammarSource(form.kind, text, strict=not gaps), form.param, gaps)

    def _calls(
        self, tools: Sequence[ToolDefinition], choice: ToolChoice, answer: AnswerForm | None, *, is_parallel: bool
    ) -> AnswerGrammar | None:
        """Calls of the tools that may be called, and what else the answer may be."""
        arguments = {index: _arguments_schema(tools[index], index) for index in choice.indices}
        if not self.form.has_grammar:
            self._check_unenforced(tools, choice, answer)
            return None
        gaps: tuple[str, ...] = ()
        for index, schema in arguments.items():
            source = GrammarSource(
                GrammarKind.JSON_SCHEMA, _json(schema), tools[index]["function"].get("strict") is True
            )
            gaps += self._gaps(source, f"tools[{index}].function.parameters")
        is_beside_objects = self.form.is_bare and answer is not None and not choice.is_required
        tag_of = self.form.whole_call_tag if is_beside_objects else self.form.call_tag
        tag: dict[str, Any] = {
            **self.form.frame(),
            "calls": [tag_of(tools[index]["function"]["name"], schema) for index, schema in arguments.items()],
            "parallel": is_parallel,
        }
        if choice.is_required:
            tag["required"] = True
        elif answer is not None:
            gaps += self._gaps(
                GrammarSource(GrammarKind.JSON_SCHEMA, _json(answer.schema), answer.is_strict), answer.param
            )
            tag["answer"] = answer.schema
        else:
            tag |= {"text": True, "triggers": [self.form.open]}
        return AnswerGrammar(_within_limits(_json(tag), is_strict=not gaps), "tools", gaps)

    def _check_unenforced(self, tools: Sequence[ToolDefinition], choice: ToolChoice, answer: AnswerForm | None) -> None:
        """Raises InvalidRequest for what a form that is only read cannot keep."""
        strict = (index for index in choice.indices if tools[index]["function"].get("strict"))
        param = "tool_choice" if choice.is_required else None
        param = next((f"tools[{index}].function.strict" for index in strict), param)
        param = answer.param if answer is not None else param
        if param is not None:
            raise InvalidRequest(
                f"This model writes calls in a form that cannot be enforced, so {param} cannot be kept beside tools: "
                "leave it out.",
                param=param,
                code="unsupported_value",
            )

    # ---- reading ----------------------------------------------------------------------------------------------

    def _gaps(self, source: GrammarSource, param: str) -> tuple[str, ...]:
        """Where a grammar cannot be enforced. Raises InvalidRequest for one that is not served."""
        found = self._reading(source)
        if isinstance(found, InvalidRequest):
            pointer = found.param
            raise InvalidRequest(
                f"{param}: {found.message}", param=param, code=found.code, details={"pointer": pointer}
            )
        return tuple(param + pointer for pointer in found)

    def _reading(self, source: GrammarSource) -> tuple[str, ...] | InvalidRequest:
        key = hashlib.sha256(f"{source.kind}/{source.strict}/{source.text}".encode()).digest()
        with self._lock:
            if (kept := self._readings.get(key)) is not None:
                self._readings.move_to_end(key)
                return kept
        found: tuple[str, ...] | InvalidRequest
        try:
            found = tuple(pointer for pointer, _ in lint(source).gaps[:_MOST_GAPS])
        except InvalidRequest as error:
            found = error
        with self._lock:
            self._readings[key] = found
            while len(self._readings) > _KEPT_READINGS:
                self._readings.popitem(last=False)
        return found


def _arguments_schema(tool: ToolDefinition, index: int) -> Mapping[str, Any]:
    """A tool's parameters as a schema of objects: without any, it takes none."""
    param = f"tools[{index}].function.parameters"
    schema = tool["function"].get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    kind = schema.get("type", "object") if isinstance(schema, Mapping) else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"{param} must be a JSON Schema of type 'object'.", param=param)
    return {**schema, "type": "object"}


def _within_limits(text: str, *, is_strict: bool) -> GrammarSource:
    """Each schema is within the limits by itself; all together may not be."""
    most = LintLimits().text_bytes
    if len(text.encode()) > most:
        raise InvalidRequest(
            f"The tools make a grammar of more than {most} bytes: send fewer, or smaller ones.", param="tools"
        )
    return GrammarSource(GrammarKind.STRUCTURAL_TAG, text, is_strict)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
