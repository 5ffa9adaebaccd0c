"""Tests of the embedded engine's process: start, wait, restart and end."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graftwork.api.server.engine_process import child_orders
from graftwork.api.server.engine_supervisor import EngineChild
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import InvalidRequest, Unavailable
from graftwork.platform.settings import Settings
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


def child(program: str, restart_after_s: float = 0.0) -> EngineChild:
    return EngineChild(
        Settings(), "unix:/nowhere", ManualClock(), command=(sys.executable, "-c", program), backoff_s=restart_after_s
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
        "from graftwork.api.server.engine_process import watch_parent\n"
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


async def test_a_child_tells_why_it_could_not_start() -> None:
    """The error that a child ends with reaches its parent with its type, its message and its field."""
    program = (
        "import sys\n"
        "from graftwork.api.server import engine_process\n"
        "from graftwork.platform.errors import InvalidRequest\n"
        "def refuse(settings, listen):\n"
        "    raise InvalidRequest('Give less.', param='device_bytes')\n"
        "engine_process.run_engine = refuse\n"
        "engine_process.main()\n"
    )
    engine_child = child(program)

    with pytest.raises(InvalidRequest, match=r"Give less\.") as caught:
        await engine_child.start(AbsentEngine(), lambda _: None)
    await engine_child.stop()

    assert caught.value.param == "device_bytes"


async def test_a_child_that_the_system_killed_is_said_to_be() -> None:
    """A child that ends by SIGKILL before it answers leads to a hint at memory."""
    engine_child = child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    with pytest.raises(Unavailable, match="out of memory"):
        await engine_child.start(AbsentEngine(), lambda _: None)
    await engine_child.stop()
