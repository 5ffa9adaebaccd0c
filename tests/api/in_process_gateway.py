"""A whole gateway in one process, over a fake engine: its resources, its application, and clients for it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from graftwork.adapters.inspection.inspector import AdapterInspector
from graftwork.api.deps.resources import Resources
from graftwork.api.server.app import create_app
from graftwork.api.server.wiring import open_resources
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.limit_book import LimitOwner
from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.fake_engine import CONTEXT_TOKENS, END, FakeEngine
from tests.sessions.tokenizer_and_templates import CHATML, SPECIAL_NAMES, tokenizer_json

ADMIN_KEY = "gwa_operator_0123456789abcdef"


@dataclass
class Gateway:
    """One running gateway."""

    app: FastAPI
    resources: Resources
    engine: FakeEngine
    clock: ManualClock
    anonymous: httpx.AsyncClient

    def client(self, key: str) -> httpx.AsyncClient:
        """The same connection with a key."""
        transport = httpx.ASGITransport(app=self.app)
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://gateway.test", headers=headers)

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.client(ADMIN_KEY)

    async def store_usage(self) -> None:
        """Stores the usage of all requests that have ended, so that tables and metrics have it."""
        await self.resources.inference.accounting.backlog.flush()

    async def tenant(self, name: str = "Acme", quota: Quota | None = None, tier: str = "default") -> "TestTenant":
        """A new tenant with one key."""
        tenant = await self.resources.account.tenancy.create_tenant(name, service_tier_ceiling=tier)
        _, key = await self.resources.account.tenancy.create_key(tenant.id, "first")
        if quota is not None:
            await self.resources.account.tenancy.limits.set(LimitOwner.tenant(tenant.id), quota)
        return TestTenant(tenant.id, key, self.client(key))


@dataclass
class TestTenant:
    """A tenant with its key and client."""

    __test__ = False

    id: TenantId
    key: str
    client: httpx.AsyncClient

    async def push_adapter(self, name: str = "pirate", seed: int = 0) -> dict[str, Any]:
        answer = await self.client.post("/v1/adapters", data={"name": name}, files=adapter_upload(seed))
        assert answer.status_code == 201, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def usage(self, group_by: str = "key") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self.client.get(f"/v1/usage?group_by={group_by}")).json()["data"]
        return rows


def adapter_upload(seed: int = 0) -> dict[str, tuple[str, bytes]]:
    return {
        "config": ("adapter_config.json", config_bytes()),
        "weights": ("../../etc/passwd", weights_bytes(tensors(seed))),
    }


@asynccontextmanager
async def open_gateway(
    settings: Settings, inspector: AdapterInspector | None = None, engine: FakeEngine | None = None
) -> AsyncGenerator[Gateway, None]:
    """Runs a gateway over a fake engine. Several gateways may share `inspector`."""
    engine, clock = engine or FakeEngine(), ManualClock()
    async with AsyncExitStack() as stack:
        resources = await stack.enter_async_context(
            open_resources(settings, engine=engine, clock=clock, inspector=inspector)
        )
        app = create_app(settings, resources=resources)
        transport = httpx.ASGITransport(app=app)
        client = httpx.AsyncClient(transport=transport, base_url="http://gateway.test")
        yield Gateway(app, resources, engine, clock, await stack.enter_async_context(client))


def gateway_settings(data_dir: Path, model: Path, database_url: str | None = None) -> Settings:
    """`database_url` of None is a file in `data_dir`."""
    return Settings(
        data_dir=data_dir, model=model, database_url=database_url, admin_key=ADMIN_KEY, pepper="a pepper for tests"
    )


def write_model_folder(path: Path, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """Writes the files of a model that a gateway reads: all but the weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"max_position_embeddings": context_tokens, "eos_token_id": END}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps(SPECIAL_NAMES))
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def chat(content: str = "What is the weather?", **fields: Any) -> dict[str, Any]:
    """A chat.completions body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


async def ended_export(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Waits until an export has ended, and returns it."""
    while True:
        export: dict[str, Any] = (await client.get(path)).json()
        if export["status"] in ("completed", "failed"):
            return export
        await asyncio.sleep(0)


def data_lines(text: str) -> list[str]:
    """Returns the texts after `data: ` in a stream."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def chunks(text: str) -> list[dict[str, Any]]:
    """Returns the chunks of an OpenAI stream that ended well."""
    lines = data_lines(text)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def session_frames(text: str) -> list[dict[str, str]]:
    """Returns the fields of each server-sent event."""
    blocks = [block for block in text.split("\n\n") if block]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
