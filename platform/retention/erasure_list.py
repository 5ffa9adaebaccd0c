"""Lists the tenants that were deleted, and deletes them again in a database that was restored from an older backup.

    {"format": "graftwork-erasures-1", "at": 1764250000.0}
    {"tenant_id": "ten_…", "deleted_at": 1764240000.0, "erased_at": 1764240020.0}

The list has ids and times alone. Never erases by itself: it makes the tenants count as deleted and not erased, and the
sweep of the next server erases all that the backup has brought back, in the database and in the data folder.
Invariant: a list may be applied to any database, and again at any time. No tenant is touched that is not in it.
"""

import json
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest, NotFound
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy import erasure_rows
from graftwork.platform.tenancy.tenancy import Tenancy

FORMAT = "graftwork-erasures-1"
_TENANTS_PER_QUERY = 500
_ACTOR = "erasures apply"


@dataclass(frozen=True, slots=True)
class AppliedErasures:
    """What has become of the tenants of a list."""

    deleted: int = 0
    """Tenants that the database had as living ones, and that are deleted now."""
    again: int = 0
    """Tenants that it had as deleted ones, and that will be erased again."""
    unknown: int = 0
    """Tenants that it does not have, because they were created after the backup."""


class ErasureList:
    """The deleted tenants of one database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def lines(self) -> AsyncGenerator[str]:
        """Yields the list: a head, and one line for each deleted tenant."""
        yield json.dumps({"format": FORMAT, "at": self._clock.now()}) + "\n"
        after = ""
        while True:
            async with self._database.read() as session:
                found = await erasure_rows.page_of_deleted(session, after, _TENANTS_PER_QUERY)
            for one in found:
                line = {"tenant_id": one.tenant_id, "deleted_at": one.deleted_at, "erased_at": one.erased_at}
                yield json.dumps(line) + "\n"
                after = one.tenant_id
            if len(found) < _TENANTS_PER_QUERY:
                return

    async def apply(self, lines: Iterable[str]) -> AppliedErasures:
        """Deletes the tenants of a list. Raises InvalidRequest, before it changes anything, if the text is no such list."""
        tenants = _read(lines)
        # A tenant is deleted without its keys' pepper: nothing is hashed.
        tenancy = Tenancy(self._database, b"", self._clock)
        deleted = again = 0
        for tenant_id in tenants:
            try:
                await tenancy.delete_tenant(tenant_id, actor=_ACTOR)
                deleted += 1
            except NotFound:
                async with self._database.write() as session:
                    again += await erasure_rows.erase_again(session, tenant_id)
        return AppliedErasures(deleted, again, len(tenants) - deleted - again)


def _read(lines: Iterable[str]) -> list[TenantId]:
    """Returns the tenants of a list."""
    head, *rest = list(lines) or [""]
    if (form := _object_of(head, 1).get("format")) != FORMAT:
        raise _no_list(1, f"its format is {form!r}, and not {FORMAT!r}")
    return [_tenant_of(text, number) for number, text in enumerate(rest, start=2)]


def _tenant_of(text: str, number: int) -> TenantId:
    tenant_id = _object_of(text, number).get("tenant_id")
    if not isinstance(tenant_id, str) or not tenant_id:
        raise _no_list(number, "it has no tenant_id")
    return TenantId(tenant_id)


def _object_of(text: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise _no_list(number, "it is no JSON") from None
    if not isinstance(value, dict):
        raise _no_list(number, "it is no JSON object")
    return value


def _no_list(number: int, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"Line {number} of this file does not belong to a list of erasures, because {reason}: give a file that `graftwork "
        "db erasures list` has written.",
        code="invalid_erasure_list",
    )
