"""Keeps the sign-ins of a person on this machine: one for each server, in a file that only the person can read.

    ~/.config/graftwork/logins.json     mode 0600; `XDG_CONFIG_HOME` moves it

Owns the file and its form. A change is written to a new file that replaces the old one, so no reader sees half of it;
`locked` lets one process at a time renew tokens, because a provider may take a refresh token only once.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graftwork.api.sdk.transport.errors import ConfigurationError

_FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class StoredLogin:
    """One person's sign-in at one server. No token is in its repr."""

    url: str
    """The server."""
    issuer: str
    client_id: str
    scopes: tuple[str, ...]
    person_id: str
    email: str | None
    refresh_token: str | None = field(default=None, repr=False)
    """What renews the sign-in at the identity provider; None if the provider gave none."""
    operator_token: str | None = field(default=None, repr=False)
    tenant_token: str | None = field(default=None, repr=False)
    tenant_id: str | None = None
    expires_at: float = 0.0
    """The time at which both tokens end, in unix seconds."""


def login_path() -> Path:
    """Returns where the file is, or will be."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return home / "graftwork" / "logins.json"


class LoginFile:
    """The file with the sign-ins. It need not exist."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or login_path()

    def find(self, url: str) -> StoredLogin | None:
        """Returns the sign-in at a server, or None. Raises ConfigurationError for a file that others can read."""
        found = self._read().get(url)
        return None if found is None else _login(found)

    def keep(self, login: StoredLogin) -> None:
        """Adds or replaces the sign-in at a server."""
        self._write(self._read() | {login.url: asdict(login)})

    def forget(self, url: str) -> bool:
        """Removes the sign-in at a server. Returns whether there was one."""
        logins = self._read()
        if logins.pop(url, None) is None:
            return False
        self._write(logins)
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time into the block, where the system has such locks."""
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows
            yield
            return
        self.path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, _FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, Any]:
        try:
            with self.path.open(encoding="utf-8") as file:
                if os.name == "posix" and os.fstat(file.fileno()).st_mode & _OTHERS:
                    message = (
                        f"Others can read the tokens in {self.path}: run `chmod 600 {self.path}`, or sign in again."
                    )
                    raise ConfigurationError(message)
                found = json.load(file)
        except FileNotFoundError:
            return {}
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.path} cannot be read: delete it, and sign in again.") from error
        return found if isinstance(found, dict) else {}

    def _write(self, logins: dict[str, Any]) -> None:
        self.path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(logins, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)


def _login(found: dict[str, Any]) -> StoredLogin:
    known = {one.name for one in fields(StoredLogin)}
    values = {name: value for name, value in found.items() if name in known}
    return StoredLogin(**values | {"scopes": tuple(values.get("scopes", ()))})
