"""The number of transactions of one turn."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from sqlalchemy import Engine, event

from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.platform.database import Database
from graftwork.sessions.core.session import TurnStatus
from graftwork.sessions.turns.running import TurnHandle
from tests.sessions.session_process import AnsweringEngine, ManualTime, SessionProcess, principal
from tests.sessions.tokenizer_and_templates import token_id

NUM_TOKENS = 200


class Transactions:
    """Counts transactions."""

    def __init__(self) -> None:
        self.num_begun = self.num_committed = 0

    def begin(self, connection: object) -> None:
        self.num_begun += 1

    def commit(self, connection: object) -> None:
        self.num_committed += 1


@pytest.fixture
async def transactions() -> AsyncIterator[Transactions]:
    counted = Transactions()
    listeners = {"begin": counted.begin, "commit": counted.commit}
    for name, listener in listeners.items():
        event.listen(Engine, name, listener)
    yield counted
    for name, listener in listeners.items():
        event.remove(Engine, name, listener)


class PacedEngine(AnsweringEngine):
    """Generates one token for each `tell`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0
        self._tokens: asyncio.Queue[None] = asyncio.Queue()

    def tell(self) -> None:
        self._tokens.put_nowait(None)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield PromptAdmitted(CacheReport(recomputed_tokens=len(request.prompt_token_ids)))
        for _ in range(NUM_TOKENS):
            await self._tokens.get()
            yield TokensGenerated((token_id("a"),))
            self.num_taken += 1
        yield RequestFinished(FinishReason.LENGTH, NUM_TOKENS)


class Reader:
    """Reads the events of a turn, as a stream does."""

    def __init__(self) -> None:
        self.num_characters = 0

    async def read(self, turn: TurnHandle) -> None:
        """Read the turn to its end."""
        async with aclosing(turn.events()) as events:
            async for told in events:
                self.num_characters += len(told.fields.get("delta", ""))


@pytest.mark.parametrize("interval_ms", [1.0, 2.0])
async def test_a_turn_of_two_hundred_tokens_makes_few_transactions(
    database: Database, transactions: Transactions, interval_ms: float
) -> None:
    """A turn of 200 tokens makes at most 30 transactions, reads included."""
    time, engine, me = ManualTime(), PacedEngine(), principal()
    process = SessionProcess(database, time.clock, engine=engine, pause=time.pause)
    session = await process.session(me)
    before = transactions.num_begun, transactions.num_committed
    running = await process.service.start_turn(me, session.session_id, "Tell")
    reader = Reader()
    reading = asyncio.create_task(reader.read(running))
    for number in range(1, NUM_TOKENS + 1):
        engine.tell()
        while engine.num_taken < number or (reader.num_characters < number and not time.num_pauses):
            await time.advance(0)
        await time.advance(interval_ms / 1000)
    turn = await running.result()
    await reading

    num_begun, num_committed = transactions.num_begun - before[0], transactions.num_committed - before[1]
    assert (turn.status, len(turn.output[0].text)) == (TurnStatus.COMPLETED, NUM_TOKENS)
    assert num_committed <= num_begun <= 30
