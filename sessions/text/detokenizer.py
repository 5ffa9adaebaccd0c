"""Tokens to text while they come, character by character whole.

Owns the bytes of a character that is not complete yet. Each token is looked at once, never decoded again.
Keeps: all that `push` and `flush` answer, joined, is the decoding of all tokens at once.
"""

import codecs
import re

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
        self._is_mid_character = False
        self._spaces_to_strip = tokenizer.bytes.leading_spaces

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode() if data.isascii() and not self._is_mid_character else self._decode(data)
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """The rest when no token follows: U+FFFD for a character that is incomplete."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        begun, _ = self._decoder.getstate()
        if _SURROGATES.match(begun):
            text += self._decoder.decode(b"", final=True)
            begun = b""
        self._is_mid_character = bool(begun)
        return text

    def _stripped(self, text: str) -> str:
        """SentencePiece's space before the first word is no part of the text."""
        if not self._spaces_to_strip or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._spaces_to_strip)
        self._spaces_to_strip = self._spaces_to_strip - taken if spaces == len(text) else 0
        return text[taken:]
