"""Renders messages with the model's chat template. The text equals that of `transformers`, byte for byte.

Owns two ways to render: a whole conversation, and only the text that new messages add to stored tokens.
Never encodes text to tokens. Invariant: the output and the run time of a template are limited.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes

from graftwork.platform.clock import Clock
from graftwork.platform.errors import InternalFailure, InvalidRequest, PayloadTooLarge, ValidationFailed
from graftwork.sessions.text.control_tokens import ControlTokenEscaper
from graftwork.sessions.text.jinja_environment import template_environment
from graftwork.sessions.text.messages import Message

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
STAND_IN = Message(role="user", content="Hello")
"""The user's message before a generated message in a delta. Its text has no effect on the result."""

RenderingFailure = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors that a template raises for messages that it does not support."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one rendering. A template above a limit is stopped when it writes its next piece of text."""

    characters: int = 8_000_000
    seconds: float = 10.0


class ChatTemplate:
    """A compiled template with the model's special tokens."""

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

        Raises ValidationFailed if the source is not a template.
        """
        self.source = source
        self.end_of_turn_texts = frozenset(end_of_turn_texts) | {special_tokens.get("eos_token", "")} - {""}
        self._clock = clock
        self._special_tokens = dict(special_tokens)
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
        """Renders a conversation. `variables` are extra names for the template; `escaper` escapes every string.

        Raises InvalidRequest with the template's message, PayloadTooLarge.
        """
        forms = [message.template_dict() for message in messages]
        given = _given(tools, variables)
        if escaper is not None:
            forms = [escaper.escape_message(form) for form in forms]
            given = escaper.escape(given)
        return self._write(
            {
                **self._special_tokens,
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
        """Renders only the text that `new` adds after a generated message, up to the start of the next answer.

            …user\nHello<eos>\n<start>assistant\n | assistant | <eos> | \n<start>user\nnew<eos>\n<start>assistant\n
                                                    closed=False ^ closed=True ^

        `closed` says whether the message's tokens end with the stop token. The history is not rendered again, because
        its text could be encoded to other tokens than the stored ones.
        Raises InvalidRequest if the template cannot continue from there.
        """
        assistant = assistant.with_valid_arguments()
        opening = self.render((STAND_IN,), add_generation_prompt=False, escaper=escaper)
        base = self.render((STAND_IN, assistant), add_generation_prompt=False, escaper=escaper)
        whole = self.render((STAND_IN, assistant, *new), add_generation_prompt=True, escaper=escaper)
        if not base.startswith(opening) or not whole.startswith(base):
            raise InvalidRequest(
                "This model's chat template rewrites earlier messages when new ones come, so a session cannot go on "
                "from its stored tokens. Use /v1/chat/completions with this model.",
                code="template_not_appendable",
            )
        start, end = self._end_of_turn(base, len(opening), escaper)
        return whole[end:] if closed else whole[start:]

    def control_texts(self, added_tokens: Iterable[str]) -> list[str]:
        """Returns the added tokens that the template itself writes.

        A user's text must not produce them as control tokens.
        """
        tree = self._environment.parse(self.source)
        literals = {node.data for node in tree.find_all(nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        written = "\0".join(literals)
        return [token for token in added_tokens if token in written and not token.isspace()]

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


def _given(tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    reserved = [name for name in RESERVED_VARIABLES if name in (variables or {})]
    if reserved:
        raise InvalidRequest(f"{reserved[0]} cannot be a template variable.", param="chat_template_kwargs")
    return {"tools": None if tools is None else list(tools), "variables": dict(variables or {})}
