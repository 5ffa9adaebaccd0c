"""Starts, shows and cancels roll-outs for their tenants, and makes every change of a roll-out's state.

Owns the transaction of each change: the roll-out's row, its alias and the audit log change together, under the lock of
the adapter's row. Never decides when a step is over: RolloutController does.
Invariant: at most one roll-out at a time moves an alias. It ends when anybody else moves the alias.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graftwork.adapters.format.specs import Adapter, AliasTarget, check_alias, unknown_adapter
from graftwork.adapters.registry import rollout_rows
from graftwork.adapters.registry.alias_rows import AliasReader
from graftwork.adapters.registry.aliases import AliasMove, check_ready, move_alias
from graftwork.adapters.registry.repository import AdapterReader, AdapterWriter
from graftwork.adapters.registry.rollout import Rollout, RolloutLimits, RolloutState, RolloutStep
from graftwork.platform.activity.outcomes import Outcomes
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict, NotFound
from graftwork.platform.ids import new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import TenantScope

_ID = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewRollout:
    """A request for a roll-out. Its versions are not yet checked."""

    alias: str
    version: int
    steps: tuple[RolloutStep, ...]
    limits: RolloutLimits = field(default_factory=RolloutLimits)


class RolloutKeeper:
    """The roll-outs of all tenants. Each call reads or changes those of one tenant."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def start(self, scope: TenantScope, name: str, new: NewRollout, *, actor: str = "admin") -> Rollout:
        """Starts a roll-out: the alias leads to the new version with the weight of the first step at once.

        Raises NotFound if the adapter or the version does not exist, and Conflict if the version is not ready, if the
        alias does not lead to one other version, or if another roll-out moves it.
        """
        check_alias(new.alias)
        async with self._database.write() as session:
            adapter = await AdapterWriter(session, scope).lock(name)
            if adapter is None or adapter.deleted_at is not None:
                raise unknown_adapter(name)
            check_ready(adapter, AliasTarget.to_version(new.version))
            if await rollout_rows.running_of(session, scope, adapter.id, new.alias) is not None:
                message = f"Another roll-out moves '{name}@{new.alias}': wait for its end, or cancel it."
                raise Conflict(message, param="alias", code="rollout_running")
            now = self._clock.now()
            rollout = Rollout(
                id=new_id("rol"),
                tenant_id=scope,
                adapter_id=adapter.id,
                adapter=name,
                alias=new.alias,
                version=new.version,
                stable=_stable(adapter, new),
                steps=new.steps,
                limits=new.limits,
                state=RolloutState.RUNNING,
                step=0,
                step_began_at=now,
                change=0,
                created_at=now,
            )
            move = AliasMove(new.alias, rollout.target, "rollout", actor)
            rollout = replace(rollout, change=await move_alias(session, scope, adapter, move, now))
            await rollout_rows.add(session, rollout)
            await _audit(
                session, rollout, actor, "started", {"steps": [[each.weight, each.seconds] for each in new.steps]}
            )
        return rollout

    async def get(self, scope: TenantScope, name: str, rollout_id: str) -> tuple[Rollout, dict[int, Outcomes]]:
        """Returns a roll-out, and the figures of its present step by version. Raises NotFound."""
        if not _ID.fullmatch(rollout_id):  # keeps text that a database cannot store out of the statement
            raise unknown_rollout()
        async with self._database.read() as session:
            rollout = await rollout_rows.find(session, scope, rollout_id)
            if rollout is None or rollout.adapter != name:
                raise unknown_rollout()
            return rollout, await rollout_rows.figures(session, rollout)

    async def list(
        self, scope: TenantScope, name: str, request: PageRequest
    ) -> Page[tuple[Rollout, dict[int, Outcomes]]]:
        """Returns one page of an adapter's roll-outs. Raises NotFound for an unknown adapter or cursor."""
        async with self._database.read() as session:
            adapter = await AdapterReader(session, scope).find(name)
            if adapter is None:
                raise unknown_adapter(name)
            page = await rollout_rows.page(session, scope, adapter.id, request)
            if page is None:
                raise unknown_rollout()
            found = [(each, await rollout_rows.figures(session, each)) for each in page.items]
        return Page(tuple(found), page.has_more)

    async def cancel(self, scope: TenantScope, name: str, rollout_id: str, *, actor: str = "admin") -> Rollout:
        """Ends a roll-out that runs, and gives the alias back to the stable version.

        Raises NotFound if the roll-out does not exist, and Conflict if it has ended.
        """
        rollout, _ = await self.get(scope, name, rollout_id)
        ended = await self.end(rollout, RolloutState.CANCELLED, f"cancelled by {actor}", actor=actor)
        if ended is None:
            raise Conflict("This roll-out has ended: promote or roll back the alias instead.", code="rollout_ended")
        return ended

    async def advance(self, rollout: Rollout) -> Rollout | None:
        """Goes on to the next step, or completes the roll-out after the last. Returns None if it has ended meanwhile."""
        if rollout.step + 1 == len(rollout.steps):
            return await self._change(rollout, RolloutState.COMPLETED, None, "completed")
        return await self._change(rollout, RolloutState.RUNNING, None, "advanced")

    async def end(
        self, rollout: Rollout, state: RolloutState, reason: str, *, actor: str = "rollout"
    ) -> Rollout | None:
        """Ends a roll-out, and gives the alias back to the stable version. Returns None if it has ended meanwhile."""
        return await self._change(rollout, state, reason, str(state), actor)

    async def _change(
        self, seen: Rollout, state: RolloutState, reason: str | None, action: str, actor: str = "rollout"
    ) -> Rollout | None:
        scope, now = TenantScope(seen.tenant_id), self._clock.now()
        async with self._database.write() as session:
            adapter = await AdapterWriter(session, scope).lock(seen.adapter)
            rollout = await rollout_rows.find(session, scope, seen.id)
            if adapter is None or rollout is None or rollout.state is not RolloutState.RUNNING:
                return None
            if rollout.step != seen.step:
                return None  # another gateway has advanced it
            newest = await AliasReader(session, scope, adapter.id).newest(rollout.alias)
            if adapter.deleted_at is not None or newest is None or newest.number != rollout.change:
                moved_by = "the adapter's deletion" if newest is None else newest.actor
                state, reason, action = RolloutState.CANCELLED, f"the alias was moved by {moved_by}", "cancelled"
            else:
                rollout = _next(rollout, state, now)
                returns_to = newest.returns_to
                if _target(rollout) == AliasTarget.to_version(rollout.stable) and returns_to:
                    before = await AliasReader(session, scope, adapter.id).change(rollout.alias, returns_to)
                    returns_to = None if before is None else before.returns_to
                move = AliasMove(rollout.alias, _target(rollout), "rollout", actor, returns_to or 0)
                rollout = replace(rollout, change=await move_alias(session, scope, adapter, move, now))
            is_over = state is not RolloutState.RUNNING
            rollout = replace(rollout, state=state, reason=reason, ended_at=now if is_over else None)
            await rollout_rows.change(session, rollout)
            await _audit(session, rollout, actor, action, {"step": rollout.step, "reason": reason})
        return rollout


def unknown_rollout() -> NotFound:
    return NotFound("The adapter has no such roll-out.", param="rollout_id", code="rollout_not_found")


def _next(rollout: Rollout, state: RolloutState, now: float) -> Rollout:
    if state is RolloutState.RUNNING:
        return replace(rollout, step=rollout.step + 1, step_began_at=now)
    return replace(rollout, state=state)


def _target(rollout: Rollout) -> AliasTarget:
    """Returns where the alias leads in the roll-out's state."""
    if rollout.state is RolloutState.RUNNING:
        return rollout.target
    is_done = rollout.state is RolloutState.COMPLETED
    return AliasTarget.to_version(rollout.version if is_done else rollout.stable)


def _stable(adapter: Adapter, new: NewRollout) -> int:
    target = adapter.aliases.get(new.alias)
    versions: Sequence[int] = () if target is None else target.versions
    if len(versions) != 1 or versions[0] == new.version:
        message = (
            f"'{adapter.name}@{new.alias}' must lead to one other version, with which version {new.version} is compared: "
            "promote that first."
        )
        raise Conflict(message, param="alias", code="no_stable_version")
    return versions[0]


async def _audit(session: WriteSession, rollout: Rollout, actor: str, action: str, details: dict[str, object]) -> None:
    scope = TenantScope(rollout.tenant_id)
    target = f"{rollout.adapter}@{rollout.alias}"
    about = {"rollout": rollout.id, "version": rollout.version, "stable": rollout.stable}
    await AdapterWriter(session, scope).audit(
        rollout.ended_at or rollout.step_began_at, actor, f"adapter.rollout.{action}", target, about | details
    )
