"""Sends the engine commands for the KV of a session between two turns: hold, prefetch, suspend, close, change, read.

Owns the key under which the engine knows a session. Never stores anything.
The KV in the engine is only a cache of the stored history. So it is no error if the engine does not answer a command:
only the next turn takes longer.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.requests import KvFileKey, SessionKey
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.platform.encryption.kv_keys import TenantKvKeys
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.principals import isolation_of
from graftwork.sessions.core.session import AgentSession
from graftwork.sessions.text.encoding import PublicPrefixes
from graftwork.sessions.turns.settings import rolling_window

_log = logging.getLogger("graftwork.sessions")

_REMOVING = (SessionVerb.CLOSE, SessionVerb.CHANGE)


@dataclass(frozen=True, slots=True)
class History:
    """A session, with the token ids of its history up to the latest checkpoint."""

    session: AgentSession
    token_ids: Sequence[int]


class SessionKvClient:
    """Sends commands for the KV of sessions to one engine.

    Each method returns how much of the session's KV is on each cache tier. It returns None if the engine does not
    answer.
    """

    def __init__(
        self,
        engine: EngineClient,
        pepper: bytes,
        public_prefixes: PublicPrefixes,
        kv_keys: TenantKvKeys | None = None,
    ) -> None:
        """`kv_keys` has the keys of tenants' KV files; None lets engines write them plainly."""
        self._engine = engine
        self._kv_keys = kv_keys
        self._pepper = pepper
        self._public_prefixes = public_prefixes

    async def hold(self, history: History, waits: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """Asks the engine to keep the KV of a session after a turn, while the called tools run.

        `waits` has the tools that the turn called, and how long each tool usually takes.
        """
        return await self._send(SessionVerb.HOLD, history, tuple(waits))

    async def prefetch(self, history: History, answered: Iterable[ToolWait] = ()) -> SessionMemory | None:
        """Asks the engine to load the KV of a session to the device, before the session's next turn.

        `answered` has the tools whose outputs have arrived. An empty list means that all outputs have arrived.
        """
        return await self._send(SessionVerb.PREFETCH, history, tuple(answered))

    async def suspend(self, history: History) -> SessionMemory | None:
        """Asks the engine to move the KV of a session from the device to a slower cache tier."""
        return await self._send(SessionVerb.SUSPEND, history)

    async def close(self, history: History) -> SessionMemory | None:
        """Asks the engine to free the KV that only this session uses, for example when the session is closed."""
        return await self._send(SessionVerb.CLOSE, history)

    async def change_adapter(self, history: History) -> SessionMemory | None:
        """Asks the engine to free the KV that only this session uses, after its adapter has changed."""
        return await self._send(SessionVerb.CHANGE, history)

    async def read(self, history: History) -> SessionMemory | None:
        """Asks the engine how much of a session's KV is on each cache tier (device, host, disk). Changes nothing."""
        return await self._send(SessionVerb.READ, history)

    async def _send(
        self, verb: SessionVerb, history: History, waits: tuple[ToolWait, ...] = ()
    ) -> SessionMemory | None:
        try:
            return await self._engine.run_session_command(
                SessionCommand(
                    verb=verb,
                    session=SessionKey(history.session.session_id),
                    domain=isolation_of(history.session.tenant_id, self._pepper),
                    adapters=history.session.model.adapters,
                    token_ids=tuple(history.token_ids),
                    waits=waits,
                    public_tokens=self._public_prefixes.tokens_of(history.token_ids),
                    kv_key=await self._key(verb, history.session.tenant_id),
                    window=rolling_window(history.session.settings.sampling),
                )
            )
        except GraftworkError as error:
            _log.info("session_command_failed", extra={"verb": verb, "reason": error.message})
            return None

    async def _key(self, verb: SessionVerb, tenant_id: TenantId) -> KvFileKey | None:
        """Returns the key of the tenant's KV files, if the command may read or write them.

        To remove KV takes no key: the sessions of a deleted tenant are closed when its keys are gone.
        """
        if self._kv_keys is None or verb in _REMOVING:
            return None
        return KvFileKey(await self._kv_keys.of(tenant_id))
