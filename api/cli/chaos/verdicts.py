"""Compares what the clients of a fleet were told with what its database has: turns, events and bills.

Owns the comparison. Each function returns one line for each thing that is wrong; no line means that all is right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from graftwork.api.cli.chaos.agent_streams import StreamingAgent
from graftwork.api.cli.chaos.fleet import Fleet
from graftwork.api.cli.chaos.fleet_clients import ChatClient, SessionClient

_CUT_WITHIN_S = 25.0
"""A stream may be cut within so many seconds of a gateway's death or stop: a client waits that long for a stopped one."""


class Database(Protocol):
    """A database that can be read by SQL."""

    async def query(self, statement: str, *arguments: object) -> Sequence[Mapping[str, Any]]: ...


async def wrong_chat_bills(database: Database, clients: Sequence[ChatClient]) -> list[str]:
    """Each delivered token of a chat is billed once, unless the server said that the chat failed; then none is."""
    rows = await database.query("SELECT * FROM usage_events WHERE session_id IS NULL")
    billed = {row["request_id"]: row["completion_tokens"] for row in rows}
    found = []
    for told in (told for client in clients for told in client.told):
        tokens = billed.get(told.request_id, 0)
        expected = 0 if told.end == "failed" else told.num_tokens
        if tokens < expected or (tokens > expected and told.end != "cut"):
            found.append(f"the chat {told.request_id} ({told.end}) is billed {tokens} tokens, not {expected}")
    return found


async def wrong_turn_bills(database: Database, clients: Sequence[SessionClient]) -> list[str]:
    """Each completed turn is billed once, as its client was told; a failed turn is not, unless it was interrupted."""
    rows = await database.query("SELECT * FROM usage_events WHERE session_id <> ''")
    billed = {row["request_id"]: row for row in rows}
    found = []
    for client in clients:
        for turn_id, usage in client.completed.items():
            row, told = billed.get(turn_id), (usage["prompt_tokens"], usage["completion_tokens"])
            own = None if row is None else (row["prompt_tokens"], row["completion_tokens"])
            if own != told:
                found.append(f"the turn {turn_id} is billed {own}, not {told}")
        for turn_id in client.failed & billed.keys():
            row = billed[turn_id]
            if row["outcome"] != "interrupted" and row["prompt_tokens"] + row["completion_tokens"]:
                found.append(f"the failed turn {turn_id} is billed: {dict(row)}")
    known = {turn_id for client in clients for turn_id in (*client.completed, *client.failed)}
    unknown = [turn_id for turn_id, row in billed.items() if turn_id not in known and row["outcome"] == "completed"]
    return found + [f"the turn {turn_id} is billed, and no client knows it" for turn_id in unknown]


async def lost_turns(database: Database, clients: Sequence[SessionClient]) -> list[str]:
    """The server has exactly the messages that clients were told, and no turn runs for ever."""
    found = []
    for client in clients:
        for session_id, said in client.said.items():
            stored = await client.stored(session_id)
            if stored != said:
                found.append(f"of {len(said)} messages of {session_id} the server has {len(stored)}, or others")
    stored_ids = {row["id"] for row in await database.query("SELECT id FROM turns WHERE status = 'completed'")}
    told_ids = {turn_id for client in clients for turn_id in client.completed}
    found += [f"the completed turn {turn_id} is lost" for turn_id in sorted(told_ids - stored_ids)]
    found += [f"the turn {turn_id} was completed, and no client knows it" for turn_id in sorted(stored_ids - told_ids)]
    running = await database.query("SELECT id FROM turns WHERE status = 'running'")
    return found + [f"the turn {row['id']} never ended" for row in running]


async def wrong_events(agents: Sequence[StreamingAgent]) -> list[str]:
    """Each agent got every event of its turns once, in order, and as the server has stored it."""
    found = [line for agent in agents for line in agent.out_of_order]
    for agent in agents:
        for session_id, events in agent.events.items():
            turns = {event[3] for event in events}
            stored = [event for event in await agent.stored_events(session_id) if event[3] in turns]
            if stored != events:
                number = next((one[0] for one, other in zip(events, stored, strict=False) if one != other), "the last")
                found.append(f"{session_id}: from event {number} on, the client got others than are stored")
    return found


def untyped_ends(fleet: Fleet, agents: Sequence[StreamingAgent], chats: Sequence[ChatClient]) -> list[str]:
    """Each stream finishes or fails with a typed error, unless its gateway was killed or stopped."""
    struck = {url: gateway.struck_at for url, gateway in zip(fleet.urls, fleet.gateways, strict=True)}
    failed = [turn for agent in agents for turn in agent.turns if turn.last.get("type") == "turn.failed"]
    cut = [told for client in chats for told in client.told if told.end == "cut"]
    return [
        f"the turn {turn.turn_id} failed without a code: {turn.last}"
        for turn in failed
        if not (turn.last.get("error") or {}).get("code")
    ] + [
        f"the chat {told.request_id} was cut, and its gateway was not"
        for told in cut
        if not any(at - 1.0 <= told.ended_at <= at + _CUT_WITHIN_S for at in struck.get(told.url, ()))
    ]
