"""Encrypts pages of one size that one file holds, and reads them in any order.

Each file has a key of its own: HKDF-SHA256 of the owner's key, a salt and a context. Each page is encrypted with
AES-256-GCM; its nonce is its number in the file, so no nonce is used twice under one key. Its name is authenticated
too, so no page can stand in the place of another. The tag is kept apart from the page, which keeps its size.
Other threads may run while a page is worked on, because the library releases the interpreter.

Invariant: `unseal` accepts exactly what `seal` has made with the same key, salt, context, number and name.
"""

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SALT_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12
_LABEL = b"graftwork page file\0"
_PIECE_BYTES = 128 * 1024
"""Bytes that are decrypted at a time, from a copy that stays in the processor's cache."""


def new_salt() -> bytes:
    """Returns the salt of a new file."""
    return secrets.token_bytes(SALT_BYTES)


class PageCipher:
    """Encrypts and decrypts the pages of one file. Each thread needs its own."""

    def __init__(self, key: bytes, salt: bytes, context: bytes) -> None:
        """`key` is the owner's, of 32 bytes. `context` says what the file is for."""
        self._key = AES(HKDF(SHA256(), 32, salt, _LABEL + context).derive(key))
        self._scratch = memoryview(b"")

    def seal(self, number: int, name: bytes, page: memoryview, into: memoryview) -> bytes:
        """Encrypts a page into `into`, which has the page's size. Returns the tag, 16 bytes.

        `number` is the page's place in the file: it must differ for each page.
        """
        encryptor = Cipher(self._key, GCM(_nonce(number))).encryptor()
        encryptor.authenticate_additional_data(name)
        encryptor.update_into(page, into)
        encryptor.finalize()
        return bytes(encryptor.tag)

    def unseal(self, number: int, name: bytes, page: memoryview, tag: bytes) -> bool:
        """Decrypts a page in its place. Returns False if it is not what `seal` has made: its content is then undefined."""
        decryptor = Cipher(self._key, GCM(_nonce(number), tag)).decryptor()
        decryptor.authenticate_additional_data(name)
        if len(self._scratch) < min(len(page), _PIECE_BYTES):
            self._scratch = memoryview(bytearray(_PIECE_BYTES))
        for start in range(0, len(page), _PIECE_BYTES):
            piece = page[start : start + _PIECE_BYTES]
            sealed = self._scratch[: len(piece)]
            sealed[:] = piece
            decryptor.update_into(sealed, piece)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")
