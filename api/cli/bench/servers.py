"""Chooses the server that `graftwork bench` measures: the one at `--url`, or one of its own with the demo model.

Owns the processes of its own server, which end with the block. Never sends a chat.
"""

import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from graftwork.api.cli.bench.load import Target
from graftwork.api.cli.console.failures import require_modules
from graftwork.api.cli.demo.server import DemoServer, ServerFailed
from graftwork.api.sdk.client import AsyncGraftwork
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.platform.cores import beside_engine_cores
from graftwork.platform.settings.values import parse_cores


@dataclass(frozen=True, slots=True)
class Measured:
    """The server that is measured."""

    targets: Mapping[str, Target]
    """Where each tenant sends its requests. A server at `--url` sees one tenant, the owner of the key."""
    process_id: int | None = None
    """Of the server's first process; None if it was not started here."""


@asynccontextmanager
async def measured_server(
    url: str | None,
    key: str,
    model: str,
    weights: Mapping[str, float],
    settings: Mapping[str, str],
    *,
    keeps_off: bool = True,
) -> AsyncGenerator[Measured, None]:
    """Yields the server at `url`, or starts a demo server with these settings and a tenant with each name and weight.

    `settings` are for a server of its own, by name in lower case. With `engine_cores`, this thread keeps off these cores as
    well, as if the clients were on another machine; another server that starts inside the block could not use them then, so
    it needs `keeps_off=False`. Raises ConfigurationError if the server does not start.
    """
    if url is not None:
        target = Target(url.rstrip("/").removesuffix("/v1"), key, model)
        yield Measured(dict.fromkeys(weights, target))
        return
    require_modules("fastapi", "torch")  # the server's process needs them
    with tempfile.TemporaryDirectory(prefix="graftwork-bench-") as folder:
        server = DemoServer(Path(folder), settings=settings)
        try:
            with server_failures():
                await server.start()
            keys = await make_tenants(server.url, server.admin_key(), weights)
            targets = {name: Target(server.url, keys[name], model, weight=weight) for name, weight in weights.items()}
            cores = parse_cores(settings["engine_cores"]) if "engine_cores" in settings else ()
            with beside_engine_cores(cores) if cores and keeps_off else nullcontext():
                yield Measured(targets, server.process_id)
        finally:
            await server.stop()


@contextmanager
def server_failures() -> Iterator[None]:
    """Turns ServerFailed into a ConfigurationError, which a command shows as one message."""
    try:
        yield
    except ServerFailed as error:
        raise ConfigurationError(str(error)) from error


async def make_tenants(url: str, admin_key: str, weights: Mapping[str, float]) -> dict[str, str]:
    """Creates a tenant with each name and weight, without limits of its own. Returns a key of each."""
    keys = {}
    async with AsyncGraftwork(url, admin_key=admin_key) as client:
        for name, weight in weights.items():
            tenant = await client.admin.tenants.create(name=name, weight=weight)
            made = await client.admin.keys.create(tenant_id=tenant.id, name="bench")
            keys[name] = made.key or ""
    return keys


def parse_settings(given: Sequence[str]) -> dict[str, str]:
    """Returns settings of `--setting NAME=VALUE`. Raises ConfigurationError if one has another form."""
    pairs = [one.partition("=") for one in given]
    wrong = [one for one, (name, sign, _) in zip(given, pairs, strict=True) if not (name and sign)]
    if wrong:
        raise ConfigurationError(f"--setting {wrong[0]} has another form than NAME=VALUE, such as max_running=16.")
    return {name.strip().lower().removeprefix("graftwork_"): value.strip() for name, _, value in pairs}
