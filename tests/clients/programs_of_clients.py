"""Runs a client's program, as a process of its own with a home folder of its own, and reads what it printed."""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import node, node_packages, python_environment

PROGRAMS = Path(__file__).parent / "programs"
WITHIN_S = 180
"""How long one program may take, with its start."""


async def run_python(environment: str, program: str, *arguments: str, variables: Mapping[str, str]) -> Any:
    """Runs programs/`program`.py in the environment of that name. Returns the JSON value that it printed last."""
    python = await asyncio.to_thread(python_environment, environment)
    command = [str(python), str(PROGRAMS / f"{program}.py"), *arguments]
    return last_json(await output_of(command, variables=variables))


async def run_node(packages: str, program: str, *arguments: str, variables: Mapping[str, str], folder: Path) -> Any:
    """Runs programs/`program`.mjs with the packages of that name. Returns the JSON value that it printed last.

    Node.js looks for packages beside a program, so `folder` gets copies of the programs and a link to the packages.
    """
    built = await asyncio.to_thread(node_packages, packages)
    (folder / "node_modules").symlink_to(built / "node_modules")
    for file in PROGRAMS.glob("*.mjs"):
        shutil.copy(file, folder)
    command = [node(), str(folder / f"{program}.mjs"), *arguments]
    return last_json(await output_of(command, variables=variables))


async def output_of(
    command: Sequence[str], *, variables: Mapping[str, str], folder: Path | None = None, within_s: float = WITHIN_S
) -> str:
    """Returns what a command printed on standard output, without the variables of this process.

    Fails the test with all that it printed if it ends with an error, or has not ended `within_s`.
    """
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **variables}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    reading = asyncio.create_task(process.communicate())
    done, _ = await asyncio.wait([reading], timeout=within_s)
    if not done:
        process.kill()
    stdout, stderr = (text.decode(errors="replace") for text in await reading)
    printed = f"It printed:\n{stdout[-4000:]}\n{stderr[-4000:]}"
    if not done:
        pytest.fail(f"Waited {within_s} s for the end of {' '.join(command)}. {printed}")
    if process.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with status {process.returncode}. {printed}")
    return stdout


def last_json(output: str) -> Any:
    """Returns the JSON value in the last line of the output."""
    return json.loads(output.strip().splitlines()[-1])
