"""Computes the least number of tokens that a text can have, from its length and the vocabulary's longest token.

Knows the tokenizers that keep every byte of a text, because the computation is valid only for them. For every other
tokenizer the number is 0. Never encodes a text. Invariant: a text never has fewer tokens than the number.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_WHOLE = 1.0
_COMPOSED = 0.5
"""NFC composes up to four characters into one character of three bytes; 0.5 is a safe bound below that."""


@dataclass(frozen=True, slots=True)
class TokenDensity:
    """How many bytes of a text one token can have at most. So a long text has at least a known number of tokens."""

    longest_token_bytes: int | None
    """It is None if a token may have any number of bytes."""
    kept: float = _WHOLE
    """The least number of bytes that the normalizer makes of one character of the text."""

    @classmethod
    def of(cls, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> "TokenDensity":
        """Computes the token density of a tokenizer. `content` is the content of its tokenizer.json, and `vocabulary` the
        vocabulary without added tokens.
        """
        kept = _kept(content.get("normalizer"))
        added = content.get("added_tokens") or []
        absorbs = any(token.get("lstrip") or token.get("rstrip") for token in added)
        if kept is None or absorbs or not _has_all_bytes(content, vocabulary):
            return cls(None)
        is_byte_level = _is_byte_level(content)
        spelled = (len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
        return cls(max([*spelled, *(len(token["content"].encode()) for token in added)]), kept)

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that every encoding of the text has at least."""
        if self.longest_token_bytes is None:
            return 0
        kept = _WHOLE if text.isascii() else self.kept
        return math.ceil(math.floor(len(text) * kept) / self.longest_token_bytes)


def _kept(normalizer: Mapping[str, Any] | None) -> float | None:
    """Returns the least bytes that a normalizer makes of a character outside ASCII; None if it may drop characters."""
    if normalizer is None:
        return _WHOLE
    match normalizer["type"]:
        case "Sequence":
            parts = [_kept(part) for part in normalizer["normalizers"]]
            known = [part for part in parts if part is not None]
            return math.prod(known) if len(known) == len(parts) else None
        case "NFC":
            return _COMPOSED
        case "Prepend":
            return _WHOLE
        case "Replace":
            pattern = normalizer["pattern"].get("String")
            return _WHOLE if pattern is not None and len(normalizer["content"]) >= len(pattern) else None
    return None


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return ()
    return pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else (pre_tokenizer,)


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(content.get("pre_tokenizer")))


def _has_all_bytes(content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """Returns whether each byte of every text becomes part of a token."""
    for step in _steps(content.get("pre_tokenizer")):
        drops = step.get("behavior") == "Removed"
        if drops or step["type"] not in ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"):
            return False
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        return False
    if _is_byte_level(content):
        return len(vocabulary.keys() & _BYTE_SYMBOLS) == len(_BYTE_SYMBOLS)
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_SYMBOLS = {chr(byte) for byte in _PRINTED} | {chr(0x100 + index) for index in range(256 - len(_PRINTED))}
"""The characters that stand for the 256 bytes in a byte-level vocabulary."""
