"""Messages to token ids: the template renders, the tokenizer encodes, and no text from outside becomes control.

Owns the joint between the two; keeps that without control literals in the text the ids are those of
`apply_chat_template(tokenize=True)`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.control_tokens import ControlLiterals, ControlMarks
from graftwork.sessions.text.messages import Message
from graftwork.sessions.text.tokenizer import TextTokenizer


class PromptEncoder:
    """Makes prompts for one model."""

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.template_digest = "sha256:" + hashlib.sha256(template.source.encode()).hexdigest()
        self.tokenizer_digest = tokenizer.digest
        special = [text for token_id, text in tokenizer.added_tokens.items() if token_id in tokenizer.special_ids]
        self._literals = ControlLiterals(special, template.control_texts(tokenizer.added_tokens.values()))

    def encode_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """A whole conversation; the first prompt of a session as well. Raises InvalidRequest."""
        marks = self._marks(messages, tools, variables)
        text = self.template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=variables, marks=marks
        )
        return self._encode(text, marks, continues=False)

    def encode_delta(self, assistant: Message, new: Sequence[Message], *, closed: bool) -> tuple[int, ...]:
        """What new messages add behind a generated one, up to where the assistant speaks next.

        `assistant` is the generated message, `closed` whether its tokens end with a stop token (`ends_turn`).
        Raises InvalidRequest.
        """
        marks = self._marks((assistant, *new), None, None)
        text = self.template.render_delta(assistant, new, closed=closed, marks=marks)
        return self._encode(text, marks, continues=True)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether the model itself ended the message that these tokens are."""
        return bool(token_ids) and self.tokenizer.token_text(token_ids[-1]) in self.template.end_of_turn_texts

    def _marks(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> ControlMarks | None:
        forms = [message.template_form() for message in messages]
        return self._literals.marks_for((forms, tools, variables), self.template.source)

    def _encode(self, text: str, marks: ControlMarks | None, *, continues: bool) -> tuple[int, ...]:
        if marks is None:
            return self.tokenizer.encode(text, allow_special=True, continues=continues)
        token_ids: list[int] = []
        for piece in marks.split(text):
            token_ids += self.tokenizer.encode(piece.text, allow_special=not piece.is_plain, continues=continues)
            continues = True
        return tuple(token_ids)
