"""Leaves the last message of a prompt open, so that the model continues its text.

A chat template ends each message with a stop token. To leave the last message open, a mark character is added to its
text before the template renders it, and the rendered text is cut at the mark.
Invariant: the result equals that of `apply_chat_template(continue_final_message=True)` in transformers 5, also for
templates that remove white space around a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.messages import Message, free_character


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A conversation whose last message stays open, and the mark character at the end of this message."""

    messages: tuple[Message, ...]
    """The messages; the last one ends with the mark and a space."""
    mark: str

    @classmethod
    def at_end_of(cls, messages: Sequence[Message], template_source: str, param: str = "messages") -> "OpenMessage":
        """Marks the end of the last message. `param` is the request field that errors name.

        Raises InvalidRequest if the last message is not an assistant's text.
        """
        *others, last = messages
        if last.role != "assistant" or last.content is None or last.tool_calls:
            raise InvalidRequest(
                "continue_final_message continues the text of the last message, so this message must be the "
                "assistant's, with content and without tool_calls.",
                param=f"{param}[{len(others)}]",
            )
        mark = free_character((template_source, *(message.content or "" for message in messages)))
        return cls((*others, replace(last, content=f"{last.content}{mark} ")), mark)

    def cut(self, text: str) -> str:
        """Returns the rendered text up to the mark.

        If the template has removed the space after the mark, it removes white space around every message. Then the
        white space before the mark is removed too. Raises InvalidRequest if the template does not show the message.
        """
        place = text.rfind(self.mark)
        if place < 0:
            raise InvalidRequest(
                "This model's chat template does not show the last message, so the model cannot continue it: leave "
                "continue_final_message out.",
                param="continue_final_message",
            )
        return text[:place] if text[place + 1 : place + 2] == " " else text[:place].rstrip()
