"""Tests of the usage journal: what a killed process has counted is found by the next one, once."""

import fcntl
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import UsageJournal
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageEvent, UsageKey, UsageOutcome
from graftwork.platform.prices.price_list import PriceBook, PriceList
from graftwork.platform.prices.rates import Rates, from_atoms
from graftwork.platform.prices.repository import add_price_list
from tests.platform.ledger.test_metering import EVENT

OLD_FIELDS = ("request_id", "tenant_id", "key_id", "model", "adapter", "session_id", "at", "outcome")
STARTED = replace(EVENT, prompt_tokens=0, cached_tokens=0, completion_tokens=0, outcome=UsageOutcome.INTERRUPTED)

KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from graftwork.platform.ledger.journal import UsageJournal
from tests.platform.ledger.test_usage_journal import STARTED

journal = UsageJournal(Path(sys.argv[1]))
entries = [journal.begin(replace(STARTED, request_id=f"req_{number}", model="modèle \\x00" * 40)) for number in range(600)]
for number, entry in enumerate(entries):
    if number != 7:
        entry.admit(100, 64)
    for token in range(number % 5):
        entry.add(1)
for entry in entries[10:590]:
    entry.end()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed(program: str, folder: Path) -> None:
    """Runs a program that kills itself."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr


def recovered(folder: Path) -> list[UsageEvent]:
    return [event for events in UsageJournal(folder).recover() for event in events]


def test_a_killed_process_has_billed_what_it_counted(tmp_path: Path) -> None:
    """Requests that ran when the process died are found with their tokens, if the engine had admitted them."""
    run_killed(KILLED, tmp_path)

    found = {event.request_id: event for event in recovered(tmp_path)}

    running = [*range(7), 8, 9, *range(590, 600)]
    assert found == {
        f"req_{number}": replace(
            STARTED,
            request_id=RequestId(f"req_{number}"),
            model="modèle \x00" * 40,
            prompt_tokens=100,
            cached_tokens=64,
            completion_tokens=number % 5,
        )
        for number in running
    }
    assert not recovered(tmp_path), "the files of the dead process are gone"


def test_a_living_process_keeps_its_files(tmp_path: Path) -> None:
    """Another process takes nothing from a journal that is open, and what is closed without records is deleted."""
    journal = UsageJournal(tmp_path)
    entry = journal.begin(STARTED)
    entry.admit(3, 0)

    assert not recovered(tmp_path)
    entry.end()
    journal.close()

    assert not list(tmp_path.iterdir())


def test_a_file_is_another_process_s_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that recovers while another one makes its file does not take the file for a dead process's."""
    lock = fcntl.flock

    def recover_first(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert not recovered(tmp_path)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", recover_first)
    UsageJournal(tmp_path).begin(STARTED)

    assert len(list(tmp_path.glob("*.journal"))) == 1


def test_two_processes_that_recover_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process has recovered since the folder was listed is passed over."""
    run_killed(KILLED, tmp_path)
    open_file = os.open

    def recover_first(path: Path, flags: int) -> int:
        monkeypatch.setattr(os, "open", open_file)
        assert recovered(tmp_path)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", recover_first)

    assert not recovered(tmp_path)


def test_a_slot_is_used_again_without_its_past(tmp_path: Path) -> None:
    """A request in a slot that another one has left begins with no tokens."""
    journal = UsageJournal(tmp_path)
    for number in range(1000):
        entry = journal.begin(replace(STARTED, request_id=RequestId(f"req_{number}")))
        entry.admit(5, 0)
        entry.add(9)
        if number < 999:
            entry.end()
    journal.close()

    (left,) = recovered(tmp_path)

    assert (left.request_id, left.prompt_tokens, left.completion_tokens) == ("req_999", 5, 9)


def test_a_damaged_record_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record that cannot be read is logged and its file kept aside; the others are found."""
    journal = UsageJournal(tmp_path)
    for number in range(3):
        journal.begin(replace(STARTED, request_id=RequestId(f"req_{number}"))).admit(1, 0)
    journal.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"req_1"', b'\xff"eq_1"'))

    assert {event.request_id for event in recovered(tmp_path)} == {"req_0", "req_2"}
    assert "usage_journal_unreadable" in caplog.text
    assert [left.suffix for left in tmp_path.iterdir()] == [".unreadable"]
    assert not recovered(tmp_path)


def test_no_room_on_the_disk_refuses_the_request(tmp_path: Path) -> None:
    """Where a file cannot get its space, the request is refused with what to do, and no file is left."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
{KILLED.replace("os.kill", "raise SystemExit#")}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
    )

    assert "graftwork.platform.errors.Unavailable: The usage of requests cannot be recorded" in done.stderr
    assert not list(tmp_path.iterdir())


class AwayMeter(UsageMeter):
    """A ledger whose database is away until `is_away` is unset."""

    is_away = True

    async def record_all(self, events: Sequence[UsageEvent]) -> set[UsageKey]:
        if self.is_away:
            raise Unavailable("away")
        return await super().record_all(events)


def test_counts_of_memory_and_tiers_survive(tmp_path: Path) -> None:
    """Tokens by tier, KV and adapters that were counted before the process died are in the record that is found."""
    journal = UsageJournal(tmp_path)
    entry = journal.begin(STARTED)
    entry.admit(100, 64, host_tokens=16, disk_tokens=8)
    entry.add_adapters(5000)
    for _ in range(3):
        entry.add(1, 2**40, 700)
    journal.close()

    (found,) = recovered(tmp_path)

    assert found == replace(
        STARTED,
        prompt_tokens=100,
        cached_tokens=64,
        completion_tokens=3,
        host_tokens=16,
        disk_tokens=8,
        kv_byte_seconds=3 * 2**40,
        adapter_bytes=5000,
        engine_us=2100,
    )


@pytest.mark.parametrize(("form", "num_counts"), [(0, 3), (1 << 32, 7)])
def test_a_journal_of_an_older_version_is_read(tmp_path: Path, form: int, num_counts: int) -> None:
    """Records in the forms that versions before prices, and before the engine's time, wrote have the counts of then."""
    old = {name: getattr(STARTED, name) for name in OLD_FIELDS}
    text = json.dumps(old).encode()
    counts = (100, 64, 7, 16, 8, 3 * 2**40, 5000)[:num_counts]
    content = struct.pack(f"{1 + num_counts}q", len(text) | form, *counts) + text
    (tmp_path / "usage_old.journal").write_bytes(content.ljust(8192, b"\0"))

    (found,) = recovered(tmp_path)

    names = [
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "host_tokens",
        "disk_tokens",
        "kv_byte_seconds",
        "adapter_bytes",
    ]
    assert tuple(getattr(found, name) for name in names) == counts + (0,) * (7 - num_counts)
    assert (found.request_id, found.engine_us) == (STARTED.request_id, 0)


async def test_a_dead_process_s_requests_have_the_price_that_they_began_with(
    sqlite_database: Database, tmp_path: Path
) -> None:
    """The record names its price list, and the process that finds it computes the cost of what was counted."""
    prices = PriceList("prc_1", None, None, "USD", Rates.read({"input": "1", "output": "3"}), 0.0, 0.0)
    journal = UsageJournal(tmp_path)
    entry = journal.begin(STARTED.priced(prices))
    entry.admit(100, 0)
    entry.add(10)
    journal.close()
    async with sqlite_database.write() as session:
        await add_price_list(session, prices)

    meter = UsageMeter(sqlite_database)
    await UsageBacklog(meter, UsageJournal(tmp_path), PriceBook([prices])).recover()

    (summary,) = await meter.summarise(EVENT.tenant_id, 0, math.inf)
    assert from_atoms(summary.costs["USD"].atoms) == Decimal("0.000130")


async def test_rows_that_wait_outlive_their_process(sqlite_database: Database, tmp_path: Path) -> None:
    """A row that could not be stored is stored by the next process, with the outcome that it had."""
    journal = UsageJournal(tmp_path)
    entry = journal.begin(STARTED)
    entry.admit(100, 64)
    backlog = UsageBacklog(AwayMeter(sqlite_database), journal)
    backlog.record(EVENT, lambda: None, entry)
    backlog.record(replace(EVENT, request_id=RequestId("req_turn")), lambda: None)
    await backlog.flush()
    journal.close()  # as its process ends

    meter = UsageMeter(sqlite_database)
    restarted = UsageBacklog(meter, UsageJournal(tmp_path))
    found = [await restarted.recover(), await restarted.recover()]

    (summary,) = await meter.summarise(EVENT.tenant_id, 0, math.inf)
    assert found == [2, 0]
    assert (summary.requests, summary.prompt_tokens, summary.completion_tokens) == (2, 200, 20)


async def test_what_is_recovered_while_the_database_is_away_is_not_lost(
    sqlite_database: Database, tmp_path: Path
) -> None:
    """A process that recovers rows, cannot store them and dies leaves them to the one after it."""
    run_killed(KILLED, tmp_path)
    away = UsageBacklog(AwayMeter(sqlite_database), UsageJournal(tmp_path))
    await away.recover()
    away.journal.close()

    meter = UsageMeter(sqlite_database)
    await UsageBacklog(meter, UsageJournal(tmp_path)).recover()

    (summary,) = await meter.summarise(EVENT.tenant_id, 0, math.inf)
    assert (summary.requests, summary.prompt_tokens) == (19, 1900)
