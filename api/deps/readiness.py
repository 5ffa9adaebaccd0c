"""Checks whether this gateway can serve.

The database must have the current schema and store a row, and the engine must generate a token.
Owns the latest result. Never changes what the database holds.
Each check makes the engine run the model once, and anyone can ask for a check without a key. So each result stays valid
for one second, and only one check runs at a time.
"""

import asyncio
from contextlib import aclosing
from typing import Any

from graftwork.api.deps.resources import ServerResources
from graftwork.engine.core.events import TokensGenerated
from graftwork.engine.core.requests import EngineRequest, ServiceTier
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.fleet.client import FleetClient
from graftwork.platform.errors import CapacityContended, GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId, new_id
from graftwork.platform.modes.modes import ModeSwitch

_FRESH_S = 1.0
_ANSWER_WITHIN_S = 10.0
_ISOLATION = IsolationDomain(b"graftwork readiness")


class Readiness:
    """Checks whether the database and the engine work, and keeps the latest result for one second."""

    def __init__(self, resources: ServerResources, modes: ModeSwitch) -> None:
        self._resources = resources
        self._modes = modes
        self._head = resources.database.head_revision()
        self._checking = asyncio.Lock()
        self._problems: dict[str, str] = {}
        self._checked_at: float | None = None

    async def problems(self) -> dict[str, str]:
        """Returns the problem of each part of the server that does not work, by the part's name.

        The result is empty if all parts work.
        """
        async with self._checking:
            now = self._resources.clock.monotonic()
            if self._checked_at is None or now - self._checked_at >= _FRESH_S:
                parts: dict[str, Any] = {"database": self._database(), "engine": self._engine()}
                answers = await asyncio.gather(*parts.values())
                self._problems = {part: answer for part, answer in zip(parts, answers, strict=True) if answer}
                self._checked_at = self._resources.clock.monotonic()
            return self._problems

    def degraded_modes(self) -> list[str]:
        """Returns the degraded modes that this gateway applies, such as `refuse_flex`."""
        return self._modes.current.in_force()

    async def _database(self) -> str | None:
        try:
            current = await self._resources.database.current_revision()
            await self._resources.database.check_writable()
        except GraftworkError as error:
            return error.message
        head = self._head
        return None if current == head else f"The schema is at {current}, not at {head}: run `graftwork db upgrade`."

    async def _engine(self) -> str | None:
        engine = self._resources.engine
        if isinstance(engine, FleetClient) and engine.demand is not None:
            return None  # the next request starts an engine; a token here would keep the last one from ending
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                return await self._make_a_token()
        except TimeoutError:
            return f"The engine made no token within {_ANSWER_WITHIN_S:.0f} seconds."
        except CapacityContended:
            return None  # a busy engine is ready
        except GraftworkError as error:
            return error.message

    async def _make_a_token(self) -> str | None:
        request = EngineRequest(
            request_id=RequestId(new_id("ready")),
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            domain=_ISOLATION,
            tier=ServiceTier.PRIORITY,
        )
        async with aclosing(self._resources.engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, TokensGenerated):
                    return None
        return "The engine ended a request without a token."
