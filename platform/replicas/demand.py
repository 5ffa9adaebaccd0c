"""Lets gateways ask for an engine of a model that has none at present.

    supervisor ──(offer, at each look)──► row of the model ◄──(ask, when a request waits)── gateway
        └──(was_asked)──► starts an engine        └──(is_offered)──► requests wait, in place of a 503

Owns the rows. All times are the database's. Never starts an engine.
"""

from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.replicas import repository

ASKED_WITHIN_S = 5.0
"""A supervisor that looks each second sees each question for so many seconds, also if a look fails."""


class EngineDemands:
    """What is asked and offered for one model."""

    def __init__(self, database: Database, model: str, lease_s: float, clock: Clock | None = None) -> None:
        """`model` is the model's name for clients. An offer holds for `lease_s` seconds. `clock` replaces the database's
        time in tests.
        """
        self._database = database
        self._model = model
        self._lease_s = lease_s
        self._clock = clock

    async def offer(self) -> None:
        """Stores that an engine is started when it is asked for. Repeat this within the length of a lease."""
        async with self._database.write() as session:
            await repository.put_demand(session, self._model, "offered_at", self._clock)

    async def ask(self) -> None:
        """Stores that a request waits for an engine now."""
        async with self._database.write() as session:
            await repository.put_demand(session, self._model, "asked_at", self._clock)

    async def is_offered(self) -> bool:
        """Returns whether somebody starts an engine when it is asked for."""
        async with self._database.read() as session:
            return await repository.has_demand(session, self._model, "offered_at", self._lease_s, self._clock)

    async def was_asked(self) -> bool:
        """Returns whether a gateway has asked for an engine in the last `ASKED_WITHIN_S` seconds."""
        async with self._database.read() as session:
            return await repository.has_demand(session, self._model, "asked_at", ASKED_WITHIN_S, self._clock)
