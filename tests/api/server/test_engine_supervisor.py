"""Tests of the embedded engine's process: start, wait, restart and end."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from graftwork.api.server import engine_supervisor
from graftwork.api.server.engine_process import child_orders, read_report
from graftwork.api.server.engine_supervisor import EngineChild
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest, Unavailable
from graftwork.platform.settings.settings import Settings
from tests.api.fake_engine import FakeEngine, describe

LIVES = "import json, sys; json.loads(sys.stdin.buffer.readline()); sys.stdin.buffer.read()"
DIES = "raise SystemExit(3)"


class SlowEngine(FakeEngine):
    """Answers the third time it is asked."""

    asked = 0

    async def describe(self):  # type: ignore[no-untyped-def]
        self.asked += 1
        if self.asked < 3:
            raise Unavailable("not yet")
        return describe()


class AbsentEngine(FakeEngine):
    """Never answers."""

    async def describe(self):  # type: ignore[no-untyped-def]
        raise Unavailable("not yet")


class FreezingEngine(FakeEngine):
    """Advances until it is told to freeze."""

    stall_s = 0.0
    is_stopped = False

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self._looks: asyncio.Queue[None] = asyncio.Queue(1)

    async def is_looked_at(self, times: int) -> None:
        """Wait until it was asked so often whether it advances."""
        for _ in range(times):
            await self._looks.get()

    async def stalled_s(self) -> float:
        with suppress(asyncio.QueueFull):
            self._looks.put_nowait(None)
        if self.is_stopped:
            self._clock.advance(1)
            raise Unavailable("no answer")
        return self.stall_s


class FirstRecord(logging.Handler):
    """Tells when a text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.seen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.seen.set()


def child(program: str, clock: ManualClock | None = None) -> EngineChild:
    command = (sys.executable, "-c", program)
    return EngineChild(
        Settings(), "unix:/nowhere", clock or ManualClock(), command=command, backoff_s=0.0, look_every_s=0.0
    )


@pytest.fixture
async def running_child() -> AsyncIterator[EngineChild]:
    engine_child = child(LIVES)
    await engine_child.start(SlowEngine(), lambda _: None)
    yield engine_child
    await engine_child.stop()


async def test_start_and_stop(running_child: EngineChild) -> None:
    """A child runs once it answers, and has ended when stop returns."""
    process_id = running_child.process_id
    assert process_id is not None
    os.kill(process_id, 0)

    await running_child.stop()

    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


async def test_restart(running_child: EngineChild) -> None:
    """A child that dies is started again."""
    first = running_child.process_id
    assert first is not None
    born = running_child.next_birth

    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(born.wait(), 60)

    second = running_child.process_id
    assert second not in (None, first)


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """A system that has no room for a process when the child dies gets a new child when it has room again."""
    shell, away = tmp_path / "shell", tmp_path / "away"
    shell.symlink_to("/bin/sh")
    command = (str(shell), "-c", f"exec '{sys.executable}' -c '{LIVES}'")
    engine_child = EngineChild(
        Settings(), "unix:/nowhere", ManualClock(), command=command, backoff_s=0.0, look_every_s=0.0
    )
    failed = FirstRecord("cannot be started")
    logging.getLogger(engine_supervisor.__name__).addHandler(failed)
    await engine_child.start(SlowEngine(), lambda _: None)
    first, born = engine_child.process_id, engine_child.next_birth
    assert first is not None

    shell.rename(away)
    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(failed.seen.wait(), 10)
    away.rename(shell)
    await asyncio.wait_for(born.wait(), 60)

    assert engine_child.process_id not in (None, first)
    await engine_child.stop()
    logging.getLogger(engine_supervisor.__name__).removeHandler(failed)


@pytest.mark.parametrize("frozen", ["stuck", "stopped"])
async def test_a_frozen_child_is_replaced(frozen: str, caplog: pytest.LogCaptureFixture) -> None:
    """A child whose loop is stuck longer than `step_timeout_s`, or that does not answer four times as long as
    `engine_silence_s`, is killed and started again."""
    clock = ManualClock()
    engine, engine_child = FreezingEngine(clock), child(LIVES, clock)
    await engine_child.start(engine, lambda _: None)
    first, born = engine_child.process_id, engine_child.next_birth
    await engine.is_looked_at(2)

    engine.stall_s, engine.is_stopped = Settings().step_timeout_s + 1, frozen == "stopped"
    await asyncio.wait_for(born.wait(), 60)
    engine.stall_s, engine.is_stopped = 0.0, False

    assert engine_child.process_id not in (None, first)
    assert {"stuck": "no progress for 121 s", "stopped": "not answer for 20 s"}[frozen] in caplog.text
    await engine_child.stop()


async def test_a_child_with_a_long_step_or_a_long_start_lives() -> None:
    """A step that advances within `step_timeout_s`, and a child that has not answered yet, are left alone."""
    clock = ManualClock()
    engine, engine_child = FreezingEngine(clock), child(LIVES, clock)
    engine.is_stopped = True
    await engine_child.start(engine, lambda _: None)
    first = engine_child.process_id

    await engine.is_looked_at(1000)
    engine.stall_s, engine.is_stopped = Settings().step_timeout_s - 1, False
    await engine.is_looked_at(1000)

    assert engine_child.process_id == first
    await engine_child.stop()


async def test_stillbirth() -> None:
    """A child that ends before its first answer is an error with its status, and is not started again."""
    engine_child = child(DIES)

    with pytest.raises(Unavailable, match="status 3"):
        await engine_child.start(AbsentEngine(), lambda _: None)
    await engine_child.stop()


async def test_lifeline() -> None:
    """A child whose parent has ended ends by itself."""
    program = (
        "import os, sys, threading, signal\n"
        "from graftwork.platform.worker_slots import watch_parent\n"
        "watch_parent(sys.stdin.fileno())\n"
        "print('watching', flush=True)\n"
        "signal.pause()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"watching\n"

    process.stdin.close()

    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGTERM


def test_orders_hold_no_secret() -> None:
    """The engine's orders hold its settings and no secret of the gateway."""
    settings = Settings(
        data_dir=Path("x"), admin_key="gwa_a_secret", pepper="a secret", database_url="postgresql://secret"
    )

    orders = child_orders(settings, "unix:/x")

    assert b"unix:/x" in orders
    assert b"secret" not in orders


def test_a_child_reads_the_orders_of_any_settings() -> None:
    """The engine's settings are the gateway's, also with deadlines and objectives, which the engine does not use."""
    given = {"deadlines": "default=1000", "objectives": "flex.ttft_ms=500", "max_running": 3}

    orders = json.loads(child_orders(Settings.from_environment(given), "unix:/x"))

    assert Settings.from_environment(orders["settings"]) == Settings(max_running=3)


async def test_a_child_tells_why_it_could_not_start() -> None:
    """The error that a child ends with reaches its parent with its type, its message and its field."""
    program = (
        "import sys\n"
        "from graftwork.api.server import engine_process\n"
        "from graftwork.platform.errors import InvalidRequest\n"
        "def refuse(settings, listen, **supervision):\n"
        "    raise InvalidRequest('Give less.', param='device_bytes')\n"
        "engine_process.run_engine = refuse\n"
        "engine_process.main()\n"
    )
    engine_child = child(program)

    with pytest.raises(InvalidRequest, match=r"Give less\.") as caught:
        await engine_child.start(AbsentEngine(), lambda _: None)
    await engine_child.stop()

    assert caught.value.param == "device_bytes"


def test_a_child_that_lost_its_device_ends_with_a_status_of_its_own() -> None:
    """A child that lost its device reports the error to its parent, and ends with exit status 75."""
    program = (
        "from graftwork.api.server import engine_process\n"
        "from graftwork.platform.errors import DEVICE_LOST, InternalFailure\n"
        "def lose(settings, listen, **supervision):\n"
        "    raise InternalFailure('The device is lost.', code=DEVICE_LOST)\n"
        "engine_process.run_engine = lose\n"
        "engine_process.main()\n"
    )
    report, childs_report = os.pipe()
    orders = child_orders(Settings(), "unix:/nowhere")

    command = [sys.executable, "-c", program, str(childs_report)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[childs_report]) as ended:
        assert ended.stdin is not None
        ended.stdin.write(orders)
        ended.stdin.flush()  # and stays open: at its end the child would end too
        status = ended.wait(timeout=60)
    os.close(childs_report)
    error = read_report(report)

    assert status == 75
    assert error is not None
    assert (error.message, error.exit_status) == ("The device is lost.", 75)


async def test_a_child_that_the_system_killed_is_said_to_be() -> None:
    """A child that ends by SIGKILL before it answers leads to a hint at memory."""
    engine_child = child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    with pytest.raises(Unavailable, match="out of memory"):
        await engine_child.start(AbsentEngine(), lambda _: None)
    await engine_child.stop()
