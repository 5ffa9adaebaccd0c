"""Tests of the snapshots of a server: what they show, to whom, and how they are shared."""

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest

from graftwork.api.overview import board as module
from graftwork.api.overview.views import KnownQueries, View
from graftwork.api.routes import overview as routes
from graftwork.engine.core.stats import EngineStats
from graftwork.platform.errors import CapacityContended
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.api.in_process_gateway import Gateway, TestTenant, chat


async def overview(gateway: Gateway, query: str = "") -> dict[str, Any]:
    """The operator's next snapshot."""
    gateway.clock.advance(6.0)
    answer = await gateway.admin.get(f"/v1/admin/overview{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def row_of(body: dict[str, Any], tenant: TestTenant) -> dict[str, Any]:
    return next(row for row in body["tenants"] if row["id"] == tenant.id)


async def test_engines_show_what_they_report(gateway: Gateway) -> None:
    """The only engine has its figures by tier; rates come with the second report."""
    first = (await overview(gateway))["engines"]
    second = (await overview(gateway))["engines"]

    assert [engine["id"] for engine in first] == ["engine-0"]
    assert first[0]["status"] == "ready"
    assert (first[0]["running"], first[0]["waiting"], first[0]["generated_tokens_per_s"]) == (1, 2, None)
    assert first[0]["pages"] == {
        "device": {"used": 6, "free": 5},
        "host": {"used": 6, "free": 0},
        "disk": {"used": 9, "free": None},
    }
    assert second[0]["generated_tokens_per_s"] == 0.0


async def test_a_tenant_that_generates_is_first(gateway: Gateway, tenant: TestTenant) -> None:
    """Tenants without activity come after those with some; shares and weights are those of tenants that were served."""
    idle = await gateway.tenant("Idle")
    await tenant.client.post("/v1/chat/completions", json=chat())

    body = await overview(gateway)

    assert [row["id"] for row in body["tenants"]] == [tenant.id, idle.id]
    row = row_of(body, tenant)
    assert (row["name"], row["fair_share"], row["service_share"]) == ("Acme", 1.0, 1.0)
    assert row["service_tiers"] == {"default": 1}
    assert row["prompt_tokens_by_tier"]["recomputed"] > 0
    assert row["ttft_ms"]["p50"] is not None
    assert row_of(body, idle)["ttft_ms"] == {"p50": None, "p99": None}
    assert body["totals"]["tenants"] == 2


async def test_running_requests_of_tenants_adapters_and_sessions(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn that runs shows at its tenant, its adapter and its session, and none of them when it has ended."""
    await tenant.push_adapter()
    session = (await tenant.client.post("/v1/sessions", json={"model": "pirate"})).json()
    gateway.engine.holds_after = 2
    turn = asyncio.create_task(tenant.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Ahoy"}))
    await gateway.engine.held.wait()

    during = await overview(gateway)
    gateway.engine.release.set()
    await turn
    after = await overview(gateway)

    shown = [(row_of(body, tenant), body["adapters"][0], body["sessions"][0]) for body in (during, after)]
    assert [(row["running"], adapter["running"]) for row, adapter, _ in shown] == [(1, 1), (0, 0)]
    assert [one["status"] for _, _, one in shown] == ["running", "idle"]
    assert (during["adapters"][0]["name"], during["adapters"][0]["version"]) == ("pirate", 1)
    assert (during["sessions"][0]["id"], during["sessions"][0]["model"]) == (session["id"], "pirate@1")


async def test_refusals_are_counted_by_reason(gateway: Gateway, tenant: TestTenant) -> None:
    """The gateway's own refusals and the engine's are in one list, by their codes."""
    await gateway.resources.account.tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(requests_per_minute=1))
    gateway.engine.refusal = CapacityContended("The queue is full.", code="queue_full")
    first = await tenant.client.post("/v1/chat/completions", json=chat())
    await gateway.resources.account.tenancy.limits.set(LimitOwner.tenant(tenant.id), Quota(requests_per_minute=0))
    gateway.clock.advance(2.0)
    second = await tenant.client.post("/v1/chat/completions", json=chat())

    codes = [answer.json()["error"]["code"] for answer in (first, second)]
    assert row_of(await overview(gateway), tenant)["refusals"] == dict.fromkeys(codes, 1)
    assert len(set(codes)) == 2


async def test_an_unchanged_snapshot_is_a_304(gateway: Gateway, tenant: TestTenant) -> None:
    """With the ETag of a snapshot a watcher gets no body until something has changed."""
    await overview(gateway)
    await overview(gateway)  # engines have rates now
    first = await gateway.admin.get("/v1/admin/overview")
    gateway.clock.advance(60.0)
    unchanged = await gateway.admin.get("/v1/admin/overview", headers={"if-none-match": first.headers["etag"]})
    await tenant.client.post("/v1/chat/completions", json=chat())
    gateway.clock.advance(2.0)
    changed = await gateway.admin.get("/v1/admin/overview", headers={"if-none-match": first.headers["etag"]})

    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert changed.status_code == 200
    assert changed.json()["sequence"] > first.json()["sequence"]


async def test_watchers_share_one_compressed_answer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred polls of one second encode and compress one snapshot once; without gzip a client gets the same JSON, and
    each form has an ETag of its own, of which either is good for a 304.
    """
    compressed, compress = list[bytes](), gzip.compress

    def counted(data: bytes, *args: Any, **more: Any) -> bytes:
        compressed.append(data)
        return compress(data, *args, **more)

    monkeypatch.setattr(gzip, "compress", counted)
    path = "/v1/admin/overview?rows=7"

    answers = await asyncio.gather(*(gateway.admin.get(path) for _ in range(100)))
    plain = await gateway.admin.get(path, headers={"accept-encoding": "identity"})

    assert compressed == [plain.content]
    assert {answer.headers["content-encoding"] for answer in answers} == {"gzip"}
    assert "content-encoding" not in plain.headers
    assert {answer.text for answer in answers} == {plain.text}
    tags = {plain.headers["etag"], answers[0].headers["etag"]}
    assert len(tags) == 2
    for tag in (*tags, f'"other", {plain.headers["etag"]}'):
        assert (await gateway.admin.get(path, headers={"if-none-match": tag})).status_code == 304
    assert (await gateway.admin.get(path, headers={"if-none-match": '"other"'})).status_code == 200


async def test_a_known_query_is_not_read_again(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second poll with the same bytes makes no view; another query, a wrong one and a stream are read as before."""
    read = list[View]()

    def counted(*args: Any) -> View:
        read.append(View(*args))
        return read[-1]

    monkeypatch.setattr(routes, "View", counted)

    for _ in range(3):
        assert len((await gateway.admin.get("/v1/admin/overview?sort=name&rows=3")).json()["engines"]) == 1
    first = len(read)
    await gateway.admin.get("/v1/admin/overview?rows=3&sort=name")
    for _ in range(2):
        assert (await gateway.admin.get("/v1/admin/overview?rows=0")).status_code == 422
    gateway.resources.overview.end_streams()
    for _ in range(2):
        stream = await gateway.admin.get("/v1/admin/overview?stream=true")
        assert stream.headers["content-type"].startswith("text/event-stream")

    assert (first, len(read)) == (1, 4)


async def test_a_known_query_opens_no_door(gateway: Gateway, tenant: TestTenant) -> None:
    """After the operator and a tenant have polled, the same bytes of another tenant show that tenant alone, and keys
    without the scope or without a right are refused as before.
    """
    other = await gateway.tenant("Globex")
    bare = (await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/keys", json={"name": "k", "scopes": []})).json()
    for path in ("/v1/admin/overview?rows=9", "/v1/overview?rows=9"):
        for client in (gateway.admin, tenant.client):
            await client.get(path)

    seen = (await other.client.get("/v1/overview?rows=9")).json()
    refused = [
        await tenant.client.get("/v1/admin/overview?rows=9"),
        await tenant.client.get("/v1/overview?rows=9", headers={"authorization": f"Bearer {bare['key']}"}),
        await gateway.admin.get("/v1/overview?rows=9"),
        await gateway.admin.get("/v1/admin/overview?rows=9", headers={"authorization": "Bearer gwa_wrong"}),
    ]

    assert [row["id"] for row in seen["tenants"]] == [other.id]
    assert [answer.status_code for answer in refused] == [403, 403, 403, 401]


def test_few_queries_are_known() -> None:
    """A client that sends another query each time costs bounded memory: the oldest are forgotten, long ones not kept."""
    known = KnownQueries()
    for number in range(5000):
        known.add(None, b"find=%d" % number, View(find=str(number)))
    known.add(None, b"find=" + b"x" * 1000, View())

    found = [number for number in range(5000) if known.get(None, b"find=%d" % number) is not None]
    assert found == [*range(5000 - 1024, 5000)]
    assert known.get(None, b"find=" + b"x" * 1000) is None


async def test_polls_are_not_in_the_log(gateway: Gateway, tenant: TestTenant, caplog: pytest.LogCaptureFixture) -> None:
    """A poll that succeeds has no line at the level info; one that is refused has."""
    caplog.set_level(logging.INFO, logger="graftwork")
    await gateway.admin.get("/v1/admin/overview")
    await tenant.client.get("/v1/overview")
    await tenant.client.get("/v1/admin/overview")

    lines = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert [(line["path"], line["status"]) for line in lines] == [("/v1/admin/overview", 403)]


async def test_watchers_share_one_question_to_the_engine(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred watchers of one second cost each engine one report, whatever they look at."""
    asked, stats = [], gateway.engine.stats

    async def counted() -> EngineStats:
        asked.append(1)
        return await stats()

    monkeypatch.setattr(gateway.engine, "stats", counted)
    sorts = ("activity", "name", "ttft", "burn")

    await asyncio.gather(*(gateway.admin.get(f"/v1/admin/overview?sort={sorts[one % 4]}") for one in range(100)))

    assert len(asked) == 1


async def test_pages_of_tenants_do_not_overlap(gateway: Gateway) -> None:
    """Pages by `tenants` and `rows` show each tenant once, in the order of the sort; `find` keeps the matching ones."""
    for number in range(7):
        await gateway.tenant(f"Tenant {number}")

    pages = [await overview(gateway, f"?sort=name&rows=3&tenants={skipped}") for skipped in (0, 3, 6)]
    found = await overview(gateway, "?find=tenant+5")

    names = [row["name"] for page in pages for row in page["tenants"]]
    assert names == [f"Tenant {number}" for number in range(7)]
    assert {page["totals"]["tenants"] for page in pages} == {7}
    assert [row["name"] for row in found["tenants"]] == ["Tenant 5"]


async def test_a_tenant_sees_itself_alone(gateway: Gateway, tenant: TestTenant) -> None:
    """A tenant's snapshot has its own rows, no engines, and nothing that tells how much others do."""
    other = await gateway.tenant("Other")
    for one in (tenant, other):
        await one.push_adapter()
        session = (await one.client.post("/v1/sessions", json={"model": "pirate"})).json()
        await one.client.post(f"/v1/sessions/{session['id']}/turns", json={"input": "Ahoy"})
    gateway.clock.advance(6.0)

    text = (await tenant.client.get("/v1/overview")).text
    body = (await tenant.client.get("/v1/overview")).json()

    assert [row["id"] for row in body["tenants"]] == [tenant.id]
    assert (body["engines"], body["tenants"][0]["service_share"], body["tenants"][0]["fair_share"]) == ([], None, None)
    assert {row["tenant_id"] for row in (*body["adapters"], *body["sessions"])} == {tenant.id}
    assert (body["totals"]["tenants"], body["totals"]["adapters"], body["totals"]["sessions"]) == (1, 1, 1)
    assert other.id not in text
    assert "Other" not in text


async def test_the_operators_snapshot_is_the_operators(tenant: TestTenant) -> None:
    """A tenant's key gets a 403 from the operator's route."""
    assert (await tenant.client.get("/v1/admin/overview")).status_code == 403


@pytest.mark.parametrize("query", ["rows=0", "rows=201", "tenants=-1", "sort=size"])
async def test_wrong_parameters_are_refused(query: str, gateway: Gateway) -> None:
    """A page of no rows or too many, a negative place and an unknown order get a 422."""
    assert (await gateway.admin.get(f"/v1/admin/overview?{query}")).status_code == 422


async def test_a_deleted_tenant_is_in_no_snapshot(gateway: Gateway, tenant: TestTenant) -> None:
    """Its rows are gone with the next snapshot, although it was active just before."""
    await tenant.client.post("/v1/chat/completions", json=chat())
    assert row_of(await overview(gateway), tenant)

    await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")

    assert (await overview(gateway))["tenants"] == []


async def test_a_stream_has_each_new_snapshot(
    gateway: Gateway, tenant: TestTenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who follow get a snapshot at once and one after each change; the end of the server ends the stream."""
    monkeypatch.setattr(module, "TICK_S", 0.0)
    board, view = gateway.resources.overview, View()
    events: asyncio.Queue[bytes] = asyncio.Queue()
    following = asyncio.create_task(board.follow(view, events.put))

    first = _data(await events.get())
    await tenant.client.post("/v1/chat/completions", json=chat())
    gateway.clock.advance(6.0)
    second = _data(await events.get())
    board.end_streams()
    await following

    assert (first["tenants"][0]["active_at"], second["tenants"][0]["id"]) == (None, tenant.id)
    assert second["tenants"][0]["active_at"] is not None


async def test_both_routes_stream(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream of the operator has all tenants, and one of a tenant has itself, as server-sent events."""
    await gateway.tenant("Other")
    gateway.resources.overview.end_streams()  # so that a stream ends after its first look

    for client, path in ((gateway.admin, "/v1/admin/overview"), (tenant.client, "/v1/overview")):
        answer = await client.get(f"{path}?stream=true")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_a_stream_ends_with_the_access_of_its_key(
    gateway: Gateway, tenant: TestTenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that is suspended while it follows gets a last event that says so."""
    following = asyncio.Event()

    async def follow(*_: object) -> None:
        following.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.resources.overview, "follow", follow)
    stream = asyncio.create_task(tenant.client.get("/v1/overview?stream=true"))
    await following.wait()
    await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/suspend")

    assert '"code":"access_ended"' in (await stream).text


def _data(event: bytes) -> dict[str, Any]:
    name, data = event.decode().strip().split("\n")
    assert name == "event: overview"
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return body
