"""Turns messages into token ids: the chat template renders them, and the tokenizer encodes the text.

Owns the order of these two steps, and the public prefixes: system prompts that the operator declares as public, so that
all tenants may share their KV. Never lets the text of a user or a tool become control tokens.
Invariants: for texts that spell no control token, the ids equal those of `apply_chat_template(tokenize=True)`. Tokens
of a prompt are public only as far as they equal a declared prefix, from the first token on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.control_tokens import ControlTokenEscaper, ControlTokenTexts
from graftwork.sessions.text.final_message import OpenMessage
from graftwork.sessions.text.messages import Message
from graftwork.sessions.text.tokenizer import TextTokenizer


class PromptEncoder:
    """Turns messages into the token ids of a prompt, for one model."""

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer, context_tokens: int | None = None) -> None:
        """`context_tokens` is the length of the model's context. If it is None, prompts may have every length."""
        self.template = template
        self.tokenizer = tokenizer
        self._context_tokens = context_tokens
        self.template_digest = "sha256:" + hashlib.sha256(template.source.encode()).hexdigest()
        self.tokenizer_digest = tokenizer.digest
        special = [text for token_id, text in tokenizer.added_tokens.items() if token_id in tokenizer.special_ids]
        self._literals = ControlTokenTexts(special, template.control_texts(tokenizer.added_tokens.values()))

    def encode_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> tuple[int, ...]:
        """Returns the token ids of a whole conversation, such as the first prompt of a session.

        `add_generation_prompt` adds the start of the next answer. `continue_final_message` leaves the last message
        open instead, so that the answer continues it; this message must be an assistant's text. `variables` are further
        names that the chat template can read. `param` is the request field that errors name.
        Raises InvalidRequest if the chat template refuses the messages. Raises ContextLengthExceeded before encoding if
        the length of the text proves that it cannot fit in the context. Can also raise PayloadTooLarge.
        """
        opened = OpenMessage.at_end_of(messages, self.template.source, param) if continue_final_message else None
        shown = messages if opened is None else opened.messages
        escaper = self._escaper(shown, tools, variables)
        adds_prompt = add_generation_prompt and opened is None
        text = self.template.render(
            shown, tools, add_generation_prompt=adds_prompt, variables=variables, escaper=escaper
        )
        if opened is not None:
            text = opened.cut(text)
        return self._encode(text, escaper, param, continues=False)

    def encode_delta(
        self, assistant: Message, new: Sequence[Message], *, closed: bool, param: str = "messages"
    ) -> tuple[int, ...]:
        """Returns the token ids of the text that the messages `new` add to a conversation.

        The text ends with the start of the next answer. `assistant` is the model's answer before the new messages.
        `closed` says whether the tokens of this answer end with a stop token (see `ends_turn`).
        Raises the errors of `encode_messages`.
        """
        escaper = self._escaper((assistant, *new), None, None)
        text = self.template.render_delta(assistant, new, closed=closed, escaper=escaper)
        return self._encode(text, escaper, param, continues=True)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last token of a generated message is a stop token of the model."""
        return bool(token_ids) and self.tokenizer.token_text(token_ids[-1]) in self.template.end_of_turn_texts

    def _escaper(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> ControlTokenEscaper | None:
        forms = [message.template_dict() for message in messages]
        return self._literals.escaper_for((forms, tools, variables), self.template.source)

    def _encode(
        self, text: str, escaper: ControlTokenEscaper | None, param: str, *, continues: bool
    ) -> tuple[int, ...]:
        if self._context_tokens is not None:
            self.tokenizer.check_may_fit(text, self._context_tokens, param)
        if escaper is None:
            return self.tokenizer.encode(text, allow_special=True, continues=continues)
        token_ids: list[int] = []
        for piece in escaper.split(text):
            token_ids += self.tokenizer.encode(piece.text, allow_special=not piece.is_plain, continues=continues)
            continues = True
        return tuple(token_ids)


@dataclass(frozen=True, slots=True)
class PublicPrefixes:
    """The system prompts that the operator declares as public, so that all tenants may share their KV.

    Each entry of `prefixes` has the token ids of one such system prompt, rendered as the start of a prompt.
    """

    prefixes: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path, encoder: PromptEncoder) -> "PublicPrefixes":
        """Reads public system prompts: one from the file `path`, or one from each `.txt` file of the folder `path`.

        Raises InvalidRequest if a file cannot be read.
        """
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        try:
            texts = [file.read_text(encoding="utf-8").removesuffix("\n") for file in files]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"public_prompts: {error}. Give a UTF-8 text file, or a folder of `.txt` files.", param="public_prompts"
            ) from error
        return cls(
            tuple(encoder.encode_messages([Message("system", text)], add_generation_prompt=False) for text in texts)
        )

    def tokens_of(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens at the start of `prompt` are equal to those of a public system prompt."""
        return max((_common(prefix, prompt) for prefix in self.prefixes), default=0)


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
