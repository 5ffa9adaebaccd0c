"""What the encryption of rows costs a turn: CPU of the stores, user and system, with plain and with encrypted rows.

    python benchmarks/encrypted_rows.py [--rounds 7] [--turns 40] [--tokens 200] [--commits 24] [--database URL] [--json OUT]

In one process, on one database (by default a new SQLite file): a session runs turns one after another, whose answers of
`--tokens` tokens are stored in `--commits` groups of events. Each turn is what a gateway stores and reads: the transcript,
the beginning, the events, the end with its checkpoint and items, and a replay of the events. The two modes take turns, in
new sessions of new tenants, in an order that changes each round. CPU is that of the whole process, also SQLite's thread.
The ratio is taken within each round.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import describe_machine

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.clock import SystemClock
from graftwork.platform.database import Database
from graftwork.platform.encryption.master_keys import MasterKeyFile
from graftwork.platform.encryption.row_keys import encrypt_rows
from graftwork.platform.encryption.tenant_keys import TenantKeys
from graftwork.platform.ids import CheckpointId, KeyId, TenantId, TurnId, new_id
from graftwork.platform.settings.settings import async_database_url
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.events import EventDraft, EventType, number_events, output_text_delta, turn_created
from graftwork.sessions.core.items import message
from graftwork.sessions.core.session import AgentSession, SessionKind, SessionSettings, SessionStatus, TurnStatus
from graftwork.sessions.core.transcript import Checkpoint, Opening
from graftwork.sessions.store.event_log import EventBatch
from graftwork.sessions.store.session_store import SessionStore
from graftwork.sessions.store.turn_outcome import TurnOutcome
from graftwork.sessions.store.turn_store import TurnStore

_WORD = "harbour "
_PROMPT_TOKENS = 60
_SETTINGS = SessionSettings(instructions="You are a pilot of ships. " * 20)

_OPENING = Opening(_SETTINGS.instructions, ())


class Stores:
    """What a gateway stores turns with, in one mode."""

    def __init__(self, url: str, masters: MasterKeyFile | None) -> None:
        clock = SystemClock()
        self.database = Database(url)
        encrypt_rows(self.database, TenantKeys(self.database, clock, masters), clock)
        self.sessions = SessionStore(self.database, clock, 3600.0)
        self.turns = TurnStore(self.database, clock, "benchmark", 60.0)

    async def new_session(self) -> tuple[Principal, AgentSession]:
        tenant = TenantId(new_id("ten"))
        principal = Principal(tenant, "acme", KeyId("key_1"), 1.0, "default", frozenset({"inference"}))
        session = AgentSession(
            session_id=new_session_id(),
            tenant_id=tenant,
            kind=SessionKind.SESSION,
            status=SessionStatus.IDLE,
            model=ResolvedModel("tiny", None),
            settings=_SETTINGS,
            metadata={"about": "a benchmark"},
            created_at=time.time(),
            updated_at=time.time(),
        )
        return principal, await self.sessions.create(principal.scope(), session)

    async def run_turn(
        self, principal: Principal, session: AgentSession, arguments: argparse.Namespace
    ) -> AgentSession:
        """Stores and reads one turn. Returns the session after it."""
        scope, text = principal.scope(), _WORD * arguments.tokens
        history = await self.turns.transcript(scope, session, _OPENING)
        asked, answered = message("user", _WORD * _PROMPT_TOKENS), message("assistant", text)
        lease, turn = await self.turns.begin(principal, session, TurnId(new_id("turn")), [asked], _made_with())
        last_seq, piece = turn.first_seq - 1, _WORD * (arguments.tokens // arguments.commits)
        for number in range(arguments.commits):
            drafts = [turn_created(None)] if number == 0 else [output_text_delta(piece)]
            last_seq += len(drafts)
            events = number_events(drafts, session.session_id, turn.turn_id, last_seq)
            await self.turns.append([EventBatch(lease, events)])
        head = history.head
        checkpoint = Checkpoint(
            checkpoint_id=CheckpointId(new_id("ckp")),
            session_id=session.session_id,
            parent_id=session.head_id,
            turn_id=turn.turn_id,
            depth=1 if head is None else head.depth + 1,
            num_items=2 if head is None else head.num_items + 2,
            num_answer_items=1,
            num_tokens=len(history.token_ids) + _PROMPT_TOKENS + arguments.tokens,
            token_ids=tuple(range(1000, 1000 + _PROMPT_TOKENS + arguments.tokens)),
            closed=True,
            awaits_tools=False,
            created_at=time.time(),
            opening=_OPENING.digest,
        )
        done = EventDraft(EventType.TURN_COMPLETED, {"checkpoint_id": checkpoint.checkpoint_id})
        await self.turns.end(lease, TurnOutcome(TurnStatus.COMPLETED, [done], checkpoint, (asked, answered), "stop"))
        await self.turns.list_events(scope, session.session_id, turn.first_seq - 1, 1000)
        return await self.sessions.load(scope, session.session_id)


def new_session_id() -> Any:
    return new_id("ses")


def _made_with() -> Mapping[str, Any]:
    return {"base": "f" * 64, "adapter": None, "template": "a" * 64, "sampling": {"temperature": 0.7, "stop": []}}


async def cpu_of_turn(stores: Stores, arguments: argparse.Namespace) -> float:
    """Returns the CPU of a turn in milliseconds, the mean over a new session."""
    principal, session = await stores.new_session()
    session = await stores.run_turn(principal, session, arguments)
    started = time.process_time()
    for _ in range(arguments.turns):
        session = await stores.run_turn(principal, session, arguments)
    return (time.process_time() - started) / arguments.turns * 1e3


async def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        url = async_database_url(arguments.database or f"sqlite+aiosqlite:///{folder}/graftwork.db")
        modes = {
            "plain": Stores(url, None),
            "encrypted": Stores(url, MasterKeyFile.create(Path(folder) / "master.key")),
        }
        await modes["plain"].database.upgrade_to_head()
        rounds = list[dict[str, float]]()
        for number in range(arguments.rounds):
            order = sorted(modes, reverse=number % 2 == 0)
            rounds.append({name: await cpu_of_turn(modes[name], arguments) for name in order})
        for stores in modes.values():
            await stores.database.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=40, help="of one session in one round")
    parser.add_argument("--tokens", type=int, default=200, help="of one answer")
    parser.add_argument("--commits", type=int, default=24, help="of the events of one turn")
    parser.add_argument("--database", help="the address of an empty database (default: a new SQLite file)")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    rounds = asyncio.run(measure(arguments))
    ratios = [one["encrypted"] / one["plain"] for one in rounds]
    found = {
        "plain_ms": statistics.median(one["plain"] for one in rounds),
        "encrypted_ms": statistics.median(one["encrypted"] for one in rounds),
        "ratio": statistics.median(ratios),
        "ratio_from": min(ratios),
        "ratio_to": max(ratios),
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        shape = {name: getattr(arguments, name) for name in ("turns", "tokens", "commits")}
        shape["database"] = "PostgreSQL" if arguments.database else "SQLite"
        record = {"machine": describe_machine(), **shape, **found, "rounds": rounds}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
