"""Encrypts a file from front to back in chunks, and reads it so.

    header   "GWSEAL1\\n"  salt (32 bytes)
    chunk    64 KiB of content, encrypted, and its tag (16 bytes); the last one may be shorter, or empty

Each file has a key of its own: HKDF-SHA256 of the tenant's data key and the salt. A chunk's nonce is its number, and
whether it is the last. So chunks that are moved, repeated or missing at the end are noticed: this is the construction
STREAM (Hoang, Reyhanitabar, Rogaway, Vizár, "Online Authenticated-Encryption", 2015), with AES-256-GCM.
Invariant: no byte is returned before its chunk was authenticated.
"""

import io
import os
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from graftwork.platform.errors import InternalFailure

_MAGIC = b"GWSEAL1\n"
_SALT_BYTES, _TAG_BYTES = 32, 16
CHUNK_BYTES = 64 * 1024


def _cipher(data_key: bytes, salt: bytes, context: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt, b"graftwork file\0" + context).derive(data_key))


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


class SealedWriter:
    """Encrypts what is written, into an open file that the caller closes. Call `finish` at the end."""

    def __init__(self, file: BinaryIO, data_key: bytes, context: bytes) -> None:
        """`context` names the file. The same is needed to read it, so no file can stand in the place of another."""
        salt = os.urandom(_SALT_BYTES)
        self._file = file
        self._cipher = _cipher(data_key, salt, context)
        self._number = 0
        self._waiting = bytearray()
        file.write(_MAGIC + salt)

    def write(self, piece: bytes) -> None:
        self._waiting += piece
        while len(self._waiting) > CHUNK_BYTES:
            self._seal(bytes(self._waiting[:CHUNK_BYTES]), is_last=False)
            del self._waiting[:CHUNK_BYTES]

    def finish(self) -> None:
        """Writes the last chunk."""
        self._seal(bytes(self._waiting), is_last=True)

    def _seal(self, chunk: bytes, *, is_last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._number, is_last=is_last), chunk, None))
        self._number += 1


class _SealedReader(io.RawIOBase):
    """Decrypts an open file chunk by chunk, and closes it at the end."""

    def __init__(self, file: BinaryIO, data_key: bytes, context: bytes) -> None:
        self._file = file
        head = file.read(len(_MAGIC) + _SALT_BYTES)
        if len(head) != len(_MAGIC) + _SALT_BYTES or not head.startswith(_MAGIC):
            raise _broken()
        self._cipher = _cipher(data_key, head[len(_MAGIC) :], context)
        self._number = 0
        self._next = file.read(CHUNK_BYTES + _TAG_BYTES)
        self._has_ended = False
        self._opened = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while not self._opened and not self._has_ended:
            self._open_chunk()
        count = min(len(buffer), len(self._opened))
        buffer[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _open_chunk(self) -> None:
        following = self._file.read(CHUNK_BYTES + _TAG_BYTES)
        try:
            nonce = _nonce(self._number, is_last=not following)
            self._opened = memoryview(self._cipher.decrypt(nonce, self._next, None))
        except InvalidTag:
            raise _broken() from None
        self._number += 1
        self._next, self._has_ended = following, not following


def open_sealed(file: BinaryIO, data_key: bytes, context: bytes) -> BinaryIO:
    """Returns the content of an encrypted file, to be read from front to back. Closing it closes `file`.

    Raises InternalFailure, also while it is read, if the file was changed or cut, or belongs to another key or context.
    """
    return io.BufferedReader(_SealedReader(file, data_key, context), CHUNK_BYTES)


def _broken() -> InternalFailure:
    return InternalFailure(
        "An encrypted file cannot be read: it was changed or cut, or its key is another one. Restore it from a backup.",
        code="sealed_file_broken",
    )
