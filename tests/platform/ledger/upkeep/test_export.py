"""Tests of the export of single requests, on both databases."""

import csv
import io
import json
import sys
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from pyarrow import parquet

from graftwork.platform.database import Database
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId, SessionId, TenantId
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.upkeep import export
from graftwork.platform.ledger.upkeep.export import export_usage
from graftwork.platform.ledger.upkeep.export_files import ExportForm
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.prices import repository as prices
from graftwork.platform.prices.rates import from_atoms
from tests.platform.ledger.upkeep.test_rollups import EVENT, LIST, START

SPAN = (START, START + 100.0)


def events() -> list[UsageEvent]:
    """Requests of three tenants, several at the same time, with and without a price, in and outside the span."""
    found = []
    for number in range(23):
        event = replace(
            EVENT,
            request_id=RequestId(f"req_{number:02d}"),
            tenant_id=TenantId(f"ten_{number % 3}"),
            adapter=None if number % 4 == 0 else 'agent "ü", 7@3',
            session_id=None if number % 2 else SessionId("ses_1"),
            at=START + number // 4 * 20.0,
        )
        found.append(event.priced(LIST) if number % 3 else event)
    return found


async def filled(database: Database) -> list[dict[str, Any]]:
    """Records the requests, and returns what an export must have of those in the span, in its order."""
    async with database.write() as session:
        await prices.add_price_list(session, LIST)
    for event in events():
        await UsageMeter(database).record(event)
    inside = [event for event in events() if SPAN[0] <= event.at < SPAN[1]]
    inside.sort(key=lambda event: (event.tenant_id, event.at, event.request_id))
    return [
        {
            "tenant_id": event.tenant_id,
            "request_id": event.request_id,
            "adapter": event.adapter,
            "session_id": event.session_id,
            "kv_byte_seconds": event.kv_byte_seconds,
            "at": event.at,
            "day": event.day,
            "cost": None if event.price_id is None else from_atoms(event.cost.atoms),
            "currency": event.currency,
        }
        for event in inside
    ]


def read(form: ExportForm, content: bytes) -> list[dict[str, Any]]:
    """Reads an export with a reader that is not ours."""
    if form is ExportForm.PARQUET:
        rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(content)).to_pylist()
        return rows
    if form is ExportForm.JSON:
        return [json.loads(line) for line in content.decode().splitlines()]
    return [
        {name: value or None for name, value in row.items()} for row in csv.DictReader(io.StringIO(content.decode()))
    ]


def same_types(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The fields with these names, with the types that CSV and JSON cannot have."""
    read_as = {"kv_byte_seconds": int, "at": float, "cost": Decimal}
    return [
        {name: row[name] if row[name] is None or name not in read_as else read_as[name](row[name]) for name in names}
        for row in rows
    ]


@pytest.mark.parametrize("form", ExportForm)
async def test_an_export_has_each_request_of_the_time_once(
    database: Database, form: ExportForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the form, an export in pages of three has exactly the recorded requests, with exact costs, in order."""
    expected = await filled(database)
    monkeypatch.setattr(export, "PAGE", 3)
    file, states = io.BytesIO(), list[str]()

    total = await export_usage(database, file, form, SPAN, on_rows=states.append)

    found = read(form, file.getvalue())
    assert same_types(found, list(expected[0])) == expected
    assert total == len(expected)
    assert states[:2] == ["3 requests", "6 requests"]


async def test_an_export_of_one_tenant_has_no_other(database: Database) -> None:
    """With a tenant, the export has this tenant's requests alone."""
    expected = await filled(database)
    file = io.BytesIO()

    await export_usage(database, file, ExportForm.JSON, SPAN, TenantId("ten_1"))

    found = read(ExportForm.JSON, file.getvalue())
    assert [row["request_id"] for row in found] == [
        row["request_id"] for row in expected if row["tenant_id"] == "ten_1"
    ]


async def test_parquet_without_its_package_says_what_to_install(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyarrow, the error names the package and the other forms."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(InvalidRequest, match=r"pip install 'graftwork\[parquet\]', or choose csv or json"):
        await export_usage(database, io.BytesIO(), ExportForm.PARQUET, SPAN)
