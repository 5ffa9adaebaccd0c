"""Tests of keeping processes to cores. Each runs in a process of its own, which may change its cores."""

import os
import subprocess
import sys

import pytest

from graftwork.platform.settings.values import parse_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)
_RUN = """
import os, subprocess, sys
from graftwork.platform.cores import leave_engine_cores, run_on_engine_cores
from graftwork.platform.errors import InvalidRequest
first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
show = lambda: print(sorted(os.sched_getaffinity(0)), flush=True)
try:
    {}
except InvalidRequest as error:
    print(error.param, error.message)
show()
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", _RUN.format(code)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _usable() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_an_engine_keeps_to_its_cores() -> None:
    """A process that runs on engine cores may use these and no others."""
    assert _run("run_on_engine_cores((last,))") == str(_usable()[-1:])


def test_a_gateway_leaves_the_engines_cores_to_them() -> None:
    """A gateway keeps to the other cores, and the engine that it starts still gets its own."""
    child = "import os; from graftwork.platform.cores import run_on_engine_cores; run_on_engine_cores((%d,)); print(os.sched_getaffinity(0))"
    started = f"leave_engine_cores((last,)); subprocess.run([sys.executable, '-c', {child!r} % last], check=True)"

    lines = _run(started).splitlines()

    assert lines == [str({_usable()[-1]}), str(_usable()[:-1])]


@pytest.mark.parametrize("apply", ["run_on_engine_cores", "leave_engine_cores"])
def test_a_core_that_the_machine_lacks_is_refused(apply: str) -> None:
    """The error names the core, and the process keeps the cores that it had: one that exists beside it is not taken alone."""
    refusal, cores = _run(f"{apply}((first, 4000))").splitlines()

    assert refusal.startswith("engine_cores engine_cores: ")
    assert "core 4000" in refusal
    assert cores == str(_usable())


def test_a_gateway_must_have_a_core_left() -> None:
    """Engines that take every core are refused before they start."""
    refusal, cores = _run("leave_engine_cores(os.sched_getaffinity(0))").splitlines()

    assert "leave the gateway none" in refusal
    assert cores == str(_usable())


@pytest.mark.parametrize(
    ("text", "cores"), [("1", (1,)), ("0,2", (0, 2)), ("2-5", (2, 3, 4, 5)), ("3,1-2", (1, 2, 3)), ([1, 2], (1, 2))]
)
def test_cores_are_read_as_numbers_and_ranges(text: object, cores: tuple[int, ...]) -> None:
    """Cores are numbers and ranges with commas between, in any order."""
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "-1", "1,", "5-2", "all", "1.5", "1-2-3", "99999"])
def test_cores_that_cannot_be_read_are_refused(text: str) -> None:
    """What is no list of cores raises ValueError."""
    with pytest.raises(ValueError, match="give numbers of cores"):
        parse_cores(text)
