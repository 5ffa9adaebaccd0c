"""Contains the SQL statements over roll-outs. Never opens or commits a transaction: the caller does.

Invariant: every statement reads or changes rows of one tenant only, except `running`, which is for the controller, and
the statements over one roll-out that the controller has found.
"""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Select, delete, or_, select, update

from graftwork.adapters.registry.rollout import Rollout, RolloutLimits, RolloutState, RolloutStep
from graftwork.adapters.registry.tables import AdapterRow, RolloutFiguresRow, RolloutRow
from graftwork.platform.activity.outcomes import Outcomes
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.ids import AdapterId, TenantId
from graftwork.platform.pagination import Order, Page, PageRequest, cut
from graftwork.platform.tenancy.principals import TenantScope

_Rows = Select[RolloutRow, str]


async def running(session: ReadSession) -> list[Rollout]:
    """Returns the roll-outs of all tenants that run."""
    return await _load(session, _all().where(RolloutRow.state == RolloutState.RUNNING).order_by(RolloutRow.id))


async def find(session: ReadSession, scope: TenantScope, rollout_id: str) -> Rollout | None:
    found = await _load(session, _of(scope).where(RolloutRow.id == rollout_id))
    return found[0] if found else None


async def running_of(session: ReadSession, scope: TenantScope, adapter_id: AdapterId, alias: str) -> Rollout | None:
    """Returns the roll-out that moves an alias now; None if none does."""
    statement = _of(scope).where(RolloutRow.adapter_id == adapter_id, RolloutRow.alias == alias)
    found = await _load(session, statement.where(RolloutRow.state == RolloutState.RUNNING))
    return found[0] if found else None


async def page(
    session: ReadSession, scope: TenantScope, adapter_id: AdapterId, request: PageRequest
) -> Page[Rollout] | None:
    """Returns one page of an adapter's roll-outs. Returns None if `request.after` is not the id of one of them."""
    statement = _of(scope).where(RolloutRow.adapter_id == adapter_id)
    is_ascending = request.order is Order.ASCENDING
    if request.after is not None:
        if not await _load(session, statement.where(RolloutRow.id == request.after)):
            return None
        later = RolloutRow.id > request.after
        statement = statement.where(later if is_ascending else RolloutRow.id < request.after)
    by = RolloutRow.id.asc() if is_ascending else RolloutRow.id.desc()
    return cut(await _load(session, statement.order_by(by).limit(request.limit + 1)), request)


async def add(session: WriteSession, rollout: Rollout) -> None:
    session.add(
        RolloutRow(
            id=rollout.id,
            tenant_id=rollout.tenant_id,
            adapter_id=rollout.adapter_id,
            alias=rollout.alias,
            version=rollout.version,
            stable=rollout.stable,
            steps=[[step.weight, step.seconds] for step in rollout.steps],
            limits=asdict(rollout.limits),
            state=rollout.state,
            step=rollout.step,
            step_began_at=rollout.step_began_at,
            change=rollout.change,
            created_at=rollout.created_at,
        )
    )
    await session.flush()


async def change(session: WriteSession, rollout: Rollout) -> None:
    """Stores the state and the step of a roll-out."""
    await session.execute(
        update(RolloutRow)
        .where(RolloutRow.id == rollout.id, RolloutRow.tenant_id == rollout.tenant_id)
        .values(
            state=rollout.state,
            step=rollout.step,
            step_began_at=rollout.step_began_at,
            change=rollout.change,
            ended_at=rollout.ended_at,
            reason=rollout.reason,
        )
    )


async def take_lease(session: WriteSession, rollout: Rollout, owner: str, now: float, lease_s: float) -> bool:
    """Takes or renews the lease of a roll-out. Returns False if another gateway has it."""
    is_free = or_(RolloutRow.lease_owner == owner, RolloutRow.lease_until < now)
    result = await session.execute(
        update(RolloutRow)
        .where(RolloutRow.id == rollout.id, RolloutRow.state == RolloutState.RUNNING, is_free)
        .values(lease_owner=owner, lease_until=now + lease_s)
        .returning(RolloutRow.id)
    )
    return result.first() is not None


async def figures(session: ReadSession, rollout: Rollout) -> dict[int, Outcomes]:
    """Returns what all gateways have counted in the present step, by version."""
    rows = await session.scalars(
        select(RolloutFiguresRow).where(
            RolloutFiguresRow.rollout_id == rollout.id, RolloutFiguresRow.step == rollout.step
        )
    )
    found: dict[int, list[Outcomes]] = {}
    for row in rows.all():
        first_tokens = {int(bucket): count for bucket, count in row.first_tokens.items()}
        found.setdefault(row.version, []).append(Outcomes(row.requests, row.errors, row.refusals, first_tokens))
    return {version: Outcomes.sum_of(parts) for version, parts in found.items()}


async def put_figures(session: WriteSession, rollout: Rollout, gateway_id: str, counted: dict[int, Outcomes]) -> None:
    """Replaces what a gateway has counted in the present step."""
    await session.execute(
        delete(RolloutFiguresRow).where(
            RolloutFiguresRow.rollout_id == rollout.id,
            RolloutFiguresRow.gateway_id == gateway_id,
            RolloutFiguresRow.step == rollout.step,
        )
    )
    for version, outcomes in counted.items():
        session.add(
            RolloutFiguresRow(
                rollout_id=rollout.id,
                gateway_id=gateway_id,
                step=rollout.step,
                version=version,
                requests=outcomes.requests,
                errors=outcomes.errors,
                refusals=outcomes.refusals,
                first_tokens={str(bucket): count for bucket, count in outcomes.first_tokens.items()},
            )
        )
    await session.flush()


def _all() -> _Rows:
    return select(RolloutRow, AdapterRow.name).join(AdapterRow, AdapterRow.id == RolloutRow.adapter_id)


def _of(scope: TenantScope) -> _Rows:
    return _all().where(RolloutRow.tenant_id == scope)


async def _load(session: ReadSession, statement: _Rows) -> list[Rollout]:
    rows: Sequence[tuple[RolloutRow, str]] = [(row[0], row[1]) for row in (await session.execute(statement)).all()]
    return [_rollout(row, name) for row, name in rows]


def _rollout(row: RolloutRow, name: str) -> Rollout:
    return Rollout(
        id=row.id,
        tenant_id=TenantId(row.tenant_id),
        adapter_id=AdapterId(row.adapter_id),
        adapter=name,
        alias=row.alias,
        version=row.version,
        stable=row.stable,
        steps=tuple(RolloutStep(weight, seconds) for weight, seconds in row.steps),
        limits=RolloutLimits(**row.limits),
        state=RolloutState(row.state),
        step=row.step,
        step_began_at=row.step_began_at,
        change=row.change,
        created_at=row.created_at,
        ended_at=row.ended_at,
        reason=row.reason,
    )
