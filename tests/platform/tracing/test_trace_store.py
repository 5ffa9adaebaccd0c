"""Tests of the traces that gateways share through the database, on both databases."""

import asyncio

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.ids import KeyId, TenantId
from graftwork.platform.tracing import repository
from graftwork.platform.tracing import trace_store as module
from graftwork.platform.tracing.request_trace import RequestTrace, Span, Stage
from graftwork.platform.tracing.timeline import timeline_of
from graftwork.platform.tracing.trace_ids import TraceIds
from graftwork.platform.tracing.trace_store import KEPT_S, TraceStore

ACME, GLOBEX = TenantId("ten_acme"), TenantId("ten_globex")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def here(database: Database, clock: ManualClock) -> TraceStore:
    return TraceStore(database, clock, "gateway_here")


@pytest.fixture
def there(database: Database, clock: ManualClock) -> TraceStore:
    """The store of another gateway with the same database."""
    return TraceStore(database, clock, "gateway_there")


def ended(
    clock: ManualClock, request_id: str, tenant_id: TenantId = ACME, *, traced: bool = True, spans: int = 1
) -> RequestTrace:
    """A request that took a second, with spans of an engine."""
    ids = TraceIds(request_id, "0" * 32, f"client-{request_id}")
    trace = RequestTrace(ids, "POST", "/v1/chat/completions", clock)
    trace.tenant_id, trace.key_id, trace.is_traced = tenant_id, KeyId("key_1"), traced
    trace.describe("tiny", None, None, request_id)
    trace.work_id = f"turn-{request_id}"
    trace.mark(Stage.START)
    figures = {"steps": 3.0, "mask_s": 0.25}
    trace.generation("g").add_spans(1, clock.monotonic(), [Span("decode", n, 1.0, figures) for n in range(spans)])
    clock.advance(1.0)
    trace.settle("completed")
    trace.answered(200)
    return trace


async def test_another_gateway_finds_the_same_timeline(here: TraceStore, there: TraceStore, clock: ManualClock) -> None:
    """By each id of the request, another gateway answers what this one would, with the name of this one."""
    trace = ended(clock, "req_1")
    here.offer(trace)
    await here.flush()

    for request_id in ("req_1", "client-req_1", "turn-req_1"):
        for tenant_id in (ACME, None):
            assert await there.find(request_id, tenant_id) == timeline_of(trace, "gateway_here")


async def test_a_tenant_finds_its_own_alone(here: TraceStore, clock: ManualClock) -> None:
    """Another tenant's request is not found by any of its ids, also if both clients chose the same one."""
    for tenant_id, request_id in ((ACME, "req_1"), (GLOBEX, "req_2")):
        trace = ended(clock, request_id, tenant_id)
        trace.ids = TraceIds(request_id, "0" * 32, "order-17")
        here.offer(trace)
    await here.flush()

    assert await here.find("req_1", GLOBEX) is await here.find("turn-req_1", GLOBEX) is None
    for tenant_id, request_id in ((ACME, "req_1"), (GLOBEX, "req_2")):
        found = await here.find("order-17", tenant_id)
        assert found is not None
        assert (found.id, found.tenant_id) == (request_id, tenant_id)


async def test_only_traced_requests_are_stored(here: TraceStore, clock: ManualClock) -> None:
    """Others stay with the gateway that served them."""
    here.offer(ended(clock, "req_1", traced=False))
    await here.flush()

    assert await here.find("req_1") is None


async def test_a_trace_is_found_for_its_time(
    here: TraceStore, there: TraceStore, clock: ManualClock, database: Database
) -> None:
    """After fifteen minutes nobody finds it, and the next sweep of any gateway deletes the row."""
    here.offer(ended(clock, "req_1"))
    await here.flush()
    clock.advance(KEPT_S - 1.0)
    before = await there.find("req_1")
    clock.advance(2.0)
    after = await there.find("req_1")
    await there.flush()
    clock.advance(-10.0)

    assert before is not None
    assert after is None
    assert await there.find("req_1") is None


async def test_the_latest_of_a_tenant_are_kept(
    here: TraceStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy tenant pushes out its own oldest traces, and not those of a quiet one."""
    monkeypatch.setattr(module, "MAX_STORED_OF_TENANT", 3)
    here.offer(ended(clock, "quiet", GLOBEX))
    for number in range(5):
        here.offer(ended(clock, f"req_{number}"))
    await here.flush()

    found = [number for number in range(5) if await here.find(f"req_{number}", ACME) is not None]
    assert found == [2, 3, 4]
    assert await here.find("quiet", GLOBEX) is not None


async def test_all_together_are_bounded(here: TraceStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep keeps the latest of all tenants."""
    monkeypatch.setattr(module, "MAX_STORED", 2)
    for number in range(4):
        here.offer(ended(clock, f"req_{number}", TenantId(f"ten_{number}")))
    await here.flush()

    assert [number for number in range(4) if await here.find(f"req_{number}") is not None] == [2, 3]


async def test_a_very_long_timeline_loses_its_spans(
    here: TraceStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages and tokens of a request with too many spans are stored without them, and it says so."""
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    here.offer(ended(clock, "req_1", spans=500))
    await here.flush()

    found = await here.find("req_1")
    assert found is not None
    assert (found.traced, found.generations[0].engines, len(found.stages)) == (False, (), 2)


async def test_what_cannot_be_stored_waits(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write loses nothing: the next one stores it. Beyond the bound the oldest go."""
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    store = TraceStore(database, clock, "gateway_here")
    for number in range(3):
        store.offer(ended(clock, f"req_{number}"))
    with monkeypatch.context() as patched:
        patched.setattr(repository, "add_traces", None)
        with pytest.raises(TypeError):
            await store.flush()
    await store.flush()

    assert [number for number in range(3) if await store.find(f"req_{number}") is not None] == [1, 2]


async def test_two_flushes_at_once_store_each_trace_once(here: TraceStore, clock: ManualClock) -> None:
    """The last one of a gateway that ends may come while another still writes. No trace is lost, and none is stored twice."""
    for number in range(5):
        here.offer(ended(clock, f"req_{number}"))
    await asyncio.gather(here.flush(), here.flush(), here.flush())

    assert [await here.find(f"req_{number}") is not None for number in range(5)] == [True] * 5


async def test_traces_whose_writer_does_not_know_that_they_are_stored_are_offered_again(
    database: Database, clock: ManualClock
) -> None:
    """A connection that is cut at the commit leaves rows that wait still. The next write of them keeps no other trace out."""
    known, unknown = ended(clock, "req_0"), ended(clock, "req_1")
    for traces in ([known], [known, unknown]):
        store = TraceStore(database, clock, "gateway_here")
        for trace in traces:
            store.offer(trace)
        await store.flush()

    assert await store.find("req_0") == timeline_of(known, "gateway_here")
    assert await store.find("req_1") == timeline_of(unknown, "gateway_here")


async def test_nothing_of_a_deleted_tenant_is_stored(here: TraceStore, clock: ManualClock) -> None:
    """Neither what is stored nor what waits survives; other tenants keep theirs."""
    for request_id, tenant_id in (("req_1", ACME), ("req_2", GLOBEX)):
        here.offer(ended(clock, request_id, tenant_id))
    await here.flush()
    here.offer(ended(clock, "req_3"))
    await here.forget(ACME)
    await here.flush()

    assert [await here.find(one) is not None for one in ("req_1", "req_2", "req_3")] == [False, True, False]
