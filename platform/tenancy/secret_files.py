"""Makes the server's secrets at its first start, and keeps them in files of the data folder.

Only the operating system user that runs the server can read these files.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from graftwork.platform.errors import InternalFailure
from graftwork.platform.keys.keys import KeyKind, make_key
from graftwork.platform.settings.settings import Settings


def load_pepper(settings: Settings) -> bytes:
    """Returns the pepper, the secret key with which API keys are hashed.

    The pepper comes from the settings. If it is not set there, it comes from the file `<data_dir>/pepper`, which is
    made with a random secret if it does not exist.
    """
    text = settings.pepper or read_or_make(settings.data_dir / "pepper", lambda: secrets.token_hex(32))
    return text.encode()


def load_admin_key(settings: Settings) -> str:
    """Returns the admin key.

    The key comes from the settings. If it is not set there, it comes from the file `<data_dir>/admin.key`, which is
    made with a new key if it does not exist.
    """
    return settings.admin_key or read_or_make(
        settings.data_dir / "admin.key", lambda: make_key(KeyKind.ADMIN).plaintext
    )


def read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Returns the secret in the file `path`. If the file does not exist, first writes the result of `make` into it.

    The file has mode 0600, and no reader sees it half written. If several processes start at the same time, only one of
    them writes the file, and all return its content. Raises InternalFailure if the file is empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _write_once(path, make())
    text = path.read_text().strip()
    if not text:
        raise InternalFailure(f"{path} is empty; delete it to have a new secret made.")
    return text


def _write_once(path: Path, text: str) -> None:
    """Writes `text` to `path`, unless another process did so first."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()
