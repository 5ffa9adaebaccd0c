"""What a newcomer's terminal shows when a server starts, cannot start, or is stopped by Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STOP_WITHIN_S = 60
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell lets its children ignore it
from graftwork.api.cli.main import main
main()
"""


def graftwork(*arguments: str) -> "subprocess.Popen[str]":
    """Start the program in a process group of its own, as a terminal's shell does."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRAFTWORK_")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@pytest.fixture
def server(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    """A demo server that has just said that it is ready."""
    with graftwork("serve", "--demo", "--port", "0", "--data-dir", str(tmp_path / "data")) as process:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if re.search(r"at http://", line)), None)
        assert ready is not None, process.communicate()
        yield process
        process.kill()


def test_ctrl_c_ends_a_server_as_quietly_as_sigterm(server: "subprocess.Popen[str]") -> None:
    """SIGINT to the whole process group, as a terminal sends it, ends the server with status 0 and no traceback."""
    os.killpg(server.pid, signal.SIGINT)
    _, errors = server.communicate(timeout=STOP_WITHIN_S)

    assert server.returncode == 0
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors
