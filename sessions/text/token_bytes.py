"""Converts the spelling of a token in the vocabulary to the token's bytes.

Supports two kinds of spelling: byte-level (GPT-2's alphabet: Llama 3, Qwen) and byte fallback (`▁`, `<0x0A>`: Llama 2,
Gemma). Never joins tokens: a character may need several tokens, and the Detokenizer in `tokenizer.py` joins them.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from graftwork.platform.errors import ValidationFailed

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    """The interface of the converters from tokens to bytes. A vocabulary writes bytes as text, and there is one converter
    for each way to write them: byte-level BPE, and SentencePiece with byte fallback.
    """

    leading_spaces: int
    """How many spaces decoding removes at the start of a text."""

    def of(self, token: str) -> bytes:
        """Returns the bytes of a token. `token` is the token's spelling in the vocabulary."""
        ...


class ByteLevelTokens:
    """Converts tokens in which each character stands for one byte, as in the vocabulary of GPT-2.

    A token with a character that stands for no byte becomes the UTF-8 bytes of its text.
    """

    leading_spaces = 0

    def __init__(self) -> None:
        self._byte_by_character = byte_level_alphabet()

    def of(self, token: str) -> bytes:
        try:
            return bytes(self._byte_by_character[character] for character in token)
        except KeyError:
            return token.encode()


class ByteFallbackTokens:
    """Converts tokens of SentencePiece vocabularies, in which `▁` means a space and `<0x0A>` means the byte 0x0A."""

    def __init__(self, replacements: Mapping[str, str], leading_spaces: int) -> None:
        self.leading_spaces = leading_spaces
        self._replacements = dict(replacements)

    def of(self, token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements.items():
            token = token.replace(old, new)
        return token.encode()


def token_bytes(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """Returns the converter from tokens to bytes that fits a model's tokenizer.

    `decoder` is the object `decoder` of tokenizer.json, which says how the vocabulary spells bytes.
    Raises ValidationFailed for an unknown decoder.
    """
    steps = _steps(decoder or {})
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelTokens()
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = {step["pattern"]["String"]: step["content"] for step in steps if step["type"] == "Replace"}
        return ByteFallbackTokens(replaced, sum(step["start"] for step in steps if step["type"] == "Strip"))
    raise ValidationFailed(
        f"tokenizer.json has a decoder of {kinds or 'no'} steps; byte-level and byte-fallback decoders are served.",
        param="tokenizer.json",
    )


def byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character in the tokens of GPT-2 stands for, by character.

    A printable Latin-1 character stands for the byte with its own code. The other bytes have the characters from U+0100
    on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]
