"""Tests that a batch survives the end of its gateway at any point: each line has one answer and one usage record."""

import asyncio
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graftwork.api.batches.endpoints import CHAT, RESPONSES
from graftwork.api.batches.runner import BatchRunner
from graftwork.platform.batches.batch import COMPLETION_WINDOW_S
from graftwork.platform.gateways.lease import GatewayLease
from tests.api.batches.conftest import (
    Batching,
    GatedEngine,
    create,
    get,
    line,
    lines_of,
    living_lease,
    new_runner,
    until,
)
from tests.api.in_process_gateway import Gateway, TestTenant, gateway_settings, open_gateway
from tests.hypothesis_profiles import examples

NUM_LINES = 7


class Relay:
    """A batch of which several runners, one after another, answer a part. A runner that has crashed keeps its tasks, as a
    gateway that was stopped does: when their answers come, it tries to store them.
    """

    def __init__(self, gateway: Gateway, tenant: TestTenant, engine: GatedEngine) -> None:
        self.gateway = gateway
        self.tenant = tenant
        self.engine = engine
        self.runners: list[BatchRunner] = []
        self.lease: GatewayLease | None = None

    async def start(self) -> None:
        """Lets a new runner claim what the last one had."""
        self.lease = await living_lease(self.gateway)
        self.runners.append(await new_runner(self.gateway, self.lease))
        await self.runners[-1].tick()

    async def crash(self) -> None:
        """The lease of the runner ends, and the next runner begins."""
        assert self.lease is not None
        await self.lease.end(self.gateway.resources.server.database)
        await self.start()

    async def answer(self, number: int) -> None:
        """Lets some of the requests be answered, of any runner."""
        for _ in range(number):
            self.engine.permits.release()
        for _ in range(3):
            await self.tenant.client.get("/v1/batches")

    async def end(self) -> None:
        """Lets everything go on, until nothing is left to do."""
        self.engine.open()
        for runner in self.runners:
            await runner.drained()
        self.gateway.clock.advance(60)  # what rests goes on
        await self.runners[-1].tick()
        await self.runners[-1].drained()
        for runner in self.runners:
            await runner.close()


async def follow(folder: Path, model: Path, template: Path, endpoint: str, actions: list[str | int]) -> None:
    """Does these acts to a batch, and checks what has become of it."""
    shutil.copy(template, folder / "graftwork.db")
    engine = GatedEngine()
    config = replace(gateway_settings(folder, model), batch_concurrency=0)
    async with open_gateway(config, engine=engine) as gateway:
        tenant = await gateway.tenant()
        custom_ids = [f"{number}" for number in range(NUM_LINES)]
        asked = {"input": "x"} if endpoint == RESPONSES else {}
        lines = [line(one, endpoint, temperature=9 if one == "3" else 0, **asked) for one in custom_ids]
        batch = await create(tenant, lines, endpoint)
        relay = Relay(gateway, tenant, engine)
        await relay.start()
        for action in actions:
            if isinstance(action, int):
                await relay.answer(action)
            elif action == "crash":
                await relay.crash()
            elif action == "cancel":
                await tenant.client.post(f"/v1/batches/{batch['id']}/cancel")
                await relay.runners[-1].tick()
            else:
                gateway.clock.advance(COMPLETION_WINDOW_S)
                await relay.runners[-1].tick()
        await relay.end()

        ended = await get(tenant, batch)
        output, errors = [await lines_of(tenant, ended[name]) for name in ("output_file_id", "error_file_id")]
        usage = await tenant.usage("tier")

    assert ended["status"] in ("completed", "cancelled", "expired"), ended
    assert Counter(one["custom_id"] for one in (*output, *errors)) == Counter(custom_ids)
    assert ended["request_counts"] == {"total": NUM_LINES, "completed": len(output), "failed": len(errors)}
    assert sum(row["requests"] for row in usage) == len(output)
    assert sum(row["completion_tokens"] for row in usage) == ended["usage"]["output_tokens"]
    of_output = sum(one["response"]["body"]["usage"]["total_tokens"] for one in output)
    assert of_output == ended["usage"]["total_tokens"]


ACTIONS = st.lists(st.one_of(st.integers(1, 3), st.sampled_from(["crash", "crash", "cancel", "expire"])), max_size=7)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
@given(actions=ACTIONS)
def test_any_order_of_ends(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    sqlite_template: Path,
    endpoint: str,
    actions: list[str | int],
) -> None:
    """Whatever crashes, is cancelled or expires in whatever order: each custom_id has one line, and each answer one bill."""
    folder = tmp_path_factory.mktemp("relay")
    asyncio.run(follow(folder, tiny_model, sqlite_template, endpoint, actions))


async def test_a_stopped_gateway_stores_nothing_more(batching: Batching, tenant: TestTenant) -> None:
    """An answer that comes after another gateway has claimed the batch is dropped, and bills nothing."""
    engine = batching.gateway.engine
    assert isinstance(engine, GatedEngine)
    engine.is_open = False
    relay = Relay(batching.gateway, tenant, engine)
    batch = await create(tenant, [line("a"), line("b")])
    await relay.start()
    await until(lambda: engine.num_waiting == 2)

    await relay.crash()
    await until(lambda: engine.num_waiting == 4)
    await relay.end()

    ended = await get(tenant, batch)
    assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    output = await lines_of(tenant, ended["output_file_id"])
    assert [one["response"]["request_id"] for one in output] == [f"{batch['id']}.{number}.2" for number in (1, 2)]
    assert len(engine.requests) == 4
    assert (await tenant.usage("tier"))[0]["requests"] == 2


async def test_a_deleted_tenants_batch_ends(batching: Batching, tenant: TestTenant) -> None:
    """The lines that run for a tenant are cancelled with its deletion, and store nothing after its erasure."""
    engine = batching.gateway.engine
    assert isinstance(engine, GatedEngine)
    engine.holds_after = 1
    await create(tenant, [line("a"), line("b")])
    await batching.runner.tick()
    await until(lambda: len(engine.requests) == 2)

    await batching.gateway.resources.account.tenancy.delete_tenant(tenant.id)
    await batching.gateway.resources.admin.erasure.sweep()
    await batching.runner.tick()
    await batching.runner.drained()
    engine.release.set()

    assert sorted(engine.cancelled) == sorted(request.request_id for request in engine.requests)
    folder = batching.gateway.resources.server.settings.data_dir / "files"
    assert [path for path in folder.rglob("*") if path.is_file()] == []
