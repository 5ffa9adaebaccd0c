"""Creates the data folder so that only its owner can read it, and makes sure that only one server uses it.

Owns the folder's mode and its lock file. Never reads the files that other modules put there.
"""

import fcntl
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from graftwork.platform.errors import Conflict, InvalidRequest

_log = logging.getLogger(__name__)

_LOCK_FILE = "serve.lock"
_OTHERS = 0o077


def prepare_data_folder(path: Path) -> None:
    """Creates the data folder with mode 0700 if it is missing.

    Raises InvalidRequest if the folder cannot be created, or if this user cannot write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unusable(path, "it is not writable")


def warn_of_readers(path: Path) -> None:
    """Logs a warning if other users of the machine can read the data folder. Never changes the mode of the folder."""
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS:
        _log.warning(
            "Other users can look into the data folder %s (mode %o), which holds keys and sessions: run chmod 700 %s",
            path,
            mode,
            path,
        )


@contextmanager
def locked_data_folder(path: Path) -> Generator[None]:
    """Locks the data folder until the `with` block ends, so that no other server can use it.

    If a process dies, the kernel frees its lock. Raises Conflict with the other server's process id if another server
    has the lock.
    """
    try:
        descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode().strip() or "another"
        raise Conflict(
            f"The data folder {path} is in use by process {holder}: stop that server, or give this one a folder of its "
            "own with --data-dir.",
            param="data_dir",
            code="data_folder_in_use",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _unusable(path: Path, reason: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"The data folder {path} cannot be used ({reason}): name one that this user may write to with --data-dir.",
        param="data_dir",
    )
