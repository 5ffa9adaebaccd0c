"""Responses on the scripted engine of the session tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from graftwork.platform.database import Database
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.session import SessionSettings
from graftwork.sessions.responses.handle import ResponseHandle
from graftwork.sessions.responses.input import read_input
from graftwork.sessions.responses.record import NewResponse
from graftwork.sessions.responses.service import ResponseService
from tests.sessions.session_process import SessionProcess, call

CALLS = call("get_weather", city="Oslo") + "\n" + call("get_weather", city="Rome")
"""An answer with two calls."""


@dataclass
class ResponsesDriver:
    """The response service of one process, with short methods for tests."""

    process: SessionProcess

    def __post_init__(self) -> None:
        self.made: list[tuple[Principal, str]] = []
        self.service = ResponseService(self.process.database, self.process.service, self.process.clock)

    async def start(
        self, by: Principal, said: str | Sequence[dict[str, Any]] = "Hi", *, model: str = "tiny", **fields: Any
    ) -> ResponseHandle:
        """Start a response. `fields` are fields of NewResponse or settings."""
        of_order = ("is_stored", "is_background", "previous_response_id", "conversation_id")
        order = {name: fields.pop(name) for name in of_order if name in fields}
        echo = {"store": order.get("is_stored", True), "background": order.get("is_background", False), "model": model}
        return await self.service.create(
            by, NewResponse(model, read_input(said), SessionSettings(**fields), echo, **order)
        )

    async def ask(self, by: Principal, said: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> dict[str, Any]:
        """Create a response, wait for its end, and release it."""
        run = await self.start(by, said, **fields)
        body = await run.result()
        await run.release()
        self.made.append((by, body["id"]))
        return body

    async def delete_all(self) -> None:
        """Delete each response that `ask` has made."""
        for by, response_id in self.made:
            await self.service.delete(by, response_id)


async def count_rows(database: Database) -> dict[str, int]:
    """Count the rows of each table of sessions."""
    names = ("sessions", "turns", "checkpoints", "items", "hidden_items", "tool_calls", "events", "responses")
    async with database.read() as session:
        return {name: await session.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in names}


def outputs(body: dict[str, Any], output: str = "cold") -> list[dict[str, Any]]:
    """One output for each call of a response."""
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": output} for item in calls]
