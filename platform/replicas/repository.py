"""Contains the SQL statements over the engines that run. Never commits: the caller that opened the session does."""

from collections.abc import Sequence

from sqlalchemy import delete, exists, select, update
from sqlalchemy.dialects import postgresql, sqlite

from graftwork.platform.clock import Clock
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.gateways.repository import database_now
from graftwork.platform.replicas.tables import EngineDemandRow, ReplicaRow


async def find_replica(session: ReadSession, replica_id: str, *, lock: bool = False) -> ReplicaRow | None:
    """Returns the row of an engine; with `lock`, no other transaction can change it until the end of this one."""
    statement = select(ReplicaRow).where(ReplicaRow.id == replica_id)
    found: ReplicaRow | None = await session.scalar(statement.with_for_update() if lock else statement)
    return found


async def list_seen(session: ReadSession, within_s: float, clock: Clock | None) -> Sequence[ReplicaRow]:
    """Returns the engines that were seen in the last `within_s` seconds, by id."""
    since = database_now(session, clock) - within_s
    rows = await session.scalars(select(ReplicaRow).where(ReplicaRow.seen_at > since).order_by(ReplicaRow.id))
    return rows.all()


async def add_replica(session: WriteSession, row: ReplicaRow, clock: Clock | None) -> None:
    """Stores a new engine as seen now."""
    session.add(row)
    await session.flush()
    await note_seen(session, row.id, row.epoch, clock)


async def put_replica(session: WriteSession, replica_id: str, values: dict[str, object], clock: Clock | None) -> None:
    """Changes the row of an engine, and stores that it was seen now."""
    seen = {"seen_at": database_now(session, clock)}
    await session.execute(update(ReplicaRow).where(ReplicaRow.id == replica_id).values(values | seen))


async def note_seen(session: WriteSession, replica_id: str, epoch: int, clock: Clock | None) -> None:
    """Stores that an engine was seen now. Changes nothing if its epoch is another."""
    of_epoch = update(ReplicaRow).where(ReplicaRow.id == replica_id, ReplicaRow.epoch == epoch)
    await session.execute(of_epoch.values(seen_at=database_now(session, clock)))


async def put_state(session: WriteSession, replica_id: str, epoch: int, state: str) -> None:
    """Changes the state of an engine. Changes nothing if its epoch is another."""
    of_epoch = (ReplicaRow.id == replica_id, ReplicaRow.epoch == epoch)
    await session.execute(update(ReplicaRow).where(*of_epoch).values(state=state))


async def forget_silent(session: WriteSession, silent_s: float, clock: Clock | None) -> None:
    """Deletes the rows of the engines that were not seen for more than `silent_s` seconds."""
    await session.execute(delete(ReplicaRow).where(ReplicaRow.seen_at < database_now(session, clock) - silent_s))


async def put_demand(session: WriteSession, model: str, column: str, clock: Clock | None) -> None:
    """Stores the present time in a column of a model's row."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    statement = insert(EngineDemandRow).values(
        {"model": model, "offered_at": 0.0, "asked_at": 0.0} | {column: database_now(session, clock)}
    )
    changed = {column: getattr(statement.excluded, column)}
    await session.execute(statement.on_conflict_do_update(index_elements=["model"], set_=changed))


async def has_demand(session: ReadSession, model: str, column: str, within_s: float, clock: Clock | None) -> bool:
    """Returns whether the time in a column of a model's row is at most `within_s` seconds ago."""
    since = database_now(session, clock) - within_s
    found = exists().where(EngineDemandRow.model == model, getattr(EngineDemandRow, column) > since)
    return bool(await session.scalar(select(found)))
