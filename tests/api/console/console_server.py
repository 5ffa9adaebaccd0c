"""A gateway on a real port, in a thread of its own, whose models follow a script: what the console's tests look at."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from graftwork.api.deps.resources import Resources
from graftwork.api.server.app import create_app
from graftwork.api.server.uvicorn_server import HttpServer, bind, url_of
from graftwork.api.server.wiring import open_resources
from graftwork.engine.fleet.client import FleetClient
from graftwork.engine.fleet.members import StaticMembers
from graftwork.platform.clock import SystemClock
from graftwork.platform.objectives import parse_objectives
from graftwork.platform.people.person import Identity
from graftwork.platform.people.roles import parse_grant
from graftwork.platform.settings.settings import Settings
from tests.api.console.console_model import CONTEXT_TOKENS, ConsoleModel
from tests.api.in_process_gateway import ADMIN_KEY, gateway_settings, write_model_folder

Result = TypeVar("Result")
_PATIENCE_S = 60


@dataclass
class ConsoleServer:
    """The running gateway. `run` works from the tests' thread."""

    url: str
    resources: Resources
    models: tuple[ConsoleModel, ...]
    """Its engines: one, unless the gateway was started with more."""
    loop: asyncio.AbstractEventLoop
    admin_key: str = ADMIN_KEY
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def model(self) -> ConsoleModel:
        return self.models[0]

    def run(self, work: Coroutine[Any, Any, Result], patience_s: float = _PATIENCE_S) -> Result:
        """Runs a coroutine on the gateway's loop, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(patience_s)

    def client(self, key: str) -> httpx.Client:
        """A client for the API with this key. The server closes it when it ends."""
        client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )
        self.clients.append(client)
        return client

    def tenant(self, name: str = "Acme", weight: float = 1.0) -> "ConsoleTenant":
        """A new tenant with one key."""
        tenancy = self.resources.account.tenancy
        tenant = self.run(tenancy.create_tenant(name, weight=weight))
        key, plaintext = self.run(tenancy.create_key(tenant.id, "first"))
        return ConsoleTenant(tenant.id, name, plaintext, key.id, self.client(plaintext))

    def ticket(self, name: str, *roles: str) -> str:
        """What the console's cookie holds for a new person with these roles, whose e-mail address is `name`."""
        people = self.resources.people
        identity = Identity("https://login.test", secrets.token_hex(8), name)
        person = self.run(people.people.add(identity.issuer, identity.subject, name))
        for role in roles:
            self.run(people.people.grant(person.id, parse_grant(role)))
        return self.run(people.sign_ins.open_console(identity, secrets.token_hex(8), 3600.0)).text


@dataclass(frozen=True)
class ConsoleTenant:
    """A tenant, its key, and a client for it."""

    id: str
    name: str
    key: str
    key_id: str
    client: httpx.Client


@contextmanager
def console_server(
    folder: Path, engines: int = 1, objectives: str = "", template: str | None = None, **changes: Any
) -> Iterator[ConsoleServer]:
    """Runs a gateway with its data in `folder`, over so many engines. `template` is another chat template.

    `changes` are settings that differ.
    """
    models = tuple(ConsoleModel() for _ in range(engines))
    model_folder = write_model_folder(folder / "tiny", CONTEXT_TOKENS)
    if template is not None:
        (model_folder / "chat_template.jinja").write_text(template)
    settings = gateway_settings(folder, model_folder)
    settings = replace(settings, objectives=parse_objectives(objectives), **changes)
    started: list[ConsoleServer] = []
    stop: list[Callable[[], None]] = []
    ready = threading.Event()
    failures: list[BaseException] = []

    def live() -> None:
        try:
            asyncio.run(_serve(settings, models, started, stop, ready))
        except BaseException as error:  # the tests' thread raises it
            failures.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=live, name="console-server")
    thread.start()
    ready.wait(_PATIENCE_S)
    if failures:
        raise failures[0]
    server = started[0]
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        server.loop.call_soon_threadsafe(stop[0])
        thread.join(_PATIENCE_S)


async def _serve(
    settings: Settings,
    models: tuple[ConsoleModel, ...],
    started: list[ConsoleServer],
    stop: list[Callable[[], None]],
    ready: threading.Event,
) -> None:
    by_address = {f"engine-{number}": model for number, model in enumerate(models)}
    fleet = FleetClient(StaticMembers([*by_address]), by_address.__getitem__, SystemClock())
    engine = fleet if len(models) > 1 else models[0]
    with bind("127.0.0.1", 0) as listening:
        async with open_resources(settings, engine=engine) as resources:
            server = HttpServer(create_app(settings, resources=resources), ready.set)
            started.append(ConsoleServer(url_of(listening), resources, models, asyncio.get_running_loop()))
            stop.append(server.stop)
            await server.serve(sockets=[listening])
