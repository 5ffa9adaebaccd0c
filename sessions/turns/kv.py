"""Sends the engine commands for a session's KV between its turns: hold, prefetch, suspend, close, change, read.

Owns the name of a session in the engine. Never stores anything.
KV (the model's stored work on a prompt) is only a cache of the stored history. So it is no error if the engine does not
answer: only the next turn takes longer.
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
from graftwork.sessions.text.prompt_encoder import PublicPrefixes

_log = logging.getLogger("graftwork.sessions")


@dataclass(frozen=True, slots=True)
class History:
    """A session, and the token ids of its history up to its latest checkpoint."""

    session: AgentSession
    token_ids: Sequence[int]


class SessionKvClient:
    """Sends the KV commands of all sessions to one engine. Its methods return None if the engine does not answer."""

    def __init__(self, engine: EngineClient, pepper: bytes, public_prefixes: PublicPrefixes) -> None:
        self._engine = engine
        self._pepper = pepper
        self._public_prefixes = public_prefixes

    async def hold(self, history: History, waits: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """Asks the engine to keep a session's KV after a turn.

        `waits` names the tools that the turn called, and how long each tool usually takes.
        """
        return await self._send(SessionVerb.HOLD, history, tuple(waits))

    async def prefetch(self, history: History, answered: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """Asks the engine to load the KV to the device for the next turn.

        `answered` lists the tools whose outputs have arrived. An empty list means all tools.
        """
        return await self._send(SessionVerb.PREFETCH, history, tuple(answered))

    async def suspend(self, history: History) -> SessionMemory | None:
        """Asks the engine to move the KV off the device."""
        return await self._send(SessionVerb.SUSPEND, history)

    async def close(self, history: History) -> SessionMemory | None:
        """Asks the engine to free the KV that only this session uses."""
        return await self._send(SessionVerb.CLOSE, history)

    async def change_adapter(self, history: History) -> SessionMemory | None:
        """Frees the KV of this history, because the session's adapter has changed."""
        return await self._send(SessionVerb.CHANGE, history)

    async def read(self, history: History) -> SessionMemory | None:
        """Returns how much of the KV is on each cache tier (device, host, disk)."""
        return await self._send(SessionVerb.READ, history)

    async def _send(
        self, verb: SessionVerb, history: History, waits: tuple[ToolWait, ...] = ()
    ) -> SessionMemory | None:
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
            _log.info("session_command_failed", extra={"verb": verb, "reason": error.message})
            return None
