"""Defines the interface through which gateways (the processes that serve HTTP) use the engine.

Owns only the interface. engine/rpc/client.py implements it. The interface has token ids and adapter digests, never text
or tenants. Invariant: every failure is a `GraftworkError`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import EngineEvent
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.platform.ids import IsolationDomain

ENGINE_UNAVAILABLE = "engine_unavailable"
"""The code of the error for a lost or absent engine: its process or its loop is gone, and its requests with it."""


class EngineClient(Protocol):
    """A gateway's connection to one engine process."""

    async def describe(self) -> EngineDescription:
        """Returns a description of the model that the engine serves. Raises Unavailable if no engine answers."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Runs one request and yields its events. If the caller closes the generator early, the request is cancelled.

        A cancelled request frees its KV pages. Raises InvalidRequest if the engine cannot run the request, NotFound if
        an adapter does not exist, CapacityContended if the queue is full (the error says when to retry), Unavailable if
        the engine is gone or frozen, or DeadlineExceeded after `request.timeout_s` seconds.
        """
        ...

    def refuse_early(self, newcomer: Newcomer) -> None:
        """Raises CapacityContended, with the time to retry, if the engine would refuse the request whatever its prompt, by
        what it has said last: because its first token would come after its deadline, or because no more requests of its
        domain may wait. Asks nobody, so a refusal costs almost nothing.
        """
        ...

    async def stalled_s(self) -> float:
        """Returns for how many seconds the engine's loop has not advanced, 0 if it waits for work.

        The engine answers this without its loop. Raises Unavailable if the engine's process does not answer.
        """
        ...

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        """Runs a command on the cached KV of a session, between two turns of the session.

        Returns how much of the KV is on each tier (device, host, disk) afterwards. Raises Unavailable if no engine
        answers. The session still works if a command fails, but its next turn may start later.
        """
        ...

    async def stats(self) -> EngineStats:
        """Returns all counters and gauges of the engine."""
        ...

    async def probe_adapter(self, digest: str) -> None:
        """Checks that the engine computes the deltas that a stored adapter's matrices define.

        Raises NotFound if the adapter's files are missing, and ValidationFailed if the engine cannot apply the adapter
        correctly.
        """
        ...

    async def forget_adapter(self, digest: str) -> None:
        """Frees an adapter's memory in the engine, as soon as no request uses the adapter.

        A later request loads the adapter again.
        """
        ...

    async def forget_domain(self, domain: IsolationDomain) -> None:
        """Drops all that the engine keeps of an isolation domain (a group of requests that may share cached KV).

        That is its cached KV on all tiers, its stored answers, its compiled grammars and the names of its tools.
        Running requests of the domain continue. Raises Unavailable if no engine answers. In that case the KV files stay
        on disk, and the engine uses them again after its next start.
        """
        ...

    async def close(self) -> None:
        """Closes the connection to the engine. The engine then cancels all requests that came over this connection."""
        ...
