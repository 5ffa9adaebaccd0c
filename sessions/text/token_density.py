"""Computes how few tokens a text can have, from its length and the longest token of the vocabulary.

Owns the list of tokenizers for which this is certain: those that keep every byte of a text. For every other tokenizer
the answer is 0. Never encodes anything. Invariant: the answer is never more than the number of tokens of the text.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_WHOLE = 1.0
_COMPOSED = 0.5
"""NFC turns up to four characters into one, which then has three bytes."""


@dataclass(frozen=True, slots=True)
class TokenDensity:
    """How much of a text one token holds at most."""

    longest_token_bytes: int | None
    """None if a token may hold any number of bytes."""
    kept: float = _WHOLE
    """The least bytes of a text that is encoded, for each character of the text that a client sends."""

    @classmethod
    def of(cls, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> "TokenDensity":
        """Reads it from tokenizer.json's content, and the vocabulary without added tokens."""
        kept = _kept(content.get("normalizer"))
        added = content.get("added_tokens") or []
        absorbs = any(token.get("lstrip") or token.get("rstrip") for token in added)
        if kept is None or absorbs or not _has_all_bytes(content, vocabulary):
            return cls(None)
        is_byte_level = _is_byte_level(content)
        spelled = (len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
        return cls(max([*spelled, *(len(token["content"].encode()) for token in added)]), kept)

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has in any case."""
        if self.longest_token_bytes is None:
            return 0
        kept = _WHOLE if text.isascii() else self.kept
        return math.ceil(math.floor(len(text) * kept) / self.longest_token_bytes)


def _kept(normalizer: Mapping[str, Any] | None) -> float | None:
    """Returns the least bytes that a normalizer makes of a character that is not ASCII; None if it may drop some."""
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
    """Returns whether each byte of a text becomes a part of a token."""
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
