"""Turns a stream of tokens into text, one token at a time, in whole characters.

Owns the bytes of a character that is still incomplete. Never decodes a token twice.
Invariant: the results of `push` and `flush` joined are the decoding of all tokens at once.
"""

import codecs
import re

from graftwork.sessions.text.tokenizer import TextTokenizer

_SURROGATES = re.compile(rb"\xed[\xa0-\xbf]")
"""These two bytes begin no valid character, but Python's decoder waits for a third byte."""


class Detokenizer:
    """Decodes one generation. Bytes that can never be UTF-8 become U+FFFD at once."""

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """`shown` are special tokens that become text even if other special tokens are skipped."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False
        self._spaces_to_strip = tokenizer.bytes.leading_spaces

    def push(self, token_id: int) -> str:
        """Returns the characters that this token completes."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        text = data.decode() if data.isascii() and not self._is_mid_character else self._decode(data)
        return self._stripped(text) if self._spaces_to_strip else text

    def flush(self) -> str:
        """Returns the rest of the text after the last token: U+FFFD for an incomplete character."""
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
        """Removes the space that SentencePiece puts before the first word."""
        if not self._spaces_to_strip or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(spaces, self._spaces_to_strip)
        self._spaces_to_strip = self._spaces_to_strip - taken if spaces == len(text) else 0
        return text[taken:]
