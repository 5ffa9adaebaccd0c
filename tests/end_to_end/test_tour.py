"""Tests that the tour's commands print what the page says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import DemoServer

PAGE = Path(__file__).parents[2] / "docs" / "tour.md"
MARK = "@@@ next command"


def steps() -> list[tuple[str, str]]:
    """The commands of the page, each with what it prints."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            found.append((command, printed))
    return found


def pattern(printed: str) -> str:
    """A pattern in which `…` stands for anything in its line; a line's end may have spaces."""
    lines = [".*".join(map(re.escape, line.split("…"))) + r"\s*?" for line in printed.splitlines()]
    return r"\n+".join(line for line in lines if line != r"\s*?")


@pytest.fixture
def environment(server: DemoServer, tmp_path: Path) -> dict[str, str]:
    """With `graftwork` on the path, and the server's address and keys."""
    program = tmp_path / "graftwork"
    code = "from graftwork.api.cli.main import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')
    program.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GRAFTWORK_URL": server.url,
        "GRAFTWORK_API_KEY": server.key("Blackbeard"),
        "GRAFTWORK_ADMIN_KEY": server.admin_key(),
        "XDG_CONFIG_HOME": str(tmp_path),
    }


def test_the_tour_prints_what_it_says(environment: dict[str, str], tmp_path: Path) -> None:
    """Each command of the tour, in one shell and in order, prints what the page shows after it."""
    script = "".join(f"echo '{MARK}'\n{command}\n" for command, _ in steps())

    done = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(steps()) >= 8
    for (command, expected), text in zip(steps(), printed, strict=True):
        assert re.match(pattern(expected) + r"(\n|$)" if expected else "$", text.strip("\n")), (
            f"{command} printed:\n{text}\n{done.stderr}"
        )
