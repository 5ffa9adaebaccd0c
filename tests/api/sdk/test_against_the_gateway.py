"""Tests of every resource of the SDK against the real application."""

import asyncio
import json
from pathlib import Path

import pytest

from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.transport import errors
from graftwork.api.sdk.transport.tools import ToolOutput
from graftwork.platform.answers.session_events import OutputTextDelta, SessionEvent, TurnCompleted, TurnCreated
from graftwork.platform.errors import CapacityContended
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import Gateway
from tests.api.sdk.conftest import LossyTransport

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = f"{CALL}\n{CALL.replace('Paris', 'Lyon')}"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hi"}]


def adapter_folder(path: Path, seed: int = 0) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_bytes(config_bytes())
    (path / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(seed)))
    return path


async def test_chat(gateway: Gateway, client: AsyncGraftwork) -> None:
    """The answer is the same, streamed or not."""
    whole = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=50)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=50, stream=True)
    pieces = [chunk.text async for chunk in stream]

    assert whole.text == "".join(pieces) == gateway.engine.text
    assert whole.usage is not None
    assert whole.usage.total_tokens > 0
    assert whole.choices[0].finish_reason == "stop"


async def test_errors_are_the_servers(client: AsyncGraftwork) -> None:
    """An error has the class, code, field and request id of the server's answer."""
    with pytest.raises(errors.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(errors.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    with pytest.raises(errors.ValidationError) as invalid:
        await client.sessions.create(model="tiny", metadata={"a": []})

    assert unknown.value.code == "model_not_found"
    assert bad.value.param == "temperature"
    assert str(invalid.value.param).startswith("metadata")
    assert all(error.value.request_id for error in (unknown, bad, invalid))


async def test_keys_open_their_own_doors(gateway: Gateway, client: AsyncGraftwork) -> None:
    """A wrong key is a 401, a suspended tenant's a 403."""
    tenant = await client.admin.tenants.create("suspended", weight=2.0)
    key = await client.admin.keys.create(tenant.id, name="k")
    await client.admin.tenants.suspend(tenant.id)

    async with AsyncGraftwork("http://gateway.test", key.key, transport=LossyTransport(gateway)) as suspended:
        with pytest.raises(errors.PermissionDeniedError):
            await suspended.models.list()
    async with AsyncGraftwork("http://gateway.test", "gw_no", transport=LossyTransport(gateway)) as stranger:
        with pytest.raises(errors.AuthenticationError):
            await stranger.models.list()


async def test_waiting_is_the_servers_word(gateway: Gateway) -> None:
    """The client waits as long as the error of a full queue says, and then succeeds."""
    tenant = await gateway.tenant()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        gateway.engine.refusal = None

    gateway.engine.refusal = CapacityContended("Full.", retry_after_s=1.5)

    transport = LossyTransport(gateway)
    async with AsyncGraftwork("http://gateway.test", tenant.key, transport=transport, sleep=sleep) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)

    assert waits == [1.5]
    assert answer.text


async def test_sessions_run_their_tools(gateway: Gateway, client: AsyncGraftwork) -> None:
    """Two calls in one turn are run side by side and answered; the transcript has everything in order."""
    gateway.engine.text = TWO_CALLS
    cities: list[str] = []
    both = asyncio.Event()

    async def get_weather(city: str) -> dict[str, str]:
        cities.append(city)
        if len(cities) == 2:
            both.set()
        await both.wait()
        gateway.engine.text = "Sunny in both."
        return {"city": city, "sky": "blue"}

    session = await client.sessions.create(model="tiny", tools=[TOOL], instructions="Be brief.")
    run = await session.run("Weather?", tools={"get_weather": get_weather})

    assert run.text == "Sunny in both."
    assert cities == ["Paris", "Lyon"]
    types = [item.type for item in await session.items(order="asc", limit=100)]
    kinds = ["message", "function_call", "function_call", "function_call_output", "function_call_output", "message"]
    assert types[-6:] == kinds
    assert session.head == (await session.refresh()).head


async def test_session_streams(gateway: Gateway, client: AsyncGraftwork) -> None:
    """A turn's events are typed and numbered without a gap, and can be read again."""
    session = await client.sessions.create(model="tiny")

    events: list[SessionEvent] = [event async for event in session.turn("Hi", stream=True)]
    again = [event async for event in session.events(after=1)]

    assert isinstance(events[0], TurnCreated)
    assert isinstance(events[-1], TurnCompleted)
    assert events[-1].usage is not None
    assert "".join(event.delta for event in events if isinstance(event, OutputTextDelta)) == gateway.engine.text
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert again == events[1:]
    assert session.head == events[-1].checkpoint_id


async def test_branches(gateway: Gateway, client: AsyncGraftwork) -> None:
    """Forks continue separately, a rewind moves the head back, and a closed session takes no turn."""
    session = await client.sessions.create(model="tiny")
    first = await session.turn("One")
    await session.turn("Two")

    left, right = await session.fork(at=first.checkpoint_id, count=2)
    gateway.engine.text = "Other."
    turn = await left.turn("Three")
    await session.rewind(first.checkpoint_id or "")

    assert turn.text == "Other."
    assert right.head == first.checkpoint_id == session.head
    assert len(await right.items()) == len(await session.items())
    assert {state.id for state in await client.sessions.list()} == {session.id, left.id, right.id}
    await session.close()
    with pytest.raises(errors.ConflictError):
        await session.turn("Four")


async def test_a_stale_head_is_refused(client: AsyncGraftwork) -> None:
    """With `if_head`, the second of two writers gets a conflict."""
    session = await client.sessions.create(model="tiny")
    first = await session.turn("One")
    await session.turn("Two")

    with pytest.raises(errors.ConflictError):
        await session.turn("Three", if_head=first.checkpoint_id or "")


async def test_changes(client: AsyncGraftwork) -> None:
    """Metadata is replaced, and a suspended session is resumed by its next turn."""
    session = await client.sessions.create(model="tiny", metadata={"a": "1"})
    await session.turn("One")

    await session.change(metadata={"b": "2"})
    await session.suspend()
    asleep = session.status
    await session.turn("Two")

    assert session.state.metadata == {"b": "2"}
    assert (asleep, (await session.refresh()).status) == ("suspended", "idle")


async def test_session_cache(client: AsyncGraftwork) -> None:
    """The session's cache is listed by tier."""
    session = await client.sessions.create(model="tiny")
    await session.turn("One")

    cache = await session.cache()

    assert cache.tiers is not None
    assert set(cache.tiers) == {"device", "host", "disk"}


async def test_adapters(client: AsyncGraftwork, tmp_path: Path) -> None:
    """Adapters are pushed, promoted, rolled back, shared by weight and deleted."""
    first = adapter_folder(tmp_path / "pirate")
    await client.adapters.push(first)
    await client.adapters.push(first)
    pushed = await client.adapters.push(adapter_folder(tmp_path / "second", seed=1), name="pirate")

    await client.adapters.promote("pirate", 1)
    promoted = await client.adapters.promote("pirate", 2)
    rolled_back = await client.adapters.rollback("pirate")
    shared = await client.adapters.canary("pirate", {1: 0.5, 2: 0.5}, alias="test")
    await client.adapters.remove_alias("pirate", "test")
    models = [model.id for model in await client.models.list()]
    session = await client.sessions.create(model="pirate@2")

    assert [version.version for version in pushed.versions] == [1, 2]
    assert (promoted.target, rolled_back.target, rolled_back.previous) == (
        {"version": 2},
        {"version": 1},
        {"version": 2},
    )
    assert shared.target == {"weights": {"1": 0.5, "2": 0.5}}
    assert models == ["tiny", "pirate", "pirate@prod"]
    assert (session.model.name, session.model.version) == ("pirate", 2)
    await client.adapters.delete("pirate")
    with pytest.raises(errors.NotFoundError):
        await client.adapters.get("pirate")
    restored = await client.adapters.restore("pirate")
    history = await client.adapters.history("pirate")
    assert restored.aliases == {"prod": {"version": 1}}
    assert [(event.reason, event.target) for event in history] == [
        ("rollback", {"version": 1}),
        ("set", {"version": 2}),
        ("set", {"version": 1}),
    ]


async def test_a_bad_adapter_names_its_tensor(client: AsyncGraftwork, tmp_path: Path) -> None:
    """A bad adapter is refused with the tensor's name, and nothing is published."""
    folder = adapter_folder(tmp_path / "cut")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])

    with pytest.raises(errors.ValidationError) as refused:
        await client.adapters.push(folder)

    assert str(refused.value.param).startswith("weights")
    assert len(await client.adapters.list()) == 0


async def test_admin(client: AsyncGraftwork) -> None:
    """Tenants, keys, quotas, audit entries and replicas can be read and changed."""
    tenant = await client.admin.tenants.create("acme", weight=2.0)
    rules = {"scopes": ("read", "usage"), "adapters": ("pirate",), "allowed_ips": ("192.0.2.0/24",)}
    key = await client.admin.keys.create(tenant.id, name="laptop", expires_at="2100-01-01T00:00:00Z", **rules)
    rotated = await client.admin.keys.rotate(tenant.id, key.id, overlap_s=60)
    quota = await client.admin.quotas.set(tenant.id, requests_per_minute=60, max_sessions=None)
    renamed = await client.admin.tenants.update(tenant.id, name="acme2")
    revoked = await client.admin.keys.revoke(tenant.id, key.id)

    assert (tenant.weight, renamed.name, renamed.status) == (2.0, "acme2", "active")
    assert key.key
    assert rotated.key not in (None, key.key)
    assert key.expires_at == rotated.expires_at == 4102444800
    assert (rotated.scopes, rotated.adapters, rotated.allowed_ips) == tuple(rules.values())
    assert (quota.requests_per_minute, quota.max_sessions) == (60, None)
    read = await client.admin.quotas.get(tenant.id)
    assert {name: getattr(read, name) for name in type(quota).model_fields} == dict(quota)
    assert read.used is not None
    assert (read.used.sessions, read.used.monthly_costs) == (0, ())
    assert revoked.revoked_at is not None
    listed = list(await client.admin.keys.list(tenant.id))
    assert [(one.key, one.replaced_by) for one in listed] == [(None, None), (None, rotated.id)]
    actions = [entry.action for entry in await client.admin.audit(limit=3)]
    assert actions == ["key.revoked", "tenant.updated", "quota.set"]
    (replica,) = await client.admin.replicas()
    assert replica.status == "ready"
    await client.admin.tenants.suspend(tenant.id)
    assert (await client.admin.tenants.resume(tenant.id)).status == "active"
    assert (await client.admin.tenants.delete(tenant.id)).deleted
    assert (await client.admin.tenants.erasure(tenant.id)).status == "running"


async def test_usage_and_quota(client: AsyncGraftwork) -> None:
    """Usage is listed by group, and a tenant can read its limits."""
    session = await client.sessions.create(model="tiny")
    await session.turn("One")
    await client.chat.completions.create(model="tiny", messages=HELLO)

    rows = {row.group: row for row in await client.usage.list(group_by="session")}

    assert set(rows) == {session.id, None}
    assert all(row.requests == 1 and row.prompt_tokens and row.completion_tokens for row in rows.values())
    assert (await client.quota.get()).requests_per_minute is None
    assert len(await client.admin.usage(group_by="tenant")) == 1


async def test_creating_again_creates_once(gateway: Gateway) -> None:
    """If an answer is lost, the retry gets the first result."""
    tenant = await gateway.tenant()

    async def sleep(_: float) -> None:
        return None

    transport = LossyTransport(gateway, losses=1)
    async with AsyncGraftwork("http://gateway.test", tenant.key, transport=transport, sleep=sleep) as client:
        session = await client.sessions.create(model="tiny")

        assert [state.id for state in await client.sessions.list()] == [session.id]


async def test_a_lost_answer_loses_no_turn(gateway: Gateway) -> None:
    """If answers to a turn and a tool output are lost, a run still has each turn once."""
    tenant = await gateway.tenant()
    gateway.engine.text = CALL
    transport = LossyTransport(gateway)

    async def sleep(_: float) -> None:
        return None

    def get_weather(city: str) -> str:
        gateway.engine.text = "Sunny."
        transport.losses = 1
        return "20 degrees"

    async with AsyncGraftwork("http://gateway.test", tenant.key, transport=transport, sleep=sleep) as client:
        session = await client.sessions.create(model="tiny", tools=[TOOL])
        transport.losses = 1
        run = await session.run("Weather?", tools={"get_weather": get_weather})
        items = await session.items(limit=100)

    assert run.text == "Sunny."
    assert len(gateway.engine.requests) == 2
    assert len(items) == 4


async def test_a_session_is_resumed_by_another_program(gateway: Gateway, client: AsyncGraftwork) -> None:
    """Another program can finish a run that stopped at its tools."""
    gateway.engine.text = TWO_CALLS
    session = await client.sessions.create(model="tiny", tools=[TOOL])
    left = await session.turn("Weather?")
    await session.tool_outputs([ToolOutput(left.tool_calls[0].call_id, "20 degrees")])
    gateway.engine.text = "Sunny in both."
    asked: list[str] = []

    again = await client.sessions.get(session.id)
    run = await again.resume(tools={"get_weather": lambda city: asked.append(city)})

    assert (run.text, asked) == ("Sunny in both.", ["Lyon"])
    assert (await again.refresh()).awaiting == ()
    assert (await again.prefetch())["object"]


async def test_files_and_batches(client: AsyncGraftwork, tmp_path: Path) -> None:
    """A file is uploaded, a batch of it runs to its end, and its output can be read."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps(line | {"body": {"model": "tiny", "messages": HELLO}}))
    with pytest.raises(errors.ConfigurationError, match="no file"):
        await client.files.create(tmp_path / "missing.jsonl")
    file = await client.files.create(requests, expires_after_s=3600)
    batch = await client.batches.create(file.id, metadata={"topic": "weather"})
    while batch.status != "completed":
        batch = await client.batches.get(batch.id)

    assert batch.output_file_id is not None
    (answer,) = (await client.files.content(batch.output_file_id)).splitlines()
    assert json.loads(answer)["custom_id"] == "a"
    assert (batch.metadata, batch.request_counts.completed) == ({"topic": "weather"}, 1)
    assert file.expires_at == file.created_at + 3600
    assert await client.files.get(file.id) == file
    assert [one.id for one in await client.batches.list()] == [batch.id]
    assert [one.purpose for one in await client.files.list(purpose="batch_output")] == ["batch_output"]
    with pytest.raises(errors.ConflictError):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(file.id)).deleted
