"""Checks what a server or client talks to, for `graftwork doctor`: its port, the database, Redis, a running server.

Each check returns what it found, or raises Amiss with what to do. None waits for longer than some seconds.
"""

import asyncio
import os
import socket
import time

import graftwork
from graftwork.api.cli.doctor.findings import Amiss, warning
from graftwork.platform.settings.settings import Settings

_WITHIN_S = 5.0
_MOST_SKEW_S = 5.0


def check_port(settings: Settings) -> str:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    shown = f"{settings.host}:{settings.port}"
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as error:
        if is_graftwork(f"http://{settings.host}:{settings.port}/healthz"):
            raise warning(
                f"a Graftwork server answers at {shown} already", "Stop it before another one starts there."
            ) from error
        advice = "Choose another with --port, or end the process that has it (ss -ltnp shows it)."
        raise Amiss(f"{shown} cannot be listened on: {error.strerror}", advice) from error
    return f"{shown} is free"


def is_graftwork(url: str) -> bool:
    import httpx

    try:
        return bool(httpx.get(url, timeout=_WITHIN_S, trust_env=False).json() == {"status": "ok"})
    except (httpx.TransportError, ValueError):
        return False


def check_database(settings: Settings) -> str:
    from graftwork.platform.database import Database

    if settings.database_url is None and not (settings.data_dir / "graftwork.db").exists():
        return f"SQLite will be made in {settings.data_dir} at the first start"

    async def revisions() -> tuple[str | None, str | None]:
        database = Database(settings.resolved_database_url)
        try:
            async with asyncio.timeout(_WITHIN_S):
                return await database.current_revision(), database.head_revision()
        finally:
            await database.close()

    kind = "SQLite" if settings.database_url is None else settings.database_url.partition("://")[0]
    try:
        current, head = asyncio.run(revisions())
    except TimeoutError as error:
        raise Amiss(f"{kind} does not answer in {_WITHIN_S:.0f} s", "Start it, or correct --database-url.") from error
    if current != head:
        raise warning(
            f"{kind} has the schema {current or 'of no table'}, and this version needs {head}",
            "A gateway brings it to head at its start; to do it now, graftwork db upgrade.",
        )
    return f"{kind} answers, its schema is at head ({head})"


def check_redis(settings: Settings) -> str:
    if settings.redis_url is None:
        return "not used: limits are those of one gateway"
    from graftwork.platform.quotas.redis_connection import redis_time

    before = time.time()
    theirs = asyncio.run(redis_time(settings.redis_url, _WITHIN_S))
    skew = abs(theirs - (before + time.time()) / 2)
    if skew > _MOST_SKEW_S:
        raise warning(f"Redis answers, and its clock differs by {skew:.0f} s", "Synchronise both machines' clocks.")
    return f"Redis answers in {(time.time() - before) * 1000:.0f} ms"


def check_server() -> str:
    """Checks the server that client commands would ask, with the keys that they would send."""
    import httpx

    from graftwork.api.sdk.client import Graftwork

    with Graftwork(timeout=_WITHIN_S, max_retries=0) as client:
        try:
            answer = httpx.get(f"{client.base_url}/version", timeout=_WITHIN_S).json()["version"]
        except (httpx.TransportError, ValueError, KeyError) as error:
            advice = "Start one (graftwork serve --demo), or set GRAFTWORK_URL; a server's machine needs none."
            raise warning(f"no server answers at {client.base_url}", advice) from error
        if answer != graftwork.__version__:
            advice = "Install the same version on both ends if a command fails."
            raise warning(f"{client.base_url} runs {answer}, and this is {graftwork.__version__}", advice)
        keys = [name for name in ("API_KEY", "ADMIN_KEY") if os.environ.get(f"GRAFTWORK_{name}")]
        if not keys:
            raise warning(f"{client.base_url} answers; no key is set", "Set GRAFTWORK_API_KEY or GRAFTWORK_ADMIN_KEY.")
        if "API_KEY" in keys:
            client.models.list()
        if "ADMIN_KEY" in keys:
            client.admin.tenants.list(limit=1)
        return f"{client.base_url} answers and takes the key{'s' if len(keys) > 1 else ''}"
