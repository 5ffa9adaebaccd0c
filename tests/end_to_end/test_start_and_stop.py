"""What a newcomer's terminal shows when a server starts, cannot start, or is stopped by Ctrl-C."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.platform.data_folder import locked_data_folder
from tests.end_to_end.conftest import DEMO

START_WITHIN_S = 120
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


def refusal(*arguments: str) -> str:
    """What `serve` prints on standard error when it does not start, after its log of other things."""
    with graftwork("serve", "--port", "0", *arguments) as process:
        _, errors = process.communicate(timeout=START_WITHIN_S)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if not line.startswith("{"))
    return line


def test_a_model_with_half_its_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    """What only the engine's process finds out reaches the terminal as one sentence, without a traceback."""
    model = Path(shutil.copytree(DEMO / "model", tmp_path / "model"))
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    line = refusal("--model", str(model), "--data-dir", str(tmp_path / "data"))

    assert line.startswith("Error: ")
    assert "model.safetensors is not a whole safetensors file" in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "Qwen/Qwen3-0.6B"], "hf:Qwen/Qwen3-0.6B@REVISION"),
        (["--demo", "--device", "tpu"], "give auto, cpu, cuda or cuda:N"),
        (["--demo", "--host", "192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["--demo", "--data-dir", "/proc/graftwork"], "The data folder /proc/graftwork cannot be used"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    """A Hub id, an unknown device, a foreign host and a folder that cannot be made each get their sentence."""
    assert told in refusal("--data-dir", str(tmp_path), *arguments)


def test_a_taken_port_is_refused_with_the_ways_to_choose_another(tmp_path: Path) -> None:
    """Both the flag and the variable, which `make serve` needs, are named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refusal("--demo", "--data-dir", str(tmp_path), "--port", str(taken.getsockname()[1]))

    assert "--port" in line
    assert "GRAFTWORK_PORT" in line


def test_a_data_folder_in_use_is_refused(tmp_path: Path) -> None:
    """A second server on a data folder does not start, and names the process that has it."""
    with locked_data_folder(tmp_path):
        line = refusal("--demo", "--data-dir", str(tmp_path))

    assert f"The data folder {tmp_path} is in use by process {os.getpid()}" in line
