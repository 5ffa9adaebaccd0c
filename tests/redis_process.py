"""A Redis that a test starts for itself, so that it can stop and continue it."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError


class RedisProcess:
    """A Redis on a port of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    async def answers(self) -> None:
        """Returns once Redis answers."""
        async with asyncio.timeout(60), Redis.from_url(self.url) as redis:
            while True:
                try:
                    await redis.ping()
                    return
                except RedisError:
                    await asyncio.sleep(0.01)

    def stall(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def running_redis() -> Iterator[RedisProcess]:
    """A Redis that runs while the block runs. Skips the test where no Redis is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server to start")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = RedisProcess(port)
    try:
        asyncio.run(started.answers())
        yield started
    finally:
        started.process.kill()
        started.process.wait()
