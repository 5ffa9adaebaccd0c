"""Tokens to text while they come, character by character whole.

Owns the bytes of a character that is not complete yet. Each token is looked at once, never decoded again.
Keeps: all that `push` and `flush` answer, joined, is the decoding of all tokens at once.
"""

import codecs
import re
from collections.abc import Iterable

from graftwork.sessions.text.tokenizer import TextTokenizer

_SURROGATES = re.compile(rb"\xed[\xa0-\xbf]")
"""No character begins like this, but the codec waits for its third byte."""


class Detokenizer:
    """The text of one generation. U+FFFD stands only for bytes that are no UTF-8, whatever follows."""

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are special tokens that become text all the same."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = tokenizer.bytes.leading_spaces

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        text = self._decoder.decode(b"".join(map(self._bytes, token_ids)))
        begun, _ = self._decoder.getstate()
        if _SURROGATES.match(begun):
            text += self._decoder.decode(b"", final=True)
        return self._stripped(text)

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was begun."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._tokenizer.token_text(token_id)
        return b"" if token is None else self._tokenizer.bytes.of(token)

    def _stripped(self, text: str) -> str:
        """SentencePiece's space before the first word is no part of the text."""
        if not self._spaces_to_strip or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._spaces_to_strip)
        self._spaces_to_strip = self._spaces_to_strip - taken if spaces == len(text) else 0
        return text[taken:]
