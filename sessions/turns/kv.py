"""A session's KV, between its turns: held while tools run, fetched before it goes on, given up when it is over.

Owns how a session is named to the engine. Never stores anything: KV is a cache of the log, so an engine that does
not answer costs time and nothing else, and is never an error here.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.requests import SessionKey
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.platform.errors import GraftworkError
from graftwork.platform.tenancy.principals import isolation_of
from graftwork.sessions.core.session import AgentSession
from graftwork.sessions.generation.public_prefixes import PublicPrefixes

_log = logging.getLogger("graftwork.sessions")


@dataclass(frozen=True, slots=True)
class History:
    """A session's tokens up to its head, as its engine knows them."""

    session: AgentSession
    token_ids: Sequence[int]


class SessionKv:
    """Tends the KV of all sessions, on one engine."""

    def __init__(self, engine: EngineClient, pepper: bytes, public_prefixes: PublicPrefixes) -> None:
        self._engine = engine
        self._pepper = pepper
        self._public_prefixes = public_prefixes

    async def hold(self, history: History, waits: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """A turn has ended, with calls of these tools."""
        return await self._tend(SessionVerb.HOLD, history, tuple(waits))

    async def prefetch(self, history: History, answered: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """The session goes on soon; these tools have answered, or all that it waited for if none is named."""
        return await self._tend(SessionVerb.PREFETCH, history, tuple(answered))

    async def suspend(self, history: History) -> SessionMemory | None:
        """The session does not go on soon."""
        return await self._tend(SessionVerb.SUSPEND, history)

    async def close(self, history: History) -> SessionMemory | None:
        """The session is over, or this history of it."""
        return await self._tend(SessionVerb.CLOSE, history)

    async def read(self, history: History) -> SessionMemory | None:
        """Where it is."""
        return await self._tend(SessionVerb.READ, history)

    async def _tend(
        self, verb: SessionVerb, history: History, waits: tuple[ToolWait, ...] = ()
    ) -> SessionMemory | None:
        """What the engine says; None where none answers."""
        command = SessionCommand(
            verb=verb,
            session=SessionKey(history.session.session_id),
            domain=isolation_of(history.session.tenant_id, self._pepper),
            adapters=history.session.model.adapters,
            token_ids=tuple(history.token_ids),
            waits=waits,
            public_tokens=self._public_prefixes.tokens_of(history.token_ids),
        )
        try:
            return await self._engine.run_session_command(command)
        except GraftworkError as error:
            _log.info("session_kv_untended", extra={"verb": verb, "reason": error.message})
            return None
