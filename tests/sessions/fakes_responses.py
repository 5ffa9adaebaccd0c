"""Responses over the scripted engine of the session tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.handle import ResponseRun
from graftwork.sessions.responses.input import read_input
from graftwork.sessions.responses.record import ResponseOrder
from graftwork.sessions.responses.service import ResponseService
from tests.sessions.fakes_sessions import World, call

CALLS = call("get_weather", city="Oslo") + "\n" + call("get_weather", city="Rome")
"""An answer of two calls."""


@dataclass
class Responses:
    """The service on one process's world, and orders in short."""

    world: World

    def __post_init__(self) -> None:
        self.service = ResponseService(self.world.database, self.world.service, self.world.clock)

    async def start(
        self, by: Principal, said: str | Sequence[dict[str, Any]] = "Hi", *, model: str = "tiny", **fields: Any
    ) -> ResponseRun:
        """`fields`: those of the order, or settings."""
        of_order = ("is_stored", "is_background", "previous_response_id", "conversation_id")
        order = {name: fields.pop(name) for name in of_order if name in fields}
        echo = {"store": order.get("is_stored", True), "background": order.get("is_background", False), "model": model}
        return await self.service.create(
            by, ResponseOrder(model, read_input(said), SessionSettings(**fields), echo, **order)
        )

    async def ask(self, by: Principal, said: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> dict[str, Any]:
        """The response at its end, its asker served."""
        run = await self.start(by, said, **fields)
        body = await run.result()
        await run.let_go()
        return body


async def count_rows(database: Database) -> dict[str, int]:
    """How many rows each table of the sessions' has."""
    names = ("sessions", "turns", "checkpoints", "items", "tool_calls", "events", "responses")
    async with database.read() as session:
        return {name: await session.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in names}


def outputs(body: dict[str, Any], output: str = "cold") -> list[dict[str, Any]]:
    """An answer to every call that a response ended with."""
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": output} for item in calls]
