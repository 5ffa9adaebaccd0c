"""That what tenants say stays where it belongs: in the columns and folders that are made for it, and nowhere else.

A gateway whose requests are all traced is given marked prompts, answers, tools, files and adapters on all its faces, good
and bad. Then every column of every table, every file of the data folder, and all of the log are searched for them.
"""

import io
import json
import logging
import shutil
import struct
import zipfile
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.platform.batches.batch import LineOutcome
from graftwork.platform.batches.claims import BatchClaims
from graftwork.platform.database import Base, Database
from graftwork.platform.errors import CapacityContended
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.tracing.logs import JsonFormatter
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.in_process_gateway import ADMIN_KEY, Gateway, TestTenant, ended_export, gateway_settings, open_gateway
from tests.sessions.tokenizer_and_templates import text_tokenizer

PEPPER = "markedPepper5Rk2"
PROMPT, ANSWER, TOOL, OUTPUT, FILE, BROKEN = (
    "markedprompt17",
    "markedanswer28",
    "markedtool39",
    "markedoutput40",
    "markedfile51",
    "markedbroken62",
)
TEXTS = (PROMPT, ANSWER, TOOL, OUTPUT, FILE, BROKEN)
TEXT = f"Please remember {PROMPT} well."

CONTENT: dict[str, set[str]] = {
    "batch_answers": {"body"},
    "batches": {"metadata"},
    "checkpoints": {"token_ids"},
    "events": {"fields"},
    "files": {"filename"},
    "idempotency_keys": {"body"},
    "items": {"body"},
    "responses": {"request"},
    "sessions": {"labels", "settings"},
    "tool_calls": {"arguments", "name", "output"},
    "turns": {"input", "made_with"},
}
"""By table: the columns that are made for what tenants and models say. All others must have nothing of it."""
FOLDERS = ("artifacts", "files", "exports")
"""The folders of the data folder that are made for what tenants send."""


@pytest.fixture
async def gateway(
    tmp_path: Path, tiny_model: Path, sqlite_template: Path, inspector: AdapterInspector
) -> AsyncIterator[Gateway]:
    """A gateway that traces every request."""
    shutil.copy(sqlite_template, tmp_path / "graftwork.db")
    settings = replace(gateway_settings(tmp_path, tiny_model), pepper=PEPPER, trace_share=1.0, batch_concurrency=0)
    async with open_gateway(settings, inspector) as gateway:
        yield gateway


class Searched:
    """A place that was searched, and what was found in it."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content

    def found(self, *marks: bytes) -> set[str]:
        """The places that have any of these marks."""
        return {place for place, content in self.content.items() if any(mark in content for mark in marks)}


def marks_of(*texts: str) -> tuple[bytes, ...]:
    return tuple(one.encode() for one in texts)


def token_marks(prompt: tuple[int, ...]) -> tuple[bytes, ...]:
    """A run of token ids of a prompt, as text and as the int32 of the database."""
    run = prompt[4:12]
    return (
        ", ".join(map(str, run)).encode(),
        ",".join(map(str, run)).encode(),
        struct.pack(f"<{len(run)}i", *run),
    )


async def columns_of(database: Database) -> Searched:
    """The values of every column of every table, by `table.column`."""
    content = dict[str, bytes]()
    async with database.read() as session:
        for name, table in Base.metadata.tables.items():
            rows = (await session.execute(text(f"SELECT * FROM {name}"))).mappings().all()
            for column in table.columns:
                content[f"{name}.{column.name}"] = b"\n".join(as_bytes(row[column.name]) for row in rows)
    content["request_traces.body"] = b"".join(zlib.decompress(one) for one in await traces_of(database))
    return Searched(content)


async def traces_of(database: Database) -> list[bytes]:
    async with database.read() as session:
        return list((await session.execute(text("SELECT body FROM request_traces"))).scalars())


def as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode()


def files_of(folder: Path) -> Searched:
    """Every file of a data folder but the database and the folders for content."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in FOLDERS]
    return Searched({path.name: path.read_bytes() for path in found if not path.name.startswith("graftwork.db")})


def archived(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files in all archives of a folder, by their names."""
    for path in folder.rglob("export_*"):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())


def log_of(caplog: pytest.LogCaptureFixture) -> Searched:
    """The lines that a gateway at the level debug has logged."""
    form = JsonFormatter().format
    own = [one for one in caplog.records if one.name.startswith("graftwork") or one.levelno >= logging.INFO]
    return Searched({f"log line {number}": form(record).encode() for number, record in enumerate(own)})


class Acts:
    """What a tenant does with marked texts, and the errors that it gets."""

    def __init__(self, gateway: Gateway, tenant: TestTenant) -> None:
        self.gateway = gateway
        self.tenant = tenant
        self.errors: list[str] = []

    async def post(self, path: str, body: object = None, **sent: Any) -> dict[str, Any]:
        """Returns the body of the answer; keeps it if it is an error."""
        if body is not None:
            sent["json"] = body
        answer = await self.tenant.client.post(path, **sent)
        if answer.status_code >= 400:
            self.errors.append(answer.text)
            return {}
        found: dict[str, Any] = answer.json() if "json" in answer.headers["content-type"] else {}
        return found

    async def all(self) -> None:
        self.gateway.engine.text = f"It is {ANSWER}."
        for part in (self.chats, self.sessions, self.batches, self.adapters, self.mistakes, self.failures):
            await part()
        await ended_export(self.tenant.client, f"/v1/exports/{(await self.post('/v1/exports'))['id']}")
        await self.gateway.resources.server.trace_store.flush()
        await self.gateway.resources.inference.accounting.backlog.flush()

    async def chats(self) -> None:
        messages = [{"role": "user", "content": TEXT}]
        chat: dict[str, Any] = {"model": "tiny", "messages": messages, "stop": [OUTPUT]}
        forms: tuple[dict[str, Any], ...] = (
            {},
            {"stream": True},
            {"logprobs": True, "top_logprobs": 2},
            {"user": PROMPT},
        )
        for more in forms:
            await self.post("/v1/chat/completions", chat | more)
        ids = list(text_tokenizer().encode(TEXT, allow_special=False))
        await self.post("/v1/completions", {"model": "tiny", "prompt": ids})
        await self.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "system": TEXT, "messages": messages})
        await self.post("/v1/embeddings", {"model": "tiny", "input": TEXT})
        await self.post("/v1/tokenize", {"text": TEXT})

    async def sessions(self) -> None:
        function = {"name": TOOL, "description": TOOL, "parameters": {"type": "object"}}
        session = await self.post(
            "/v1/sessions",
            {
                "model": "tiny",
                "instructions": TEXT,
                "metadata": {"about": PROMPT},
                "tools": [{"type": "function", "function": function}],
            },
            headers={"idempotency-key": "new session"},
        )
        self.gateway.engine.text = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"at": "{ANSWER}"}}}}\n</tool_call>'
        path = f"/v1/sessions/{session['id']}"
        new = {"input": TEXT, "sampling": {"stop": [OUTPUT]}}
        turn = await self.post(f"{path}/turns", new, headers={"idempotency-key": "new turn"})
        self.gateway.engine.text = f"It is {ANSWER}."
        call = turn["tool_calls"][0]["call_id"]
        await self.post(f"{path}/tool_outputs", {"outputs": [{"call_id": call, "output": OUTPUT}]})
        await self.post(f"{path}/fork", {})
        await self.post("/v1/responses", {"model": "tiny", "input": TEXT, "instructions": TEXT})
        await self.post("/v1/conversations", {"items": [{"role": "user", "content": TEXT}]})

    async def batches(self) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": TEXT}}
        upload = {"file": (f"{FILE}.jsonl", json.dumps(line).encode())}
        file = await self.post("/v1/files", data={"purpose": "batch"}, files=upload)
        batch = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"about": PROMPT}}
        await self.post("/v1/batches", batch | {"input_file_id": file["id"]})
        server, files = self.gateway.resources.server, self.gateway.resources.batches.files
        claims = BatchClaims(server.database, files, GatewayLease(), server.clock)
        (claimed,) = await claims.claim_some(1)
        assert await claims.answer(claimed, LineOutcome(1, False, json.dumps({"text": ANSWER}).encode()), None)

    async def adapters(self) -> None:
        good = weights_bytes(tensors(1))
        await self.post("/v1/adapters", data={"name": "pirate"}, files=uploaded(config_bytes(), good))
        for bad in (good[:-3], b"PK\3\4" + BROKEN.encode(), good + BROKEN.encode()):
            await self.post("/v1/adapters", data={"name": "bad"}, files=uploaded(config_bytes(), bad))
        await self.post("/v1/adapters", data={"name": "bad"}, files=uploaded(BROKEN.encode(), good))

    async def mistakes(self) -> None:
        path = "/v1/chat/completions"
        for content in ({"text": TEXT}, 7, [{"type": TEXT}], TEXT * 500):
            await self.post(path, {"model": "tiny", "messages": [{"role": "user", "content": content}]})
        await self.post(path, {"model": "tiny", "messages": [{"role": TEXT, "content": "x"}]})
        await self.post(path, {"model": "tiny", "messages": [], "temperature": TEXT})
        json_type = {"content-type": "application/json"}
        await self.post(path, content=f'{{"messages": "{BROKEN}'.encode(), headers=json_type)
        await self.post("/v1/sessions", {"model": "tiny", "metadata": {"about": [PROMPT]}})
        await self.post("/v1/files", data={"purpose": TEXT}, files={"file": (FILE, b"x")})

    async def failures(self) -> None:
        """Lets the engine refuse and break."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}
        engine = self.gateway.engine
        engine.refusal = CapacityContended("Full.", retry_after_s=1.0)
        await self.post("/v1/chat/completions", body)
        engine.refusal = None
        engine.breakage, engine.breaks_after = CapacityContended("Full.", retry_after_s=1.0), 2
        await self.post("/v1/chat/completions", body)
        session = (await self.post("/v1/sessions", {"model": "tiny"}))["id"]
        await self.post(f"/v1/sessions/{session}/turns", {"input": TEXT})
        engine.breakage = engine.breaks_after = None


def uploaded(config: bytes, weights: bytes) -> dict[str, tuple[str, io.BytesIO]]:
    return {"config": (FILE, io.BytesIO(config)), "weights": (FILE, io.BytesIO(weights))}


def declared() -> Iterator[str]:
    for table, columns in CONTENT.items():
        yield from (f"{table}.{column}" for column in columns)


async def test_content_is_where_it_belongs_and_nowhere_else(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Marked texts and token ids are in the columns that are made for content, in each of them, and in nothing else that
    the gateway stores, logs or answers to mistakes.
    """
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="graftwork")
    tenant = await gateway.tenant()
    acts = Acts(gateway, tenant)
    await acts.all()

    columns = await columns_of(gateway.resources.server.database)
    log = log_of(caplog)
    tokens = token_marks(
        next(one.prompt_token_ids for one in gateway.engine.requests if len(one.prompt_token_ids) > 20)
    )
    weights = weights_bytes(tensors(1))[-96:]
    marks = (*marks_of(*TEXTS), *tokens, weights)
    assert len(acts.errors) > 10
    assert len(log.content) > 30
    assert await traces_of(gateway.resources.server.database)
    assert columns.found(*marks) == set(declared())
    assert log.found(*marks) == set()
    assert files_of(tmp_path).found(*marks) == set()
    assert Searched({error: error.encode() for error in acts.errors}).found(*tokens, weights) == set()


async def test_no_secret_is_stored(gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither an API key, nor the admin key, nor the pepper is in any column, in any file but its own, or in the log."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="graftwork")
    tenant = await gateway.tenant()
    acts = Acts(gateway, tenant)
    await acts.all()
    path = f"/v1/admin/tenants/{tenant.id}/keys"
    made = (await gateway.admin.post(path, json={"name": "b"}, headers={"idempotency-key": "k"})).json()["key"]
    for wrong in (tenant.key[:-1] + "x", made + "x"):
        acts.errors.append((await gateway.client(wrong).get("/v1/models")).text)

    secrets = marks_of(PEPPER, ADMIN_KEY.rsplit("_", 1)[1], *(key.split("_")[2] for key in (tenant.key, made)))
    archives = Searched(dict(archived(tmp_path / "exports")))
    assert archives.found(*marks_of(PROMPT))
    assert (await columns_of(gateway.resources.server.database)).found(*secrets) == set()
    assert files_of(tmp_path).found(*secrets) == set()
    assert archives.found(*secrets) == set()
    assert log_of(caplog).found(*secrets) == set()
    assert Searched({error: error.encode() for error in acts.errors}).found(*secrets) == set()


async def test_one_logged_prompt_is_found(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """The search sees a prompt, and token ids, in one line of the log."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, logger="graftwork")
    await (await gateway.tenant()).client.post("/v1/completions", json={"model": "tiny", "prompt": TEXT})
    prompt = gateway.engine.requests[-1].prompt_token_ids
    assert log_of(caplog).found(*marks_of(PROMPT), *token_marks(prompt)) == set()

    logging.getLogger("graftwork.sessions").debug("asked", extra={"prompt": TEXT})
    logging.getLogger("graftwork.sessions").debug("asked", extra={"tokens": list(prompt)})

    assert len(log_of(caplog).found(*marks_of(PROMPT))) == 1
    assert len(log_of(caplog).found(*token_marks(prompt))) == 1
