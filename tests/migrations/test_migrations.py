"""Tests of the migrations on both databases."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

import graftwork.adapters.registry.tables
import graftwork.adapters.uploads.tables
import graftwork.platform.alerts.tables
import graftwork.platform.batches.tables
import graftwork.platform.encryption.tables
import graftwork.platform.exports.tables
import graftwork.platform.gateways.tables
import graftwork.platform.ledger.tables
import graftwork.platform.modes.tables
import graftwork.platform.people.tables
import graftwork.platform.prices.tables
import graftwork.platform.replicas.tables
import graftwork.platform.retention.tables
import graftwork.platform.tenancy.tables
import graftwork.platform.tracing.tables
import graftwork.sessions.store.tables  # noqa: F401
from graftwork.platform.database import Base, Database
from graftwork.platform.ids import TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.quotas.budget import Spent
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.quota_rows import find_quota
from graftwork.platform.tenancy.request_rows import find_key_holders


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A `Database` that nobody has upgraded."""
    if request.param == "sqlite":
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}")
    else:
        database = Database(request.getfixturevalue("postgres_url"))
    yield database
    await database.close()


def differences(connection: Connection) -> list[object]:
    """What Alembic would generate to bring the schema to the models."""
    return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))


async def table_names(database: Database) -> set[str]:
    async with database.read() as session:
        connection = await session.connection()
        return set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))


async def test_head_is_what_the_models_say(empty_database: Database) -> None:
    """After an upgrade from nothing, every table, column, index and constraint is as in the models."""
    await empty_database.upgrade_to_head()

    assert await empty_database.current_revision() == empty_database.head_revision() == "0033_lines_of_keys"
    assert await table_names(empty_database) == {*Base.metadata.tables, "alembic_version"}
    async with empty_database.read() as session:
        connection = await session.connection()
        assert await connection.run_sync(differences) == []


async def test_every_step_can_be_taken_back_and_again(empty_database: Database) -> None:
    """Each revision can be downgraded and upgraded again, and a full downgrade leaves no table."""
    await empty_database.upgrade_to_head()

    for revision in (
        "0032_beginner_indexes",
        "0031_beginners",
        "0030_event_retention_index",
        "0030_event_retention",
        "0029_data_rights",
        "0028_adapter_uploads",
        "0027_usage_sums",
        "0026_people",
        "0025_batches",
        "0024_limits",
        "0023_engine_work",
        "0022_adapter_details",
        "0021_rollouts",
        "0020_alias_history",
        "0019_request_traces",
        "0018_key_rules",
        "0017_trace_switches",
        "0014_generations",
        "0013_replicas",
        "0012_degraded_modes",
        "0011_hidden_items",
        "0010_gateways",
        "0009_erasure",
        "0008_delivered_tokens",
        "0007_session_counts",
        "0006_ends",
        "0005_provenance",
        "0004_responses",
        "0003_sessions",
        "0002_adapters",
        "0001_tenancy",
        "base",
    ):
        await empty_database.downgrade(revision)
        assert await empty_database.current_revision() == (None if revision == "base" else revision)

    assert await table_names(empty_database) == {"alembic_version"}
    await empty_database.upgrade_to_head()
    assert await empty_database.current_revision() == empty_database.head_revision()


async def test_an_upgrade_keeps_the_rows(empty_database: Database) -> None:
    """Rows that older code wrote are unchanged at head, and a second upgrade changes nothing."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0001_tenancy")
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES ('ten_1', 'acme', 'active', 1, 'default', 0)"
            )
        )

    await empty_database.upgrade_to_head()
    await empty_database.upgrade_to_head()

    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT name FROM tenants")) == "acme"


async def test_older_keys_allow_what_they_did(empty_database: Database) -> None:
    """A key of an older version has no list of models or networks, is not replaced, and survives a downgrade."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0017_trace_switches")
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES ('ten_1', 'acme', 'active', 1, 'default', 0)"
            )
        )
        await session.execute(
            text(
                "INSERT INTO api_keys (id, tenant_id, name, public_id, key_hash, scopes, created_at)"
                " VALUES ('key_1', 'ten_1', 'ci', 'abc', :hash, '[\"usage\"]', 0)"
            ),
            {"hash": b"hash"},
        )

    await empty_database.upgrade_to_head()
    async with empty_database.read() as session:
        holders = await find_key_holders(session, ["abc"])
    await empty_database.downgrade("0017_trace_switches")

    key, _ = holders["abc"]
    assert key.scopes == {"usage"}
    assert (key.adapters, key.allowed_ips, key.replaced_by) == (None, None, None)
    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT key_hash FROM api_keys")) == b"hash"


async def test_an_older_version_finds_the_limits_of_a_successor(empty_database: Database) -> None:
    """A downgrade gives each key of a line the limits that it shared, and leaves all other limits as they are."""
    await empty_database.upgrade_to_head()
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES ('ten_1', 'acme', 'active', 1, 'default', 0)"
            )
        )
        for key, first in (
            ("key_1", None),
            ("key_2", "key_1"),
            ("key_3", "key_1"),
            ("key_4", None),
            ("key_5", "key_4"),
        ):
            await session.execute(
                text(
                    "INSERT INTO api_keys (id, tenant_id, name, public_id, key_hash, scopes, created_at, first_key_id)"
                    " VALUES (:key, 'ten_1', 'ci', :key, :hash, '[]', 0, :first)"
                ),
                {"key": key, "first": first, "hash": b"hash"},
            )
        await session.execute(
            text(
                "INSERT INTO owner_quotas (owner_id, level, tenant_id, max_sessions, monthly_budget, currency)"
                " VALUES ('key_1', 'key', 'ten_1', 7, '1.50', 'EUR')"
            )
        )

    await empty_database.downgrade("0032_beginner_indexes")

    async with empty_database.read() as session:
        rows = await session.execute(
            text("SELECT owner_id, level, tenant_id, max_sessions, monthly_budget FROM owner_quotas ORDER BY owner_id")
        )
        assert rows.all() == [(key, "key", "ten_1", 7, "1.50") for key in ("key_1", "key_2", "key_3")]


async def test_older_usage_has_no_price(empty_database: Database) -> None:
    """A usage row that was stored before prices existed keeps its counts, costs nothing, and survives a downgrade."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0014_generations")
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO usage_events (tenant_id, request_id, key_id, model, outcome, prompt_tokens, cached_tokens,"
                " completion_tokens, at, day) VALUES ('ten_1', 'req_1', 'key_1', 'base', 'completed', 7, 3, 2, 0,"
                " '1970-01-01')"
            )
        )

    await empty_database.upgrade_to_head()
    async with empty_database.read() as session:
        columns = "prompt_tokens, cached_tokens, host_tokens, kv_byte_seconds, cost_atoms, price_id"
        row = (await session.execute(text(f"SELECT {columns} FROM usage_events"))).one()
    await empty_database.downgrade("0014_generations")

    assert tuple(row) == (7, 3, 0, 0, 0, None)
    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT prompt_tokens FROM usage_events")) == 7


async def test_what_was_spent_this_month_is_known(empty_database: Database) -> None:
    """After the upgrade, tenants and keys have spent this month what the ledger says, and limits of tenants are kept."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0023_engine_work")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES ('ten_1', 'acme', 'active', 1, 'default', 0)"
            )
        )
        await session.execute(text("INSERT INTO quotas (tenant_id, monthly_tokens) VALUES ('ten_1', 50)"))
        await session.execute(
            text(
                "INSERT INTO price_lists (id, currency, rates, valid_from, created_at)"
                " VALUES ('prc_1', 'USD', '{}', 0, 0)"
            )
        )
        for request, key, day, price, cost in (
            ("req_1", "key_1", today, "prc_1", 9_200_000_000_000_000_001),
            ("req_2", "key_1", today, "prc_1", 9_200_000_000_000_000_001),
            ("req_3", "key_2", today, None, 0),
            ("req_4", "key_2", "2020-01-01", "prc_1", 5),
        ):
            await session.execute(
                text(
                    "INSERT INTO usage_events (tenant_id, request_id, key_id, model, outcome, prompt_tokens, cached_tokens,"
                    " completion_tokens, at, day, price_id, cost_atoms) VALUES ('ten_1', :request, :key, 'base', 'completed',"
                    " 7, 3, 2, 0, :day, :price, :cost)"
                ),
                {"request": request, "key": key, "day": day, "price": price, "cost": cost},
            )

    await empty_database.upgrade_to_head()
    spent = await UsageMeter(empty_database).spent(["ten_1", "key_1", "key_2"], today[:7])
    async with empty_database.read() as session:
        quota = await find_quota(session, TenantId("ten_1"))
    await empty_database.downgrade("0023_engine_work")

    both = {"USD": 18_400_000_000_000_000_002}
    assert spent == {"ten_1": Spent(27, both), "key_1": Spent(18, both), "key_2": Spent(9)}
    assert quota == Quota(monthly_tokens=50)
    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT monthly_tokens FROM quotas")) == 50


async def test_older_sessions_are_sessions(empty_database: Database) -> None:
    """A session that was stored before kinds existed has the kind `session` after an upgrade and a downgrade."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0003_sessions")
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO sessions (id, tenant_id, status, model, settings, labels, epoch, cancel_requested,"
                " last_seq, created_at, updated_at) VALUES ('ses_1', 'ten_1', 'idle', '{}', '{}', '{}', 0, false,"
                " 0, 0, 0)"
            )
        )

    await empty_database.upgrade_to_head()
    async with empty_database.read() as session:
        kind = await session.scalar(text("SELECT kind FROM sessions"))
    await empty_database.downgrade("0003_sessions")

    assert kind == "session"
    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT id FROM sessions")) == "ses_1"


@pytest.mark.parametrize(
    ("status", "retention_s", "closed_at", "ends_at"),
    [
        ("idle", 60.0, None, 110.0),
        ("suspended", 60.0, None, 110.0),
        ("idle", 0.0, None, None),
        ("idle", None, None, None),
        ("running", 60.0, None, None),
        ("closed", 60.0, 40.0, 100.0),
        ("closed", 0.0, 40.0, 40.0),
        ("closed", None, 40.0, None),
        ("expired", 60.0, 40.0, None),
    ],
)
async def test_older_sessions_end_when_they_did(
    empty_database: Database, status: str, retention_s: float | None, closed_at: float | None, ends_at: float | None
) -> None:
    """A session that was stored before ends existed ends when its retention says."""
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0005_provenance")
    row = {"status": status, "retention_s": retention_s, "closed_at": closed_at}
    async with empty_database.write() as session:
        await session.execute(
            text(
                "INSERT INTO sessions (id, tenant_id, kind, status, model, settings, labels, retention_s, epoch,"
                " cancel_requested, last_seq, created_at, updated_at, closed_at) VALUES ('ses_1', 'ten_1', 'session',"
                " :status, '{}', '{}', '{}', :retention_s, 0, false, 0, 0, 50, :closed_at)"
            ),
            row,
        )

    await empty_database.upgrade_to_head()

    async with empty_database.read() as session:
        assert await session.scalar(text("SELECT ends_at FROM sessions")) == ends_at


async def test_an_older_alias_has_a_history(empty_database: Database) -> None:
    """The history of an alias that is older than histories begins with its target, and a downgrade keeps the alias.

    Adapters that were deleted are gone after a downgrade.
    """
    await empty_database.upgrade_to_head()
    await empty_database.downgrade("0017_trace_switches")
    async with empty_database.write() as session:
        for statement in (
            (
                "INSERT INTO tenants (id, name, status, weight, service_tier_ceiling, created_at)"
                " VALUES ('ten_1', 'acme', 'active', 1, 'default', 0)"
            ),
            (
                "INSERT INTO adapters (id, tenant_id, name, next_version, created_at) VALUES ('adp_1', 'ten_1', 'bot', 2, 0),"
                " ('adp_2', 'ten_1', 'gone', 2, 0)"
            ),
            (
                "INSERT INTO adapter_aliases (adapter_id, alias, tenant_id, weights, updated_at)"
                " VALUES ('adp_1', 'prod', 'ten_1', '[[1.0, 1.0]]', 7)"
            ),
        ):
            await session.execute(text(statement))

    await empty_database.upgrade_to_head()
    async with empty_database.write() as session:
        columns = "number, weights, returns_to, reason, actor, at"
        row = (await session.execute(text(f"SELECT {columns} FROM adapter_alias_changes"))).one()
        await session.execute(text("UPDATE adapters SET deleted_at = 1 WHERE id = 'adp_2'"))
    await empty_database.downgrade("0017_trace_switches")

    assert (row[0], *row[2:]) == (1, None, "set", "unknown", 7)
    assert row[1] in ("[[1.0, 1.0]]", [[1.0, 1.0]])  # PostgreSQL's driver reads JSON
    async with empty_database.read() as session:
        assert (await session.execute(text("SELECT alias FROM adapter_aliases"))).scalars().all() == ["prod"]
        assert (await session.execute(text("SELECT id FROM adapters"))).scalars().all() == ["adp_1"]


async def test_gateways_that_start_at_once_upgrade_once(empty_database: Database) -> None:
    """Upgrades that run at the same time wait for each other and all succeed."""
    await asyncio.gather(*(empty_database.upgrade_to_head() for _ in range(4)))

    assert await empty_database.current_revision() == empty_database.head_revision()
