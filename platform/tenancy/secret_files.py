"""Makes secrets at first start, and keeps them in files in the data folder that only their owner can read."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from graftwork.platform.errors import InternalFailure
from graftwork.platform.settings import Settings
from graftwork.platform.tenancy.keys import KeyKind, make_key


def load_pepper(settings: Settings) -> bytes:
    """Returns the secret that key hashes depend on (the pepper), from the settings, else from `<data_dir>/pepper`.

    Makes the file at first start.
    """
    text = settings.pepper or read_or_make(settings.data_dir / "pepper", lambda: secrets.token_hex(32))
    return text.encode()


def load_admin_key(settings: Settings) -> str:
    """Returns the admin key, from the settings, else from `<data_dir>/admin.key`. Makes the file at first start."""
    return settings.admin_key or read_or_make(
        settings.data_dir / "admin.key", lambda: make_key(KeyKind.ADMIN).plaintext
    )


def read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Returns the secret in `path`. If the file does not exist, first writes there a new secret made by `make`.

    The file appears whole or not at all, with mode 0600. If several processes start at once, one of them writes it.
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
