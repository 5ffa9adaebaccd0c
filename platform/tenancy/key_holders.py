"""Finds the tenant that holds an API key, in reads that waiting requests share (see `shared_reads.py`).

A tenant that floods the server with requests that are refused thus takes one connection of the database at a time, not
all of them. Decides nothing: whether a key is revoked, expired or suspended is for `tenancy.py`.
"""

from collections.abc import Collection

from graftwork.platform.database import Database
from graftwork.platform.ids import KeyId
from graftwork.platform.tenancy import repository
from graftwork.platform.tenancy.keys import KeyParts, matches
from graftwork.platform.tenancy.shared_reads import SharedReads
from graftwork.platform.tenancy.tenants import ApiKey, Tenant

_LAST_USED_STEP_S = 60.0  # `last_used_at` is written at most this often, so that most requests write nothing


class KeyHolders:
    """The stored API keys with their tenants. `pepper` is the key of the hashes."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper
        self._reads = SharedReads(self._read)
        self._noting: set[KeyId] = set()
        """The keys whose `last_used_at` is being written."""

    async def find(self, parts: KeyParts) -> tuple[ApiKey, Tenant] | None:
        """Returns the stored key and its tenant, or None if the key is unknown or its secret is wrong.

        Sees every change that was committed before the call. Takes the same time for an unknown key as for a wrong
        secret.
        """
        holder = await self._reads.get(parts.public_id)
        return holder if matches(parts, holder[0].key_hash if holder else None, self._pepper) else None

    async def note_used(self, key: ApiKey, now: float) -> None:
        """Stores the time at which the key was used, unless a recent time is stored or another request stores it."""
        is_recent = key.last_used_at is not None and now - key.last_used_at < _LAST_USED_STEP_S
        if is_recent or key.id in self._noting:
            return
        self._noting.add(key.id)
        try:
            async with self._database.write() as session:
                await repository.change_key(session, key.tenant_id, key.id, {"last_used_at": now})
        finally:
            self._noting.discard(key.id)

    async def _read(self, public_ids: Collection[str]) -> dict[str, tuple[ApiKey, Tenant]]:
        async with self._database.read() as session:
            return await repository.find_key_holders(session, public_ids)
