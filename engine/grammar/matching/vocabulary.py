"""Reads the text of every token, as bytes, from a model's tokenizer.json. A grammar engine needs nothing else from a
tokenizer.

The text of a special token is stored as empty, so that no answer text can produce this token. Only a structural tag (a
description of an answer with tool calls) may name special tokens. The model may have more token ids than the tokenizer.
These padding ids have empty texts too.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text of each token of a model, as bytes. The engine and its compile server read it from the same file."""

    tokens: tuple[bytes, ...]
    """The text by token id, one entry for each row of the model's output head. Empty for special tokens and padding."""
    specials: dict[str, int]
    eos_token_ids: tuple[int, ...]
    fingerprint: str

    @property
    def size(self) -> int:
        return len(self.tokens)


def read_vocabulary(folder: Path, size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary | None:
    """Reads the vocabulary from the tokenizer.json of a model folder. Returns None if there is no such file.

    `size` is the number of rows of the model's output head. Token ids beyond the tokenizer's own are padding.
    Raises InvalidRequest if the file cannot be read, holds no tokenizer, or has more tokens than the model.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return _read_vocabulary(path.read_bytes(), size, eos_token_ids)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path} holds no tokenizer ({type(error).__name__}: {error}): take the model's own file.", param="model"
        ) from error


def _read_vocabulary(content: bytes, size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    tokenizer = json.loads(content)
    pieces: dict[str, int] = _pieces(tokenizer["model"]["vocab"])
    decode = _from_byte_level if "ByteLevel" in json.dumps(tokenizer.get("decoder")) else _from_byte_fallback
    highest = max(pieces.values(), default=-1)
    if highest >= size:
        raise InvalidRequest(
            f"tokenizer.json has tokens up to the id {highest}, but the model's embedding has {size} rows: "
            "the two files belong to different models.",
            param="model",
        )
    tokens = [b""] * size
    for piece, token_id in pieces.items():
        tokens[token_id] = decode(piece)
    specials: dict[str, int] = {}
    for added in tokenizer.get("added_tokens", ()):
        if added["id"] < size:
            is_special = added["special"] or added["id"] in eos_token_ids
            tokens[added["id"]] = b"" if is_special else added["content"].encode()
            specials |= {added["content"]: added["id"]} if is_special else {}
    digest = hashlib.sha256(content + f"/{size}/{eos_token_ids}".encode()).hexdigest()
    return Vocabulary(tuple(tokens), specials, eos_token_ids, digest)


def _pieces(vocab: Any) -> dict[str, int]:
    if isinstance(vocab, dict):
        return vocab
    return {piece: token_id for token_id, (piece, _) in enumerate(vocab)}  # unigram: pairs of piece and score


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's byte alphabet, from character to byte. A printable byte is its own character; the other bytes are
    the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTES_BY_CHARACTER = _byte_alphabet()


def _from_byte_level(piece: str) -> bytes:
    if all(character in _BYTES_BY_CHARACTER for character in piece):
        return bytes(_BYTES_BY_CHARACTER[character] for character in piece)
    return piece.encode()


def _from_byte_fallback(piece: str) -> bytes:
    found = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece.replace("▁", " ").encode()
