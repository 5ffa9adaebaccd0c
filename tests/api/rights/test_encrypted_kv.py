"""Tests of the keys of KV files that a gateway sends to its engines: with what, of whom, and until when."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.server.fleets import check_key_transport
from graftwork.api.server.wiring import open_resources
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.errors import InvalidRequest, NotPermitted
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.erasure import SETTLE_S
from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, TestTenant, chat, gateway_settings, open_gateway


@pytest.fixture
def plain(tmp_path: Path, tiny_model: Path) -> Settings:
    return replace(gateway_settings(tmp_path / "data", tiny_model), batch_concurrency=0)


@pytest.fixture
def encrypting(plain: Settings, tmp_path: Path) -> Settings:
    path = tmp_path / "master.key"
    MasterKeyFile.create(path)
    return replace(plain, master_key_file=path, encrypt_kv_files=True)


async def talk(gateway: Gateway, tenant: TestTenant) -> str:
    """A chat, and a session that is used, suspended and deleted. Returns the session's id."""
    assert (await tenant.client.post("/v1/chat/completions", json=chat())).status_code == 200
    session = str((await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"])
    turn = await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "Hello"})
    assert turn.status_code == 200, turn.text
    assert (await tenant.client.post(f"/v1/sessions/{session}/suspend")).status_code == 200
    assert (await tenant.client.get(f"/v1/sessions/{session}/cache")).status_code == 200
    return session


def keys_in(engine: FakeEngine) -> set[KvFileKey | None]:
    """Returns what requests and commands have brought."""
    requests = {request.kv_key for request in engine.requests}
    return requests | {command.kv_key for command in engine.session_commands}


async def test_all_of_a_tenants_requests_and_commands_bring_its_key(
    encrypting: Settings, inspector: AdapterInspector
) -> None:
    """A tenant's requests and commands bring one key, another tenant's another one, and a removal brings none."""
    async with open_gateway(encrypting, inspector) as gateway:
        keys = []
        for name in ("one", "other"):
            tenant, engine = await gateway.tenant(name), gateway.engine
            session = await talk(gateway, tenant)
            sent = keys_in(engine)
            verbs = {command.verb for command in engine.session_commands}
            engine.session_commands.clear()
            await tenant.client.delete(f"/v1/sessions/{session}")

            assert len(engine.requests) == 2
            assert {SessionVerb.HOLD, SessionVerb.SUSPEND, SessionVerb.READ} <= verbs
            assert [(one.verb, one.kv_key) for one in engine.session_commands] == [(SessionVerb.CLOSE, None)]
            keys.append(sent)
            engine.requests.clear()
            engine.session_commands.clear()

        (one,), (other,) = keys
        assert one is not None
        assert other is not None
        assert one != other


async def test_the_key_outlives_the_gateway_and_not_the_tenant(
    encrypting: Settings, inspector: AdapterInspector
) -> None:
    """A restarted gateway sends the same key; after the tenant's erasure the database has no data key to derive it."""
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = await gateway.tenant()
        await tenant.client.post("/v1/chat/completions", json=chat())
        before = gateway.engine.requests[-1].kv_key
    async with open_gateway(encrypting, inspector) as gateway:
        await gateway.client(tenant.key).post("/v1/chat/completions", json=chat())
        after = gateway.engine.requests[-1].kv_key
        deleted = await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")
        assert deleted.status_code < 300
        gateway.clock.advance(SETTLE_S)
        await gateway.resources.admin.erasure.sweep()

        assert before is not None
        assert after == before
        assert (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/erasure")).json()["status"] == "done"
        assert len(gateway.engine.forgotten_domains) == 1
        keys = gateway.resources.inference.generator.kv_keys
        assert keys is not None
        with pytest.raises(NotPermitted, match="deleted"):
            await keys.of(tenant.id)


async def test_without_the_setting_no_key_is_sent(
    encrypting: Settings, plain: Settings, inspector: AdapterInspector
) -> None:
    """Master keys alone do not encrypt KV files, and the setting without master keys is refused with its name."""
    with pytest.raises(InvalidRequest, match="master keys") as refused:
        async with open_gateway(replace(plain, encrypt_kv_files=True), inspector):
            pass
    assert refused.value.param == "encrypt_kv_files"

    async with open_gateway(replace(encrypting, encrypt_kv_files=False), inspector) as gateway:
        await talk(gateway, await gateway.tenant())
        assert keys_in(gateway.engine) == {None}


_TLS: dict[str, Any] = {
    name: Path(f"/etc/graftwork/{name}.pem") for name in ("engine_tls_ca", "engine_tls_cert", "engine_tls_key")
}


@pytest.mark.parametrize(
    "engines",
    [
        {"engine_address": "gpu-1:9000"},
        {"engine_address": "10.0.0.5:9000"},
        {"engine_address": "dns:///gpu-1:9000"},
        {"engine_address": "unix:/run/one.sock,gpu-1:9000"},
        {"engine_address": "localhost.example.com:9000"},
        {"fleet": "leases"},
    ],
)
async def test_keys_never_travel_in_the_clear(engines: dict[str, Any], encrypting: Settings, plain: Settings) -> None:
    """A gateway that would send keys to another machine without TLS does not start, and says what to set."""
    with pytest.raises(InvalidRequest, match="in the clear") as refused:
        async with open_resources(replace(encrypting, **engines)):
            pass

    assert refused.value.param == "encrypt_kv_files"
    assert all(name in refused.value.message for name in _TLS)
    check_key_transport(replace(plain, **engines))
    check_key_transport(replace(encrypting, **engines, **_TLS))


@pytest.mark.parametrize(
    "address", [None, "unix:/run/engine.sock", "127.0.0.1:9000", "localhost:9000", "[::1]:9000", "ipv4:127.0.0.1:9000"]
)
def test_keys_travel_within_a_machine(address: str | None, encrypting: Settings) -> None:
    """A Unix socket and a loopback address need no TLS."""
    check_key_transport(replace(encrypting, engine_address=address))
