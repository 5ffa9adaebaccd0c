"""Tests of commands that start processes of their own: whatever ends the command ends these too."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
import pytest

from graftwork.api.cli.bench.servers import measured_server
from graftwork.api.sdk.transport.errors import ConfigurationError

_COMMAND = """
import asyncio, sys, typer
from graftwork.api.cli.console.signals import run_and_clean_up

async def work():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=-1, start_new_session=True)
    try:
        print(child.pid, flush=True)
        await child.wait()
    finally:
        print("cleans up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        child.kill()
        await child.wait()

app = typer.Typer()
app.command()(lambda: run_and_clean_up(work()))
app()
"""
"""A command with a child that outlives it if nobody ends it. It cleans up until it has read a line."""


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGINT], 143),
    ],
)
def test_a_signal_ends_what_a_command_has_started(numbers: list[signal.Signals], status: int) -> None:
    """The command ends its child, even if more signals come meanwhile, and exits with the first signal's status."""
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(numbers[0])
        said = process.stdout.readline()
        for number in numbers[1:]:
            process.send_signal(number)
        process.communicate("go on\n", timeout=60)

    assert said == "cleans up\n"
    assert process.returncode == status
    assert not child.is_running()


async def test_a_server_that_is_still_starting_ends_too() -> None:
    """A command that is ended while its demo server starts leaves no process of it."""
    measuring = asyncio.create_task(_measure({}))
    children: list[psutil.Process] = []
    while not children:
        await asyncio.sleep(0)
        children = _servers()

    measuring.cancel()
    with suppress(asyncio.CancelledError):
        await measuring

    assert not any(child.is_running() for child in children)


async def test_a_server_that_does_not_start_leaves_nothing() -> None:
    """A demo server that ends at its start is an error, and none of its processes is left."""
    with pytest.raises(ConfigurationError, match="ended with status"):
        await _measure({"max_running": "no number"})

    assert not _servers()


async def _measure(settings: Mapping[str, str]) -> None:
    async with measured_server(None, "", "graftwork-demo", {"tenant": 1.0}, settings):
        pytest.fail("the server is not needed")


def _servers() -> list[psutil.Process]:
    """Returns the demo servers that this process has started."""
    found = []
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "serve" in child.cmdline():
                found.append(child)
    return found
