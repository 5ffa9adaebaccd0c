"""Defines the interface through which gateways use the engine.

Owns only the protocol. engine/rpc/client.py implements it. Handles token ids and adapter digests, never text or
tenants. Invariant: every failure is a `GraftworkError`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.ids import IsolationDomain


class EngineClient(Protocol):
    """A gateway's connection to one engine process."""

    async def describe(self) -> EngineDescription:
        """Returns a description of the served model. Raises Unavailable while no engine answers."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one request and yields its events. Closing the generator early cancels the request and frees its pages.

        Raises InvalidRequest if the engine cannot run the request, NotFound if an adapter does not exist,
        CapacityContended if the queue is full (the error says when to retry), or Unavailable if the engine is gone.
        """
        ...

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        """Runs a command on the KV of a session between its turns. Returns on which tiers the KV is afterwards.

        Raises Unavailable while no engine answers. The session works without the command, but its next turn starts
        later.
        """
        ...

    async def stats(self) -> EngineStats:
        """Reads all counters and gauges of the engine."""
        ...

    async def probe_adapter(self, digest: str) -> None:
        """Checks that the engine applies a stored adapter exactly as its matrices define it.

        Raises NotFound if the adapter's files are missing, and ValidationFailed if the engine cannot apply it exactly.
        """
        ...

    async def forget_adapter(self, digest: str) -> None:
        """Frees the memory of an adapter when no request uses it any more. A later request loads the adapter again."""
        ...

    async def forget_domain(self, domain: IsolationDomain) -> None:
        """Drops all cached KV of an isolation domain (requests that may share cached KV), in memory and in files.

        The domain's running requests continue. Raises Unavailable while no engine answers. The files then stay on disk,
        and the engine finds them again at its next start.
        """
        ...

    async def close(self) -> None:
        """Closes the connection to the engine. The engine then cancels all requests that came over this connection."""
        ...
