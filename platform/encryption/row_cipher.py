"""Encrypts the content of one tenant's rows, each value for its place.

    sealed   nonce (24 bytes)  ciphertext  tag (16 bytes)        by XAES-256-GCM, with the place as associated data
    place    tenant, table, column and primary key, as JSON

XAES-256-GCM (C2SP, https://c2sp.org/XAES-256-GCM) derives a key for AES-256-GCM from the first half of a nonce of 24
bytes. So nonces can be random for 2^80 values of a tenant, where AES-GCM's own 12 bytes are enough for 2^32 only.
Owns the key of the rows, which is derived from the tenant's data key: files have others. Knows no database.
"""

import base64
import binascii
import json
import logging
import os
from collections.abc import Mapping
from threading import Lock
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from graftwork.platform.contents.columns import (
    SEALED_MARK,
    SEALED_PREFIX,
    ContentColumn,
    content_columns,
    is_sealed,
    key_columns,
)
from graftwork.platform.database import Base
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import TenantId

NONCE_BYTES = 24
_BLOCK_BYTES, _TAG_BYTES = 16, 16
_DERIVED_FROM = NONCE_BYTES // 2
"""The bytes of the nonce from which the key of a message is derived. AES-GCM gets the others."""

_log = logging.getLogger("graftwork.encryption")


class ExtendedNonceCipher:
    """XAES-256-GCM under one key. Several threads may call it."""

    def __init__(self, key: bytes) -> None:
        self._blocks = Cipher(AES(key), ECB()).encryptor()  # NIST SP 800-108 with CMAC needs single blocks
        self._using_blocks = Lock()
        top = int.from_bytes(self._blocks.update(bytes(_BLOCK_BYTES)), "big") << 1
        subkey = top ^ (0x87 if top >> 128 else 0)
        self._subkeys = (subkey & ((1 << 128) - 1)) * ((1 << 128) + 1)  # twice, for two blocks at once

    def encrypt(self, nonce: bytes, plain: bytes, context: bytes) -> bytes:
        return self._derived(nonce).encrypt(nonce[_DERIVED_FROM:], plain, context)

    def decrypt(self, nonce: bytes, sealed: bytes, context: bytes) -> bytes:
        """Raises InvalidTag."""
        return self._derived(nonce).decrypt(nonce[_DERIVED_FROM:], sealed, context)

    def _derived(self, nonce: bytes) -> AESGCM:
        half = nonce[:_DERIVED_FROM]
        blocks = int.from_bytes(b"\x00\x01X\x00" + half + b"\x00\x02X\x00" + half, "big") ^ self._subkeys
        with self._using_blocks:
            derived = self._blocks.update(blocks.to_bytes(2 * _BLOCK_BYTES, "big"))
        return AESGCM(derived)


class EncryptedRows:
    """Writes and reads the content of one tenant's rows. Plain values, from before encryption, are read as they are."""

    def __init__(self, data_key: bytes, tenant_id: TenantId) -> None:
        self._cipher = ExtendedNonceCipher(HKDF(SHA256(), 32, None, b"graftwork rows").derive(data_key))
        self._tenant_id = tenant_id

    def sealed(self, table: type[Base], values: Mapping[str, Any], *key: object) -> Mapping[str, Any]:
        key = key or tuple(values[name] for name in key_columns(table))
        stored = dict(values)
        for column in content_columns(table):
            value = stored.get(column.attribute)
            if value is not None:
                stored[column.attribute] = self._seal(column, value, key)
        return stored

    def opened(self, table: type[Base], attribute: str, stored: Any, *key: object) -> Any:
        if not is_sealed(stored):
            return stored
        (column,) = (one for one in content_columns(table) if one.attribute == attribute)
        try:
            return self._open(column, stored, key)
        except (InvalidTag, ValueError, TypeError):
            extra = {"table": column.table, "column": column.name, "row": str(key[0]), "tenant_id": self._tenant_id}
            _log.error("row_unreadable", extra=extra)
            raise InternalFailure(
                "What is stored here cannot be decrypted: it was changed or cut, or belongs to another row or tenant. "
                "The operator finds the row in the log as row_unreadable, and must restore it from a backup.",
                code="row_unreadable",
            ) from None

    def _seal(self, column: ContentColumn, value: Any, key: tuple[object, ...]) -> bytes | list[Any]:
        nonce = os.urandom(NONCE_BYTES)
        if column.holds_bytes:
            return SEALED_PREFIX + nonce + self._cipher.encrypt(nonce, value, self._place(column, key))
        text = json.dumps(value)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), self._place(column, key))
        return [SEALED_MARK, len(text), base64.b64encode(sealed).decode()]

    def _open(self, column: ContentColumn, stored: Any, key: tuple[object, ...]) -> Any:
        if column.holds_bytes:
            return self._decrypted(stored[len(SEALED_PREFIX) :], column, key)
        _, num_characters, text = stored
        plain = self._decrypted(binascii.a2b_base64(text, strict_mode=True), column, key)
        if len(plain) != num_characters:
            raise InvalidTag
        return json.loads(plain)

    def _decrypted(self, sealed: bytes, column: ContentColumn, key: tuple[object, ...]) -> bytes:
        if len(sealed) < NONCE_BYTES + _TAG_BYTES:
            raise InvalidTag
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._place(column, key))

    def _place(self, column: ContentColumn, key: tuple[object, ...]) -> bytes:
        return json.dumps([self._tenant_id, column.table, column.name, *key]).encode()
