"""Changes what an adapter is described by: its tags, and the defaults of its requests.

Owns no rule about the defaults' values: the API checks them. Each change is in the audit log, by the names of what has
changed, without any text of the defaults.
"""

import re
from dataclasses import dataclass

from graftwork.adapters.format.defaults import AdapterDefaults
from graftwork.adapters.format.specs import Adapter, shown, unknown_adapter
from graftwork.adapters.registry.repository import AdapterWriter
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.tenancy.principals import TenantScope

MAX_TAGS = 32
_TAG = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """New tags and defaults for an adapter. None changes nothing."""

    tags: tuple[str, ...] | None = None
    defaults: AdapterDefaults | None = None


class AdapterDetails:
    """The tags and defaults of all tenants' adapters. Each call is for one tenant."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def change(self, scope: TenantScope, name: str, change: AdapterChange, *, actor: str = "admin") -> Adapter:
        """Replaces the adapter's tags, its defaults, or both, and returns the adapter.

        Raises ValidationFailed for a tag of a wrong form, and NotFound if the adapter does not exist.
        """
        tags = None if change.tags is None else tuple(sorted(set(change.tags)))
        check_tags(tags or ())
        async with self._database.write() as session:
            writer = AdapterWriter(session, scope)
            adapter = await writer.lock(name)
            if adapter is None or adapter.deleted_at is not None or not adapter.versions:
                raise unknown_adapter(name)
            details: dict[str, object] = {}
            if tags is not None:
                await writer.set_tags(adapter.id, tags)
                details["tags"] = list(tags)
            if change.defaults is not None:
                await writer.set_defaults(adapter.id, change.defaults)
                details["defaults"] = sorted(change.defaults.to_json())
            await writer.audit(self._clock.now(), actor, "adapter.changed", name, details)
            return await writer.reload(name)


def check_tags(tags: tuple[str, ...]) -> None:
    """Raises ValidationFailed for too many tags, or a tag of a wrong form."""
    if len(tags) > MAX_TAGS:
        raise ValidationFailed(f"An adapter has at most {MAX_TAGS} tags.", param="tags")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            message = (
                f"'{shown(tag)}' cannot be a tag: use 1 to 63 of a-z, 0-9, '.', '_', ':', '/' and '-', "
                "beginning with a letter or a digit."
            )
            raise ValidationFailed(message, param="tags", code="invalid_name")
