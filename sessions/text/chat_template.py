"""Renders messages with the model's chat template. Escapes texts so that they never become control tokens.

Owns two ways to render: a whole conversation, and only the text that new messages add to stored tokens. Never encodes
text to tokens. Also owns the sandbox of templates; `messages.py` owns the escaping.
Invariant: the rendered text equals that of `transformers` 5 (utils/chat_template_utils.py), byte for byte, and the
output and the run time of a template are limited.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from graftwork.platform.clock import Clock
from graftwork.platform.errors import InternalFailure, InvalidRequest, PayloadTooLarge, ValidationFailed
from graftwork.sessions.text.messages import ControlTokenEscaper, Message, free_character

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


STAND_IN = Message(role="user", content="Hello")
"""A user's message that `render_delta` puts before the generated message. The result does not depend on its text."""


RenderingFailure = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""The errors that a template raises for messages that it does not support."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits for rendering one prompt: its length in characters, and the time in seconds.

    A template that exceeds a limit is stopped when it writes its next piece of text.
    """

    characters: int = 8_000_000
    seconds: float = 10.0


class ChatTemplate:
    """A compiled chat template of a model. It renders messages to the text of a prompt."""

    def __init__(
        self,
        source: str,
        clock: Clock,
        *,
        special_tokens: Mapping[str, str],
        end_of_turn_texts: Iterable[str] = (),
        limits: RenderLimits = RenderLimits(),
    ) -> None:
        """`special_tokens` maps names such as `bos_token` to texts. `end_of_turn_texts` are the texts of stop tokens.

        Raises ValidationFailed if `source` does not compile.
        """
        self.source = source
        self.end_of_turn_texts = frozenset(end_of_turn_texts) | {special_tokens.get("eos_token", "")} - {""}
        self._clock = clock
        self.special_tokens = dict(special_tokens)
        self._limits = limits
        self._environment = template_environment(clock)
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            message = f"The chat template does not compile: {error}. Repair chat_template.jinja."
            raise ValidationFailed(message, param="chat_template") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        escaper: ControlTokenEscaper | None = None,
    ) -> str:
        """Renders a conversation to the text of a prompt.

        `add_generation_prompt` adds the start of the next answer. `variables` are further names that the template can
        read. `escaper` marks the control token spellings in the messages, tools and variables; None marks nothing.
        Raises InvalidRequest if the template refuses the messages, and PayloadTooLarge if the rendering exceeds a limit
        of length or time.
        """
        forms = [message.template_dict() for message in messages]
        given = _given(tools, variables)
        if escaper is not None:
            forms = [escaper.escape_message(form) for form in forms]
            given = escaper.escape(given)
        return self._write(
            {
                **self.special_tokens,
                **given["variables"],
                "messages": forms,
                "tools": given["tools"],
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def render_delta(
        self, assistant: Message, new: Sequence[Message], *, closed: bool, escaper: ControlTokenEscaper | None = None
    ) -> str:
        r"""Renders only the text that the messages `new` add after the message `assistant`.

            …user\nHello<eos>\n<start>assistant\n | assistant | <eos> | \n<start>user\nnew<eos>\n<start>assistant\n
                                                    closed=False ^ closed=True ^

        The text ends with the start of the next answer. `closed` says whether the tokens of `assistant` end with the
        stop token. The history is not rendered again, because its text could be encoded to other tokens than the stored
        ones. A template may write an answer that is not the last one in another way, such as without its reasoning: the
        stored tokens keep what the model has written.
        Raises InvalidRequest if the template rewrites earlier messages. Can also raise PayloadTooLarge.
        """
        assistant = assistant.with_valid_arguments()
        opening = self.render((STAND_IN,), add_generation_prompt=False, escaper=escaper)
        base = self.render((STAND_IN, assistant), add_generation_prompt=False, escaper=escaper)
        whole = self.render((STAND_IN, assistant, *new), add_generation_prompt=True, escaper=escaper)
        if not base.startswith(opening) or not whole.startswith(opening):
            raise _not_appendable()
        if not whole.startswith(base):
            tail = self._rest_after_answer(assistant, new, len(opening), escaper)
            if not whole.endswith(tail):
                raise _not_appendable()
            base = whole[: len(whole) - len(tail)]
        start, end = self._end_of_turn(base, len(opening), escaper)
        return whole[end:] if closed else whole[start:]

    def _rest_after_answer(
        self, assistant: Message, new: Sequence[Message], after: int, escaper: ControlTokenEscaper | None
    ) -> str:
        """Returns the text behind the stop token of an answer that is not the last message.

        Finds the answer by a mark at the end of its text. The answer is searched from the place `after` on. Raises
        InvalidRequest if the template does not show it.
        """
        texts = (assistant.content or "", *(message.content or "" for message in new))
        mark = free_character((self.source, *texts))
        marked = replace(assistant, content=f"{assistant.content or ''}{mark}")
        whole = self.render((STAND_IN, marked, *new), add_generation_prompt=True, escaper=escaper)
        place = whole.find(mark, after)
        ends = (
            found.end()
            for found in re.finditer("|".join(map(re.escape, self.end_of_turn_texts)), whole[place:])
            if escaper is None or not escaper.is_escaped(whole, place + found.start())
        )
        if place < 0 or (end := next(ends, None)) is None:
            raise _not_appendable()
        return whole[place + end :]

    def control_texts(self, added_tokens: Iterable[str]) -> list[str]:
        """Returns those of the added tokens whose text the template itself writes, such as `<|im_start|>`.

        These texts must not become control tokens if a user writes them.
        """
        tree = self._environment.parse(self.source)
        literals = {node.data for node in tree.find_all(nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        written = "\0".join(literals)
        return [token for token in added_tokens if token in written and not token.isspace()]

    def variables(self) -> frozenset[str]:
        """Returns the names that the template reads and does not set itself, such as `enable_thinking`."""
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))

    def _end_of_turn(self, base: str, after: int, escaper: ControlTokenEscaper | None) -> tuple[int, int]:
        """Returns the start and the end of the last stop token in a rendered conversation.

        The search begins at `after`.
        """
        found = [(base.rfind(text, after), text) for text in self.end_of_turn_texts]
        start, text = max(found, default=(-1, ""))
        if start < 0 or (escaper is not None and escaper.is_escaped(base, start)):
            raise InternalFailure(
                "This model's chat template does not end an assistant's message with a stop token, so a session "
                "cannot go on from its stored tokens."
            )
        return start, start + len(text)

    def _write(self, context: Mapping[str, Any]) -> str:
        deadline = self._clock.monotonic() + self._limits.seconds
        pieces, length = [], 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                length += len(piece)
                self._check_limits(length, deadline)
        except RenderingFailure as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise InvalidRequest(message, param="messages", code="template_error") from error
        return "".join(pieces)

    def _check_limits(self, length: int, deadline: float) -> None:
        if length > self._limits.characters:
            raise PayloadTooLarge(f"The conversation is longer than {self._limits.characters} characters as a prompt.")
        if self._clock.monotonic() > deadline:
            raise PayloadTooLarge(f"The chat template took longer than {self._limits.seconds:g} seconds.")


def _not_appendable() -> InvalidRequest:
    return InvalidRequest(
        "This model's chat template rewrites earlier messages when new ones come, so a session cannot go on from its "
        "stored tokens. Use /v1/chat/completions with this model.",
        code="template_not_appendable",
    )


def _given(tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    reserved = [name for name in RESERVED_VARIABLES if name in (variables or {})]
    if reserved:
        raise InvalidRequest(f"{reserved[0]} cannot be a template variable.", param="chat_template_kwargs")
    return {"tools": None if tools is None else list(tools), "variables": dict(variables or {})}


def template_environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    """Returns a Jinja sandbox with the filters and functions that chat templates expect.

    `clock` gives the templates the time.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time_formatter(clock)
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    return environment


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts a value to JSON text, for the filter `tojson` of templates. Jinja's own filter would escape HTML.

    Templates pass the options by name, so the parameters must have these names.
    """
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Raises TemplateError. A template calls this function to refuse a conversation."""
    raise TemplateError(message)


def time_formatter(clock: Clock) -> Callable[[str], str]:
    """Makes the function `strftime_now` for templates. The function formats the local time, without a time zone."""

    def strftime_now(format: str) -> str:
        local = datetime.fromtimestamp(clock.now(), tz=UTC).astimezone()
        return local.replace(tzinfo=None).strftime(format)

    return strftime_now


class GenerationTag(Extension):
    """The Jinja extension for `{% generation %}…{% endgeneration %}`. It renders the text between the tags unchanged.

    Templates contain these tags for training.
    """

    tags = {"generation"}  # noqa: RUF012 - an instance variable by Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """The function `dict` for templates. It makes dictionaries, but hides Python's class `dict` from a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """The function `namespace` for templates.

    It refuses names that begin with an underscore, because such names could give a template access to Python.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a named `self`, so that a template can write `namespace(self=…)`.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names start with a letter")
