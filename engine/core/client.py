"""The engine as the rest of the platform sees it."""

from collections.abc import AsyncGenerator
from typing import Protocol

from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.ids import IsolationDomain


class EngineClient(Protocol):
    """One engine process. Every failure is a `GraftworkError`."""

    async def describe(self) -> EngineDescription:
        """What model this is. Raises CapacityAbsent while no engine answers."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Continue one sequence; closing the generator early cancels the request and frees its pages.

        Raises InvalidRequest, NotFound (no such adapter), CapacityContended (queue full, with the seconds to
        wait), CapacityAbsent (the engine is gone).
        """
        ...

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        """Hold, fetch or give up the KV of a session between its turns, and say where it is.

        Raises CapacityAbsent while no engine answers; nothing is lost then but time.
        """
        ...

    async def stats(self) -> EngineStats:
        """A reading of the gauges and counters."""
        ...

    async def probe_adapter(self, digest: str) -> None:
        """Prove that the engine applies this stored adapter as its matrices say, before anyone is served with it.

        Raises NotFound without its files, and ValidationFailed where the engine cannot apply it exactly.
        """
        ...

    async def forget_adapter(self, digest: str) -> None:
        """Free an adapter's memory once the requests that use it have ended; new ones may load it again."""
        ...

    async def forget_domain(self, domain: IsolationDomain) -> None:
        """Give up all KV of an isolation domain, in memory and in files; its requests that still run go on.

        Raises CapacityAbsent while no engine answers; what lies in files is then found again by the next one.
        """
        ...

    async def close(self) -> None:
        """Close the connection; the engine cancels whatever it still served for it."""
        ...
