"""Tests of requests on an engine whose process lives and whose loop is stuck, and of requests with a time limit."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import EngineEvent, RequestFinished
from graftwork.engine.core.progress import FreezeLimits
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.rpc.client import GrpcEngineClient
from graftwork.engine.rpc.server import EngineServer
from graftwork.engine.rpc.watch import LoopWatch
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import DeadlineExceeded, Unavailable
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.flights import BlockedRunner, RunnerAround
from tests.engine.rpc.test_server import request, until
from tests.engine.tagged_kv_cache import load_always

LIMITS = FreezeLimits(silence_s=60, step_s=1)


@dataclass
class BlockedEngine:
    """A served engine whose steps wait, a clock that only the engine reads, and a client."""

    runner: BlockedRunner
    clock: ManualClock
    client: GrpcEngineClient


def config(models: RandomModels) -> EngineConfig:
    return EngineConfig(model=models.base, dtype="float32", page_tokens=4, device_bytes=4 * 2**20)


@pytest.fixture
async def blocked(models: RandomModels, tmp_path: Path) -> AsyncIterator[BlockedEngine]:
    address, clock = f"unix:{tmp_path}/engine.sock", ManualClock()
    engine = build_engine(config(models), lambda _: models.source, clock, costs=load_always())
    engine.loop.steps.runner = runner = BlockedRunner(engine.loop.steps.runner)
    server, client = EngineServer(engine, address), GrpcEngineClient(address, LIMITS)
    await server.start()
    yield BlockedEngine(runner, clock, client)
    runner.gate.set()
    await client.close()
    await server.stop()


async def answer(client: GrpcEngineClient) -> list[EngineEvent]:
    """All events of one request."""
    return [event async for event in client.generate(request([5, 6], max_tokens=20))]


async def test_a_stuck_loop_ends_its_requests_until_it_advances(
    blocked: BlockedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """If a step does not advance for longer than the limit, running and new requests get a typed error at once, one line
    of the log says so, and the engine serves again when the step goes on."""
    client = blocked.client
    running = asyncio.create_task(answer(client))
    await asyncio.to_thread(blocked.runner.waits.wait, 60)

    blocked.clock.advance(LIMITS.step_s + 1)
    with pytest.raises(Unavailable, match="no progress") as lost:
        await running
    with pytest.raises(Unavailable, match="no progress"):
        await answer(client)
    blocked.runner.gate.set()
    stats = await until(client, lambda stats: stats.running_requests == 0)
    while True:
        try:
            events = await answer(client)
            break
        except Unavailable:
            await client.stats()

    assert (lost.value.code, lost.value.retry_after_s) == ("engine_unavailable", 1.0)
    assert stats.active_pages == 0
    assert isinstance(events[-1], RequestFinished)
    (logged,) = [record for record in caplog.records if record.msg == "engine_stuck"]
    assert logged.levelname == "ERROR"
    assert logged.__dict__["stalled_s"] > LIMITS.step_s


async def test_a_loop_may_get_stuck_after_a_token(blocked: BlockedEngine) -> None:
    """A request whose first tokens have arrived ends with a typed error, too, if the next step does not advance."""
    blocked.runner.num_free = 5
    running = asyncio.create_task(answer(blocked.client))
    await asyncio.to_thread(blocked.runner.waits.wait, 60)

    blocked.clock.advance(LIMITS.step_s + 1)

    with pytest.raises(Unavailable, match="no progress"):
        await running


async def test_a_watch_asks_only_a_loop_that_sends_nothing() -> None:
    """A look before which the loop has advanced asks nothing; the others ask, and a stuck loop is asked until it goes on."""
    num_looks, stalls, ends, asked = 0, [0.0, 1.0, 1.0, 0.0], list[int](), asyncio.Event()

    def has_requests() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks not in (3, 6):
            watch.note_advance()
        return True

    async def read_stall() -> float:
        stall_s = stalls.pop(0)
        if not stalls:
            asked.set()
        return stall_s

    watch = LoopWatch(read_stall, 0.004, has_requests, lambda: ends.append(num_looks))
    watch.start()
    await asked.wait()
    await watch.close()

    assert (stalls, ends, watch.is_stuck) == ([], [6], False)


async def test_a_loop_that_waits_for_work_is_not_stalled(blocked: BlockedEngine) -> None:
    """A loop without work has not stalled, and a loop in a step has, since the step began."""
    blocked.clock.advance(1000)
    idle_s = await blocked.client.stalled_s()
    running = asyncio.create_task(answer(blocked.client))
    await asyncio.to_thread(blocked.runner.waits.wait, 60)

    blocked.clock.advance(LIMITS.step_s / 2)

    assert idle_s == 0
    assert await blocked.client.stalled_s() == LIMITS.step_s / 2
    blocked.runner.gate.set()
    await running


async def test_a_request_ends_at_its_time_limit(blocked: BlockedEngine) -> None:
    """A request that takes longer than its limit fails with `deadline_exceeded`, and the engine cancels it."""
    limited = replace(request([5, 6], max_tokens=200), timeout_s=0.1)

    with pytest.raises(DeadlineExceeded, match=r"0\.1 seconds") as late:
        _ = [event async for event in blocked.client.generate(limited)]
    blocked.runner.gate.set()
    stats = await until(blocked.client, lambda stats: stats.running_requests + stats.waiting_requests == 0)

    assert (late.value.status, late.value.code) == (504, "deadline_exceeded")
    assert stats.active_pages == 0
    assert stats.generated_tokens < 200


async def test_a_request_within_its_time_limit_is_not_disturbed(blocked: BlockedEngine) -> None:
    """A request that ends before its limit gets its whole answer."""
    blocked.runner.gate.set()

    events = [event async for event in blocked.client.generate(replace(request([5, 6]), timeout_s=60))]

    assert isinstance(events[-1], RequestFinished)


class SlowClock(ManualClock):
    """A clock on which 50 seconds pass between two looks at it."""

    def monotonic(self) -> float:
        self.advance(50)
        return super().monotonic()


class TimedRunner(RunnerAround):
    """A runner that notes how long the last step took, and how long the loop had stalled at its end."""

    def __init__(self, engine: Engine, clock: SlowClock) -> None:
        super().__init__(engine.loop.steps.runner)
        self._progress, self._clock = engine.loop.progress, clock
        self.took_s = self.stalled_s = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        began_at = self._clock.now()
        result = super().run(plan)
        self.took_s, self.stalled_s = self._clock.now() - began_at, self._progress.stalled_s
        return result


def test_each_layer_of_a_step_is_progress(models: RandomModels) -> None:
    """After a step whose two layers took 50 seconds each, the loop has stalled for 50 seconds."""
    clock = SlowClock()
    engine = build_engine(config(models), lambda _: models.source, clock, costs=load_always())
    engine.loop.steps.runner = timed = TimedRunner(engine, clock)

    EngineDriver(engine).run([5, 6, 7], max_tokens=1)

    assert (timed.took_s, timed.stalled_s) == (100, 50)


STUCK = """
import asyncio, sys, threading
from pathlib import Path
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.rpc.server import run_server
from graftwork.platform.tracing.logs import configure_logging

class StuckRunner:
    def launch(self, plan):
        threading.Event().wait()

configure_logging("info")
config = EngineConfig(model=Path(sys.argv[1]), dtype="float32", page_tokens=4, device_bytes=4 * 2**20)
engine = build_engine(config, lambda _: None)
engine.loop.steps.runner = StuckRunner()
asyncio.run(run_server(engine, sys.argv[2], None, 1.0))
"""


async def test_an_engine_without_a_supervisor_ends_itself_if_it_is_stuck(models: RandomModels, tmp_path: Path) -> None:
    """An engine whose loop is stuck ends with a status of its own, and its log says why and where each thread stood."""
    address = f"unix:{tmp_path}/engine.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STUCK, str(models.base), address), stderr=asyncio.subprocess.PIPE
    )
    client = GrpcEngineClient(address, FreezeLimits(silence_s=60, step_s=60))
    assert process.stderr is not None
    async for line in process.stderr:
        if b"engine_ready" in line:
            break
    with pytest.raises(Unavailable):
        await answer(client)
    log = (await process.stderr.read()).decode()
    await process.wait()
    await client.close()

    assert process.returncode == 75
    assert "engine_stuck" in log
    assert "in launch" in log
