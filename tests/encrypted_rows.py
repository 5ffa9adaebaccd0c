"""Lets a database of a test encrypt the content of rows."""

from pathlib import Path

from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.database import Database
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.row_keys import encrypt_rows
from graftwork.platform.encryption.tenant_keys import TenantKeys


def with_encrypted_rows(database: Database, folder: Path, clock: Clock | None = None) -> TenantKeys:
    """Encrypts the rows of a database from now on, with the master keys in a folder. Returns its tenants' keys."""
    path, clock = folder / "master.key", clock or SystemClock()
    masters = MasterKeyFile.load(path) if path.exists() else MasterKeyFile.create(path)
    keys = TenantKeys(database, clock, masters)
    encrypt_rows(database, keys, clock)
    return keys
