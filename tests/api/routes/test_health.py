"""Tests of health, readiness, metrics and the API's description."""

import sys
from subprocess import run

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as prometheus_families
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import Pool

import graftwork
from graftwork.api.server.app import create_app, create_metrics_app
from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.settings.settings import Settings
from tests.api.in_process_gateway import Gateway, TestTenant, chat


@pytest.mark.parametrize("path", ["/healthz", "/health"])
async def test_health(path: str, gateway: Gateway) -> None:
    """A process that answers is healthy, with or without an engine. The document has one of the two names."""
    gateway.engine.refusal = Unavailable("gone")

    assert (await gateway.anonymous.get(path)).json() == {"status": "ok"}
    assert [name for name in create_app(Settings()).openapi()["paths"] if name.startswith("/health")] == ["/healthz"]


async def test_readiness(gateway: Gateway) -> None:
    """The server is ready if the engine generates a token; the check is repeated after a second, not for each
    request."""
    ready = await gateway.anonymous.get("/readyz")
    await gateway.anonymous.get("/readyz")
    asked_once = len(gateway.engine.requests)
    gateway.engine.refusal = Unavailable("No engine answers.")
    gateway.clock.advance(2)
    absent = await gateway.anonymous.get("/readyz")
    gateway.engine.refusal = CapacityContended("The queue is full.", retry_after_s=1)
    gateway.clock.advance(2)
    busy = await gateway.anonymous.get("/readyz")

    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "degraded": []})
    assert asked_once == 1
    assert (absent.status_code, absent.json()["problems"]) == (503, {"engine": "No engine answers."})
    assert busy.status_code == 200


async def test_readiness_names_degraded_modes(gateway: Gateway) -> None:
    """A server whose operator has capped answers and switched flex off is ready, and says what is taken away."""
    await gateway.admin.put("/v1/admin/modes", json={"max_output_tokens": 64, "refuse_flex": True})

    answer = await gateway.anonymous.get("/readyz")

    assert (answer.status_code, answer.json()["degraded"]) == (200, ["max_output_tokens=64", "refuse_flex"])


async def test_readiness_of_the_schema(gateway: Gateway) -> None:
    """With an old database schema the server is not ready, and says what to do."""
    await gateway.resources.server.database.downgrade("0002_adapters")

    answer = await gateway.anonymous.get("/readyz")
    await gateway.resources.server.database.upgrade_to_head()  # the gateway renews its lease once more at its end

    assert answer.status_code == 503
    assert "graftwork db upgrade" in answer.json()["problems"]["database"]


async def test_metrics_count_sessions_by_status(gateway: Gateway, tenant: TestTenant) -> None:
    """The gauge of sessions follows their status: after a close the old status counts 0."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    await tenant.client.post("/v1/sessions", json={"model": "tiny"})
    opened = (await gateway.admin.get("/metrics")).text
    await tenant.client.delete(f"/v1/sessions/{session}")
    one_closed = (await gateway.admin.get("/metrics")).text

    assert 'graftwork_sessions{status="idle"} 2.0' in opened
    assert 'graftwork_sessions{status="closed"} 0.0' in opened
    assert 'graftwork_sessions{status="idle"} 1.0' in one_closed
    assert 'graftwork_sessions{status="closed"} 1.0' in one_closed


async def test_metrics(gateway: Gateway, tenant: TestTenant) -> None:
    """Metrics have the engine's gauges under both names, and count requests and tokens by tenant."""
    await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=5))
    await gateway.store_usage()

    text = (await gateway.admin.get("/metrics")).text

    for line in (
        'graftwork_kv_pages{state="free",tier="device"} 5.0',
        'graftwork_kv_pages{state="owned",tier="device"} 5.0',
        'graftwork_kv_pages{state="in_flight",tier="device"} 1.0',
        'graftwork_kv_pages{state="owned",tier="host"} 6.0',
        'graftwork_kv_pages{state="owned",tier="disk"} 9.0',
        "graftwork_preemptions_total 3.0",
        'graftwork_kv_disk_troubles_total{kind="foreign_file"} 2.0',
        "vllm:num_requests_waiting 2.0",
        "vllm:num_requests_running 1.0",
        "vllm:kv_cache_usage_perc 0.18",
        f'graftwork_requests_total{{outcome="completed",tenant="{tenant.id}"}} 1.0',
        f'graftwork_generated_tokens_total{{tenant="{tenant.id}"}} 5.0',
        "graftwork_time_to_first_token_seconds_count 1.0",
    ):
        assert line in text, line
    assert "vllm:lora_requests_info" in text


async def test_openapi(gateway: Gateway) -> None:
    """The OpenAPI document has every route of the interface, and the ways to authenticate."""
    document = (await gateway.anonymous.get("/openapi.json")).json()

    for path in ("/v1/chat/completions", "/v1/sessions/{session_id}/events", "/v1/admin/tenants/{tenant_id}/quota"):
        assert path in document["paths"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"].endswith("ChatCompletionRequest")
    assert document["components"]["securitySchemes"]["tenant_key"]["scheme"] == "bearer"


async def test_docs(gateway: Gateway) -> None:
    """The docs page shows every operation and loads nothing from another address."""
    page = await gateway.anonymous.get("/docs")

    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.text.count('class="method"') == sum(map(len, gateway.app.openapi()["paths"].values()))
    assert "<script" not in page.text
    assert "src=" not in page.text


async def test_version(gateway: Gateway) -> None:
    """The server tells its version without a key."""
    assert (await gateway.anonymous.get("/version")).json() == {"version": graftwork.__version__}


def test_gateway_loads_no_torch() -> None:
    """A gateway's process never imports torch, not even with everything that it serves."""
    program = (
        "import sys; import graftwork.api.server.serve, graftwork.api.server.app; sys.exit('torch' in sys.modules)"
    )

    assert run([sys.executable, "-c", program], check=False).returncode == 0


async def test_metrics_need_the_operators_key(gateway: Gateway, tenant: TestTenant) -> None:
    """Metrics name all tenants, so neither a tenant nor a stranger can read them."""
    stranger = await gateway.anonymous.get("/metrics")
    other = await tenant.client.get("/metrics")

    assert (stranger.status_code, other.status_code) == (401, 403)
    assert tenant.id not in stranger.text + other.text


async def test_open_metrics(gateway: Gateway) -> None:
    """A client that asks for OpenMetrics gets it, with its end mark; every other client gets Prometheus text."""
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"

    modern = await gateway.admin.get("/metrics", headers={"accept": wanted})
    plain = await gateway.admin.get("/metrics")

    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert list(openmetrics_families(modern.text))  # type: ignore[no-untyped-call]
    assert plain.headers["content-type"].startswith("text/plain")
    assert list(prometheus_families(plain.text))


async def test_metrics_port(gateway: Gateway, tenant: TestTenant) -> None:
    """The application of the port for metrics serves them without a key, and nothing else of the API."""
    app = create_metrics_app(gateway.resources)
    transport = httpx.ASGITransport(app=app)
    await tenant.client.post("/v1/chat/completions", json=chat(max_tokens=5))
    await gateway.store_usage()

    async with httpx.AsyncClient(transport=transport, base_url="http://metrics.test") as client:
        metrics = await client.get("/metrics")
        others = [await client.get(path) for path in ("/v1/models", "/docs", "/openapi.json", "/v1/admin/tenants")]

    assert metrics.status_code == 200
    assert tenant.id in metrics.text
    assert [answer.status_code for answer in others] == [404] * 4


async def test_readiness_of_a_database_that_cannot_store(gateway: Gateway) -> None:
    """A database that answers but stores nothing is not ready, and no inference starts on it."""

    def refuse_to_store(connection: DBAPIConnection, *_: object) -> None:
        connection.cursor().execute("PRAGMA query_only = ON")

    event.listen(Pool, "checkout", refuse_to_store)  # whichever connection the check gets
    try:
        answer = await gateway.anonymous.get("/readyz")
    finally:
        event.remove(Pool, "checkout", refuse_to_store)

    assert answer.status_code == 503
    assert "store" in answer.json()["problems"]["database"]
