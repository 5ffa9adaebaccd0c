"""Contains the SQL statements over the gateways that run. Never commits: the caller that opened the session does."""

from sqlalchemy import ColumnElement, Float, cast, delete, exists, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute

from graftwork.platform.clock import Clock
from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.gateways.tables import GatewayRow

_UNIX_EPOCH_DAY = 2_440_587.5  # as a Julian day
_DAY_S = 86_400.0


async def note_seen(session: WriteSession, gateway_id: str, clock: Clock | None) -> None:
    """Stores that the gateway runs now. `clock` replaces the database's own time in tests."""
    insert = sqlite.insert if _is_sqlite(session) else postgresql.insert
    values = {"id": gateway_id, "seen_at": database_now(session, clock)}
    statement = insert(GatewayRow).values(**values)
    await session.execute(
        statement.on_conflict_do_update(index_elements=["id"], set_={"seen_at": statement.excluded.seen_at})
    )


async def forget(session: WriteSession, gateway_id: str) -> None:
    """Deletes the row of a gateway that ends."""
    await session.execute(delete(GatewayRow).where(GatewayRow.id == gateway_id))


async def forget_others(session: WriteSession, prefix: str, gateway_id: str) -> None:
    """Deletes the rows of the gateways whose ids begin with `prefix`, but not that of `gateway_id`."""
    of_prefix = GatewayRow.id.startswith(prefix, autoescape=True)
    await session.execute(delete(GatewayRow).where(of_prefix, GatewayRow.id != gateway_id))


async def forget_silent(session: WriteSession, silent_s: float, clock: Clock | None) -> None:
    """Deletes the rows of the gateways that were not seen for more than `silent_s` seconds."""
    await session.execute(delete(GatewayRow).where(GatewayRow.seen_at < database_now(session, clock) - silent_s))


async def count_alive(session: ReadSession, lease_s: float, clock: Clock | None) -> int:
    """Returns how many gateways were seen in the last `lease_s` seconds."""
    alive = GatewayRow.seen_at > database_now(session, clock) - lease_s
    return int((await session.execute(select(func.count()).select_from(GatewayRow).where(alive))).scalar_one())


def is_alive(
    session: ReadSession, gateway_id: InstrumentedAttribute[str | None], lease_s: float, clock: Clock | None
) -> ColumnElement[bool]:
    """Returns the condition that the gateway in the column `gateway_id` was seen in the last `lease_s` seconds.

    It is false for NULL.
    """
    return exists().where(GatewayRow.id == gateway_id, GatewayRow.seen_at > database_now(session, clock) - lease_s)


def database_now(session: ReadSession, clock: Clock | None) -> ColumnElement[float]:
    """Returns the database's time at which the statement runs, in seconds since the Unix epoch."""
    if clock is not None:
        return literal(clock.now(), Float)
    return now_in(session.get_bind().dialect.name)


def now_in(dialect: str) -> ColumnElement[float]:
    """Returns the same for a kind of database, such as `sqlite`, by its own time."""
    if dialect == "sqlite":
        return (func.julianday("now") - _UNIX_EPOCH_DAY) * _DAY_S
    return cast(func.extract("epoch", func.clock_timestamp()), Float)


def _is_sqlite(session: ReadSession) -> bool:
    return session.get_bind().dialect.name == "sqlite"
