"""Sets, removes and rolls back the aliases of adapters, and keeps the history of each.

Owns what a rollback returns to. Never decides which caller gets which version of a canary: `AliasTarget` does.
Invariants: an alias leads only to versions that are ready. Each change is in the alias's history and in the audit log,
in the same transaction.
"""

import re
from dataclasses import dataclass

from graftwork.adapters.format.specs import (
    Adapter,
    AliasChange,
    AliasEvent,
    AliasTarget,
    check_alias,
    is_adapter_name,
    unknown_adapter,
)
from graftwork.adapters.registry.alias_rows import AliasReader, AliasWriter
from graftwork.adapters.registry.repository import AdapterReader, AdapterWriter
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound, ValidationFailed
from graftwork.platform.pagination import NUMBER_PATTERN, Page, PageRequest
from graftwork.platform.tenancy.principals import TenantScope


@dataclass(frozen=True, slots=True)
class AliasMove:
    """A new target for an alias, and who gives it why."""

    alias: str
    target: AliasTarget | None
    """None removes the alias."""
    reason: str
    actor: str
    returns_to: int | None = None
    """The number of the change whose target a rollback restores; None is that of the present target, and 0 is none."""


async def move_alias(session: WriteSession, scope: TenantScope, adapter: Adapter, move: AliasMove, at: float) -> int:
    """Moves an alias of a locked adapter, and notes it in the alias's history and in the audit log.

    Returns the number of the change in the alias's history.
    """
    rows = AliasWriter(session, scope, adapter.id)
    newest = await rows.newest(move.alias)
    returns_to = move.returns_to
    if returns_to is None and newest is not None:
        returns_to = newest.returns_to if newest.target is None else newest.number
    number = 1 if newest is None else newest.number + 1
    await rows.put(move.alias, AliasEvent(number, move.target, returns_to or None, move.reason, move.actor, at))
    before = adapter.aliases.get(move.alias)
    details = {
        "target": None if move.target is None else move.target.to_json(),
        "previous": None if before is None else before.to_json(),
    }
    writer = AdapterWriter(session, scope)
    await writer.audit(at, move.actor, f"adapter.alias.{move.reason}", f"{adapter.name}@{move.alias}", details)
    return number


class AliasKeeper:
    """The aliases of all tenants' adapters. Each call reads or changes those of one tenant."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def set(
        self, scope: TenantScope, name: str, alias: str, target: AliasTarget, *, actor: str = "admin"
    ) -> AliasChange:
        """Sets `alias` of the adapter to `target`, and creates the alias if it is new. Later requests use the new
        target. If this is the target already, changes nothing.

        Raises ValidationFailed if the alias has a wrong form, NotFound if the adapter or a version does not exist, and
        Conflict if a version is not ready.
        """
        check_alias(alias)
        async with self._database.write() as session:
            adapter = await _locked(session, scope, name)
            previous = adapter.aliases.get(alias)
            if previous != target:
                check_ready(adapter, target)
                await self._move(session, scope, adapter, AliasMove(alias, target, "set", actor))
        return AliasChange(name, alias, target, previous)

    async def remove(self, scope: TenantScope, name: str, alias: str, *, actor: str = "admin") -> AliasChange:
        """Removes an alias of the adapter `name`. Raises NotFound if the adapter or the alias does not exist."""
        async with self._database.write() as session:
            adapter = await _locked(session, scope, name)
            previous = _target(adapter, alias)
            await self._move(session, scope, adapter, AliasMove(alias, None, "removed", actor))
        return AliasChange(name, alias, None, previous)

    async def roll_back(self, scope: TenantScope, name: str, alias: str, *, actor: str = "admin") -> AliasChange:
        """Gives the alias the target that it had before its present one. A second rollback goes back one target more.

        Passes over targets with versions that were deleted. Raises NotFound if the adapter or the alias does not exist,
        and Conflict if the alias had no earlier target that is ready.
        """
        async with self._database.write() as session:
            adapter = await _locked(session, scope, name)
            previous = _target(adapter, alias)
            event = await _earlier(AliasReader(session, scope, adapter.id), alias, adapter)
            if event is None:
                message = f"'{name}@{alias}' had no earlier target that can be served: promote a version instead."
                raise Conflict(message, param="alias", code="no_earlier_target")
            move = AliasMove(alias, event.target, "rollback", actor, event.returns_to or 0)
            await self._move(session, scope, adapter, move)
        return AliasChange(name, alias, event.target, previous)

    async def history(self, scope: TenantScope, name: str, alias: str, request: PageRequest) -> Page[AliasEvent]:
        """Returns one page of the changes of an alias, also of one that was removed.

        Raises NotFound if the adapter does not exist, or never had this alias, and ValidationFailed for a wrong
        `request.after`.
        """
        if request.after is not None and not re.fullmatch(NUMBER_PATTERN, request.after):
            raise ValidationFailed("after: the id of a change is a number of 1 to 9 digits.", param="after")
        async with self._database.read() as session:
            adapter = await AdapterReader(session, scope).find(name)
            if adapter is None:
                raise unknown_adapter(name)
            rows = AliasReader(session, scope, adapter.id)
            if not is_adapter_name(alias) or await rows.newest(alias) is None:
                raise unknown_alias()
            return await rows.page(alias, request)

    async def _move(self, session: WriteSession, scope: TenantScope, adapter: Adapter, move: AliasMove) -> None:
        await move_alias(session, scope, adapter, move, self._clock.now())


def check_ready(adapter: Adapter, target: AliasTarget) -> None:
    """Raises NotFound if the adapter lacks a version of `target`, and Conflict if one is not ready."""
    for number in target.versions:
        if adapter.version(number) is not None:
            continue
        if any(version.version == number for version in adapter.deleted_versions):
            message = f"Version {number} of '{adapter.name}' is not ready, because it was deleted: restore it first."
            raise Conflict(message, param="version", code="version_not_ready")
        raise NotFound(f"The adapter has no version {number}.", param="version", code="version_not_found")


def unknown_alias() -> NotFound:
    return NotFound("The adapter has no such alias.", param="alias", code="alias_not_found")


async def _locked(session: WriteSession, scope: TenantScope, name: str) -> Adapter:
    adapter = await AdapterWriter(session, scope).lock(name)
    if adapter is None or adapter.deleted_at is not None:
        raise unknown_adapter(name)
    return adapter


def _target(adapter: Adapter, alias: str) -> AliasTarget:
    target = adapter.aliases.get(alias)
    if target is None:
        raise unknown_alias()
    return target


async def _earlier(rows: AliasReader, alias: str, adapter: Adapter) -> AliasEvent | None:
    """Returns the last change before the present one whose target's versions are all ready; None if there is none."""
    event = await rows.newest(alias)
    while event is not None and event.returns_to:
        event = await rows.change(alias, event.returns_to)
        if event is not None and event.target and all(adapter.version(each) for each in event.target.versions):
            return event
    return None
