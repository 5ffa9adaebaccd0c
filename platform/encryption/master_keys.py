"""Defines what wraps the data keys of tenants: a key management service, or a file of master keys.

    master key (never in the database) ──wraps──► data key of a tenant (wrapped, in the database) ──encrypts──► files, rows

Owns the file, its mode and its rotation. Never sees a tenant's data. A rotation adds a master key: what older ones have
wrapped can still be unwrapped, and is wrapped anew by `TenantKeys.rewrap`.
Invariant: a wrong master key is an error. It never gives a wrong data key, because AES-GCM authenticates.
"""

import base64
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from graftwork.platform.errors import Conflict, InvalidRequest
from graftwork.platform.ids import new_id

KEY_BYTES = 32
_NONCE_BYTES = 12
_FORMAT = "graftwork-master-keys-1"
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A data key as it may be stored."""

    master_id: str
    """The master key that can unwrap it."""
    blob: bytes


class MasterKeys(Protocol):
    """The interface of a key management service. Every call blocks its thread, and may ask another machine."""

    @property
    def current_id(self) -> str:
        """The id of the master key that wraps new data keys."""
        ...

    def wrap(self, key: bytes, context: bytes) -> WrappedKey:
        """Encrypts a data key of 32 bytes with the current master key. `context` must be the same to unwrap it."""
        ...

    def unwrap(self, wrapped: WrappedKey, context: bytes) -> bytes:
        """Returns the data key. Raises InvalidRequest if there is no such master key, or if it is another one."""
        ...


class MasterKeyFile:
    """Master keys in a file that only the server's user can read, for servers without a key management service."""

    def __init__(self, path: Path, current_id: str, keys: Mapping[str, bytes]) -> None:
        self._path = path
        self._current_id = current_id
        self._keys = dict(keys)

    @classmethod
    def create(cls, path: Path) -> "MasterKeyFile":
        """Makes a file with one new master key. Raises Conflict if the file exists: it may hold the only key to data."""
        made = new_id("mk")
        file = cls(path, made, {made: secrets.token_bytes(KEY_BYTES)})
        try:
            file._write(os.O_CREAT | os.O_EXCL, path)
        except FileExistsError:
            raise Conflict(f"{path} exists. Rotate it, or name a new file.", param="master_key_file") from None
        return file

    @classmethod
    def load(cls, path: Path) -> "MasterKeyFile":
        """Reads a file. Raises InvalidRequest if it is missing or wrong, or if other users can read it."""
        try:
            mode = path.stat().st_mode
            text = path.read_text()
        except OSError as error:
            raise _unusable(path, f"it cannot be read ({error.strerror})") from error
        if stat.S_IMODE(mode) & _OTHERS:
            raise _unusable(path, f"other users can read it: run chmod 600 {path}")
        try:
            stored = json.loads(text)
            keys = {name: base64.b64decode(key, validate=True) for name, key in stored["keys"].items()}
            current_id = stored["current"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _unusable(path, "it is no file of master keys") from None
        if stored.get("format") != _FORMAT or current_id not in keys or {len(k) for k in keys.values()} != {KEY_BYTES}:
            raise _unusable(path, "it is no file of master keys")
        return cls(path, current_id, keys)

    @property
    def current_id(self) -> str:
        return self._current_id

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of all master keys, the oldest first."""
        return tuple(self._keys)

    def wrap(self, key: bytes, context: bytes) -> WrappedKey:
        self._read_again()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return WrappedKey(self._current_id, nonce + AESGCM(self._keys[self._current_id]).encrypt(nonce, key, context))

    def unwrap(self, wrapped: WrappedKey, context: bytes) -> bytes:
        if wrapped.master_id not in self._keys:
            self._read_again()  # it was rotated since
        master = self._keys.get(wrapped.master_id)
        if master is None:
            raise _unusable(
                self._path, f"it lacks the master key {wrapped.master_id}, which data in the database needs"
            )
        nonce, sealed = wrapped.blob[:_NONCE_BYTES], wrapped.blob[_NONCE_BYTES:]
        try:
            return AESGCM(master).decrypt(nonce, sealed, context)
        except InvalidTag:
            raise _unusable(
                self._path, f"its master key {wrapped.master_id} is not the one that has wrapped the data keys"
            ) from None

    def rotate(self) -> str:
        """Adds a new master key, which wraps from now on. Returns its id. Running servers read the file again.

        Rotations of one file, by any processes of this machine, wait for each other, and each keeps the keys of all
        others.
        """
        made = new_id("mk")
        with _locked(self._path):
            self._read_again()
            self._keys[made], self._current_id = secrets.token_bytes(KEY_BYTES), made
            self._replace()
        return made

    def _read_again(self) -> None:
        """Takes what a rotation has changed in the file."""
        found = MasterKeyFile.load(self._path)
        self._current_id, self._keys = found._current_id, found._keys

    def _replace(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        self._write(os.O_CREAT | os.O_EXCL, draft)
        draft.replace(self._path)

    def _write(self, flags: int, path: Path) -> None:
        keys = {name: base64.b64encode(key).decode() for name, key in self._keys.items()}
        content = json.dumps({"format": _FORMAT, "current": self._current_id, "keys": keys}, indent=1) + "\n"
        with os.fdopen(os.open(path, os.O_WRONLY | flags, 0o600), "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Keeps other rotations of the file out. A rotation replaces the file, so the lock must be on the one of this name."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, f"it cannot be read ({error.strerror})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                yield
                return
        finally:
            os.close(descriptor)


def _unusable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The file of master keys {path} cannot be used, because {reason}. Without the right one, encrypted data cannot be "
        "read; restore it from where you keep it.",
        param="master_key_file",
        code="master_key_unusable",
    )
