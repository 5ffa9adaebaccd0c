"""Tests of a gateway that encrypts the content of its rows: what its stores hold, what clients get, and what it refuses."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.contents.columns import content_columns
from graftwork.platform.contents.rows import row_opener
from graftwork.platform.database import Database
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.older_rows import encrypt_older_rows, tables_with_content
from graftwork.platform.errors import InternalFailure
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.erasure import SETTLE_S
from graftwork.platform.tenancy.principals import AdminPrincipal, scope_of_tenant
from graftwork.sessions.store.tables import ItemRow
from tests.api.in_process_gateway import Gateway, TestTenant, gateway_settings, open_gateway
from tests.api.rights.test_content_stays import (
    ANSWER,
    CONTENT,
    OUTPUT,
    PROMPT,
    TEXT,
    TEXTS,
    TOOL,
    Acts,
    Searched,
    columns_of,
    marks_of,
    token_marks,
)
from tests.api.rights.test_exports import exported, table

NAMES_OF_FILES = {"files.filename"}
"""The only column with a tenant's words that stays readable."""


@pytest.fixture
def plain(tmp_path: Path, tiny_model: Path, database_url: str) -> Settings:
    return replace(gateway_settings(tmp_path / "data", tiny_model, database_url), batch_concurrency=0)


@pytest.fixture
def encrypting(plain: Settings, tmp_path: Path) -> Settings:
    MasterKeyFile.create(tmp_path / "master.key")
    return replace(plain, master_key_file=tmp_path / "master.key")


@pytest.fixture
async def gateway(encrypting: Settings, inspector: AdapterInspector) -> AsyncIterator[Gateway]:
    """A gateway that encrypts, on SQLite and then on PostgreSQL."""
    async with open_gateway(encrypting, inspector) as gateway:
        yield gateway


def database_of(gateway: Gateway) -> Database:
    return gateway.resources.server.database


def files_of_database(folder: Path) -> dict[str, bytes]:
    """The file of SQLite and its log, by name; none for PostgreSQL."""
    return {path.name: path.read_bytes() for path in folder.glob("graftwork.db*")}


async def marks_in(gateway: Gateway) -> set[str]:
    """The columns that have a marked text, or a run of token ids of a long prompt."""
    prompts = [one.prompt_token_ids for one in gateway.engine.requests if len(one.prompt_token_ids) > 20]
    return (await columns_of(database_of(gateway))).found(*marks_of(*TEXTS), *token_marks(prompts[0]))


class Conversation:
    """A session of two turns with a tool call, a response, and the answer of an idempotent request."""

    def __init__(self, gateway: Gateway, tenant: TestTenant) -> None:
        self.gateway = gateway
        self.client = tenant.client

    async def post(self, path: str, body: object, key: str | None = None) -> dict[str, Any]:
        answer = await self.client.post(path, json=body, headers={"idempotency-key": key} if key else {})
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def begin(self) -> None:
        function = {"name": TOOL, "description": TOOL, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        self.new = {"model": "tiny", "instructions": TEXT, "metadata": {"about": PROMPT}, "tools": tools}
        self.session = (await self.post("/v1/sessions", self.new, "session"))["id"]
        self.gateway.engine.text = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"at": "{ANSWER}"}}}}\n</tool_call>'
        turn = await self.post(f"/v1/sessions/{self.session}/turns", {"input": TEXT}, "turn")
        self.call = turn["tool_calls"][0]["call_id"]
        self.gateway.engine.text = f"It is {ANSWER}."
        self.response = (await self.post("/v1/responses", {"model": "tiny", "input": TEXT, "instructions": TEXT}))["id"]

    async def answer_tool(self) -> None:
        outputs = {"outputs": [{"call_id": self.call, "output": OUTPUT}]}
        await self.post(f"/v1/sessions/{self.session}/tool_outputs", outputs)

    async def go_on(self) -> None:
        """A turn, a fork with a turn, and a response that continues the first."""
        await self.post(f"/v1/sessions/{self.session}/turns", {"input": "And then?"})
        (fork,) = (await self.post(f"/v1/sessions/{self.session}/fork", {}))["data"]
        await self.post(f"/v1/sessions/{fork['id']}/turns", {"input": "And there?"})
        again = {"model": "tiny", "input": "And now?", "previous_response_id": self.response}
        await self.post("/v1/responses", again)

    async def seen(self) -> dict[str, Any]:
        """What a client reads of it, by path."""
        session = f"/v1/sessions/{self.session}"
        paths = [session, f"{session}/items", f"{session}/turns", f"/v1/responses/{self.response}"]
        paths += [f"/v1/responses/{self.response}/input_items"]
        found = {path: (await self.client.get(path)).json() for path in paths}
        events = await self.client.get(f"{session}/events", params={"after": 0})
        assert events.status_code == 200, events.text
        return found | {"events": events.text, "created": await self.post("/v1/sessions", self.new, "session")}


async def test_nothing_that_a_tenant_says_is_in_the_database(gateway: Gateway) -> None:
    """After marked texts on all faces, no column has one of them or its token ids, but names of files: all columns that
    are made for content are encrypted.
    """
    acts = Acts(gateway, await gateway.tenant())
    await acts.all()

    assert len(acts.errors) > 10
    assert await marks_in(gateway) == NAMES_OF_FILES
    declared = {f"{one.table}.{one.name}" for table in tables_with_content() for one in content_columns(table)}
    assert declared | NAMES_OF_FILES == {
        f"{table}.{column}" for table, columns in CONTENT.items() for column in columns
    }


async def test_nothing_is_in_the_files_of_the_database_and_in_redis(
    encrypting: Settings, inspector: AdapterInspector, redis_url: str, database_url: str, tmp_path: Path
) -> None:
    """Neither SQLite's file and log, nor any key of the tenant in Redis, has a word of a conversation."""
    settings = replace(encrypting, redis_url=redis_url)
    async with open_gateway(settings, inspector) as gateway, Redis.from_url(redis_url) as redis:
        tenant = await gateway.tenant(quota=Quota(requests_per_minute=1000))
        conversation = Conversation(gateway, tenant)
        await conversation.begin()
        await conversation.answer_tool()
        await conversation.go_on()
        keys = [key async for key in redis.scan_iter(match=f"*{tenant.id}*", count=1000)]
        dumped = {str(key): key + (await redis.dump(key) or b"") for key in keys}
        files = files_of_database(tmp_path)
        marks = marks_of(PROMPT, ANSWER, TOOL, OUTPUT)

        assert (await columns_of(database_of(gateway))).found(*marks) == set()
        assert Searched(files | dumped).found(*marks) == set()
        assert dumped
        assert bool(files) == database_url.startswith("sqlite")
        await redis.delete(*keys)


async def test_a_conversation_goes_on_after_a_restart_and_comes_out_whole(
    encrypting: Settings, inspector: AdapterInspector
) -> None:
    """A gateway that starts anew reads all that another one has encrypted: a tool's output is still awaited, turns,
    forks and responses go on, an idempotent request gets its answer, and an export has every word.
    """
    async with open_gateway(encrypting, inspector) as gateway:
        tenant = await gateway.tenant()
        before = Conversation(gateway, tenant)
        await before.begin()
        seen = await before.seen()
    async with open_gateway(encrypting, inspector) as gateway:
        after = Conversation(gateway, TestTenant(tenant.id, tenant.key, gateway.client(tenant.key)))
        after.__dict__ |= {name: vars(before)[name] for name in ("new", "session", "call", "response")}
        gateway.engine.text = f"It is {ANSWER}."

        assert await after.seen() == seen
        assert all(word in json.dumps(seen) for word in (PROMPT, ANSWER, TOOL))
        await after.answer_tool()
        await after.go_on()
        _, archive = await exported(after.client)
        assert {item["body"]["output"] for item in table(archive, "sessions/items") if "output" in item["body"]} == {
            OUTPUT
        }
        for name in ("sessions/sessions", "sessions/turns", "sessions/events", "sessions/responses"):
            assert PROMPT in json.dumps(table(archive, name)) or ANSWER in json.dumps(table(archive, name)), name
        longest = max((one["token_ids"] for one in table(archive, "sessions/checkpoints")), key=len)
        assert all(isinstance(token, int) for token in longest)
        assert await marks_in(gateway) == set()


async def test_older_rows_are_read_and_then_encrypted(
    plain: Settings, encrypting: Settings, inspector: AdapterInspector
) -> None:
    """What was stored before encryption is read and continued; `encrypt_older_rows` encrypts it, also after it was
    stopped, and clients see no difference.
    """
    async with open_gateway(plain, inspector) as gateway:
        tenant = await gateway.tenant()
        acts = Acts(gateway, tenant)
        await acts.all()
        before = Conversation(gateway, tenant)
        await before.begin()
        assert await marks_in(gateway) > {"items.body", "checkpoints.token_ids", "idempotency_keys.body"}
    async with open_gateway(encrypting, inspector) as gateway:
        after = Conversation(gateway, TestTenant(tenant.id, tenant.key, gateway.client(tenant.key)))
        after.__dict__ |= {name: vars(before)[name] for name in ("new", "session", "call", "response")}
        gateway.engine.text = f"It is {ANSWER}."
        await after.answer_tool()
        await after.go_on()
        seen, shown = await after.seen(), list[tuple[str, int, int]]()

        def stop_late(name: str, done: int, total: int) -> None:
            if name == "sessions":
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await encrypt_older_rows(database_of(gateway), tables_with_content(), stop_late)
        assert await marks_in(gateway) == {"sessions.labels", "sessions.settings", "tool_calls.arguments"} | {
            "tool_calls.name", "tool_calls.output", "turns.input", "turns.made_with"
        } | NAMES_OF_FILES  # fmt: skip
        done = await encrypt_older_rows(database_of(gateway), tables_with_content(), lambda *one: shown.append(one))

        assert await marks_of_requests(gateway, acts) == NAMES_OF_FILES
        assert await after.seen() == seen
        encrypted = {one.name: one.encrypted for one in done}
        assert encrypted["items"] == encrypted["checkpoints"] == 0 < encrypted["turns"]
        assert {one.left for one in done} == {0}
        assert ("turns", 0, encrypted["turns"]) in shown
        again = await encrypt_older_rows(database_of(gateway), tables_with_content(), lambda *one: None)
        assert {one.encrypted for one in again} == {0}


async def marks_of_requests(gateway: Gateway, acts: Acts) -> set[str]:
    prompts = [one.prompt_token_ids for one in acts.gateway.engine.requests if len(one.prompt_token_ids) > 20]
    return (await columns_of(database_of(gateway))).found(*marks_of(*TEXTS), *token_marks(prompts[0]))


async def test_an_erased_tenants_rows_are_noise(gateway: Gateway) -> None:
    """A row that a backup of the database brings back after the erasure cannot be read: its tenant's data key is gone."""
    tenant = await gateway.tenant()
    conversation = Conversation(gateway, tenant)
    await conversation.begin()
    database = database_of(gateway)
    async with database.read() as session:
        backup = (await session.execute(text("SELECT id, body FROM items"))).mappings().first()
    assert backup is not None
    await gateway.admin.delete(f"/v1/admin/tenants/{tenant.id}")
    gateway.clock.advance(SETTLE_S)
    await gateway.resources.admin.erasure.sweep()

    assert (await gateway.admin.get(f"/v1/admin/tenants/{tenant.id}/erasure")).json()["status"] == "done"
    stored = backup["body"] if isinstance(backup["body"], list) else json.loads(backup["body"])
    async with database.read() as session:
        opener = await row_opener(session, scope_of_tenant(AdminPrincipal(), tenant.id))
        with pytest.raises(InternalFailure, match="erased tenant"):
            opener.opened(ItemRow, "body", stored, backup["id"])


async def test_a_row_that_was_moved_is_an_error_and_no_answer(gateway: Gateway) -> None:
    """If the bodies of two items are exchanged, their readers get an error with a code. Others, and the deletion of the
    session, go on.
    """
    tenant = await gateway.tenant()
    spoilt, sound = Conversation(gateway, tenant), Conversation(gateway, await gateway.tenant("Other"))
    await spoilt.begin()
    await sound.begin()
    whole = await sound.seen()
    async with database_of(gateway).write() as session:
        await session.execute(
            text("UPDATE items SET body = (SELECT body FROM items one WHERE one.id > items.id ORDER BY one.id LIMIT 1)"
                 " WHERE tenant_id = :mine AND id < (SELECT max(id) FROM items)"),
            {"mine": tenant.id},
        )  # fmt: skip
        await session.execute(
            text("UPDATE sessions SET settings = labels WHERE tenant_id = :mine"), {"mine": tenant.id}
        )

    for path in (f"/v1/sessions/{spoilt.session}", f"/v1/sessions/{spoilt.session}/items", "/v1/sessions"):
        answer = await spoilt.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "row_unreadable"), path
        assert PROMPT not in answer.text
    assert await sound.seen() == whole
    async with database_of(gateway).write() as session:
        over = "UPDATE sessions SET status = 'closed', closed_at = 0 WHERE tenant_id = :mine"
        await session.execute(text(over), {"mine": tenant.id})
    await gateway.resources.sessions.sessions.sweep()
    assert (await spoilt.client.get(f"/v1/sessions/{spoilt.session}")).status_code == 404
    assert await sound.seen() == whole
