"""Tests of a request's usage in the usage rows, the quota and the metrics."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.errors import LimitExceeded, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.platform.quotas.in_flight import InFlightBound
from graftwork.platform.telemetry import Telemetry
from graftwork.sessions.generation.generator import PromptAdmitted, TextDelta
from graftwork.sessions.generation.usage import Accounting, Charge, Expected, RequestAccount, Usage
from tests.platform.spending import billed_tokens
from tests.platform.throwaway_journal import throwaway_journal
from tests.sessions.generation.test_generator import END, one_by_one, request, spelled
from tests.sessions.scripted_engine import ScriptedEngine, generator_on
from tests.sessions.session_process import CountingQuotas, UnreliableDatabase, principal

USED = Usage(CacheReport(device_tokens=40, host_tokens=30, disk_tokens=20, recomputed_tokens=10), 7, DraftReport())


class CountedAccounting:
    """Accounting over a database, with quotas that count reservations."""

    def __init__(self, database: Database) -> None:
        self.telemetry = Telemetry()
        self.quotas = CountingQuotas()
        self.ledger = UsageMeter(database)
        self.backlog = UsageBacklog(self.ledger, throwaway_journal())
        clock = ManualClock()
        in_flight = InFlightBound(clock, None, max_tenant=2)
        self.accounting = Accounting(self.quotas.limits_of, self.quotas, self.backlog, self.telemetry, clock, in_flight)

    async def open(self) -> RequestAccount:
        me = principal()
        charge = Charge(RequestId("req_1"), me, ResolvedModel("tiny", None))
        return await self.accounting.open(charge, await self.quotas.limits_of(me), Expected(100))

    def metrics(self) -> list[str]:
        return self.telemetry.render()[0].decode().splitlines()


@pytest.fixture
def counted(sqlite_database: Database) -> CountedAccounting:
    return CountedAccounting(sqlite_database)


async def test_prompt_tokens_are_counted_by_the_tier_they_came_from(counted: CountedAccounting) -> None:
    """Cached tokens count for the device, the host or the disk, whichever the engine reports."""
    account = await counted.open()

    await account.close(USED, UsageOutcome.COMPLETED)
    await counted.backlog.flush()

    for tier, count in {"device": 40.0, "host": 30.0, "disk": 20.0, "recomputed": 10.0}.items():
        assert f'graftwork_prompt_tokens_total{{tenant="ten_1",tier="{tier}"}} {count}' in counted.metrics()
    assert 'graftwork_generated_tokens_total{tenant="ten_1"} 7.0' in counted.metrics()


async def test_a_request_is_recorded_and_counted_once(counted: CountedAccounting) -> None:
    """A second record of the same request adds no usage row and no metric."""
    account = await counted.open()

    account.record(USED, UsageOutcome.FAILED)
    account.record(USED, UsageOutcome.FAILED)
    await account.settle(USED, UsageOutcome.FAILED)
    await counted.backlog.flush()
    account.record(USED, UsageOutcome.FAILED)
    await counted.backlog.flush()

    assert await billed_tokens(counted.ledger, principal().tenant_id) == 107
    assert 'graftwork_requests_total{outcome="failed",tenant="ten_1"} 1.0' in counted.metrics()
    assert counted.quotas.reservations[0].settled == 107


async def test_a_request_that_was_never_admitted_is_refunded(counted: CountedAccounting) -> None:
    """Without an admitted prompt there is no usage row; the quota gets its reservation back."""
    account = await counted.open()

    await account.close(None, UsageOutcome.CANCELLED)

    assert await billed_tokens(counted.ledger, principal().tenant_id) == 0
    assert counted.quotas.reservations[0].is_refunded
    assert 'graftwork_requests_total{outcome="cancelled",tenant="ten_1"} 1.0' in counted.metrics()


async def test_a_refused_reservation_is_counted(counted: CountedAccounting) -> None:
    """A request over the quota counts as refused."""
    counted.quotas.is_shut = True

    with pytest.raises(LimitExceeded):
        await counted.open()

    assert 'graftwork_requests_total{outcome="refused",tenant="ten_1"} 1.0' in counted.metrics()


async def test_a_generation_observes_its_times() -> None:
    """Each token of an answer after the first is one inter-token time; queue, first token and end are observed once."""
    telemetry = Telemetry()
    generator = generator_on(ScriptedEngine(one_by_one("The weather")), telemetry=telemetry)

    async for _ in generator.start(request()).events():
        pass

    text = telemetry.render()[0].decode()
    assert f"graftwork_inter_token_seconds_count {float(len(spelled('The weather')))}" in text
    for name in ("queue", "time_to_first_token", "e2e"):
        assert f"graftwork_{name}_seconds_count 1.0" in text


async def test_usage_of_a_generation_that_is_left_is_what_the_engine_made() -> None:
    """Tokens count when the engine sends them, even if the reader leaves before it takes their text."""
    generation = generator_on(ScriptedEngine([spelled("The weather"), (END,)])).start(request())
    before = generation.usage

    events = generation.events()
    assert isinstance(await anext(events), PromptAdmitted)
    assert isinstance(await anext(events), TextDelta)
    await events.aclose()

    assert before is None
    assert generation.usage is not None
    assert generation.usage.completion_tokens == len(spelled("The weather"))
    assert generation.prompt_computed.is_set()


async def test_tokens_after_a_stop_string_are_not_used() -> None:
    """Usage ends with the stop string, although the engine's last step made more tokens."""
    text = "The weather"
    generation = generator_on(ScriptedEngine([spelled(text)])).start(request(stop=("The",)))

    async for _ in generation.events():
        pass

    assert generation.usage is not None
    assert generation.usage.completion_tokens < len(spelled(text))


@pytest.fixture
async def unreliable(sqlite_database: Database, tmp_path: Path) -> AsyncIterator[UnreliableDatabase]:
    database = UnreliableDatabase(f"sqlite+aiosqlite:///{tmp_path / 'graftwork.db'}")
    yield database
    await database.close()


async def test_usage_waits_for_the_database(unreliable: UnreliableDatabase) -> None:
    """A usage row that cannot be stored is stored and counted later, once, and the quota is settled at once."""
    counted = CountedAccounting(unreliable)
    account = await counted.open()
    unreliable.refusals = 2

    await account.close(USED, UsageOutcome.COMPLETED)
    settled = counted.quotas.reservations[0].settled
    still_waiting = [await counted.backlog.flush() for _ in range(4)]

    assert settled == 107
    assert still_waiting == [1, 1, 0, 0]
    assert await billed_tokens(counted.ledger, principal().tenant_id) == 107
    assert 'graftwork_requests_total{outcome="completed",tenant="ten_1"} 1.0' in counted.metrics()


async def test_no_work_starts_while_usage_cannot_be_stored(unreliable: UnreliableDatabase) -> None:
    """A request is refused before its work as long as a usage row waits, and takes nothing from the quota."""
    counted = CountedAccounting(unreliable)
    first = await counted.open()
    unreliable.refusals = 1
    await first.close(USED, UsageOutcome.COMPLETED)
    await counted.backlog.flush()

    with pytest.raises(Unavailable):
        await counted.open()
    num_reserved = len(counted.quotas.reservations)
    await counted.backlog.flush()
    await counted.open()

    assert num_reserved == 1
