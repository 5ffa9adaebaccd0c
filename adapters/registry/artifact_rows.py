"""Contains the SQL statements over the digests whose files are stored. Never opens or commits a transaction: the caller
does.

A file is known by its digest, and versions of several tenants can share one file. So these statements ask whether a
version of any tenant still uses the file with a given digest.
"""

from sqlalchemy import delete, exists, select
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from graftwork.adapters.registry.tables import AdapterVersionRow, ArtifactRow
from graftwork.platform.database import ReadSession, WriteSession


class ArtifactLedger:
    """The table that lists the digest of every adapter whose files are stored.

    The row of a digest is written before the files, and deleted after them.
    """

    def __init__(self, session: WriteSession) -> None:
        self._session = session

    async def claim(self, digest: str, at: float) -> None:
        """Inserts the row of a digest if it is missing, and locks the row until the end of the transaction.

        `at` is the present time in Unix seconds.
        """
        is_postgresql = self._session.get_bind().dialect.name == "postgresql"
        insert = postgresql_insert if is_postgresql else sqlite_insert
        statement = insert(ArtifactRow).values(digest=digest, claimed_at=at)
        await self._session.execute(
            statement.on_conflict_do_update(index_elements=[ArtifactRow.digest], set_={"claimed_at": at})
        )

    async def lock_unreferenced(self, digest: str) -> bool:
        """Locks the row of a digest until the end of the transaction.

        Returns True if the row exists and no version of any tenant has the digest, so that the files may be removed.
        """
        statement = select(ArtifactRow.digest).where(ArtifactRow.digest == digest).with_for_update()
        if (await self._session.execute(statement)).first() is None:
            return False
        return not await is_referenced(self._session, digest)

    async def forget(self, digest: str) -> None:
        await self._session.execute(delete(ArtifactRow).where(ArtifactRow.digest == digest))


async def is_referenced(session: ReadSession, digest: str) -> bool:
    """Returns whether at least one adapter version, of any tenant, has this digest."""
    statement = select(exists().where(AdapterVersionRow.digest == digest))
    return bool((await session.execute(statement)).scalar_one())


async def unreferenced_digests(session: ReadSession) -> tuple[str, ...]:
    """Returns the digests whose files are stored although no version of any tenant has the digest."""
    statement = select(ArtifactRow.digest).where(~exists().where(AdapterVersionRow.digest == ArtifactRow.digest))
    return tuple((await session.scalars(statement)).all())
