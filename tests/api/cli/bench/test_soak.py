"""Tests of `graftwork bench soak`: its intervals, what it reads of processes, and its verdicts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.api.cli.bench.process_watch import ProcessUse, process_use
from graftwork.api.cli.bench.soak import Interval, claims
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway, listening_gateway
from tests.api.in_process_gateway import write_model_folder

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has /proc")


@pytest.fixture
def live(tmp_path: Path, sqlite_template: Path) -> Iterator[LiveGateway]:
    model = write_model_folder(tmp_path / "tiny")
    (tmp_path / "data").mkdir()
    with listening_gateway(tmp_path / "data", model, sqlite_template) as gateway:
        yield gateway


def options(live: LiveGateway, hours: float) -> tuple[str, ...]:
    return "--url", live.url, "--key", live.key, "--model", "tiny", "--json", "--hours", str(hours), "--every", "0.3"


def test_every_chat_stands_in_one_interval(live: LiveGateway, graftwork: Graftwork) -> None:
    """The answers of all intervals are those that the engine gave, except chats that the end cuts off."""
    result = graftwork("bench", "soak", *options(live, 0.0005), "--outstanding", "2")

    found = json.loads(result.stdout)
    answered = sum(one["answered"] for one in found["intervals"])
    assert result.exit_code == 0, result.output
    assert not found["was_stopped"]
    assert 0 <= len(live.engine.requests) - answered <= 2
    assert answered > 0
    assert found["intervals"][0]["use"] is None


def test_it_reports_when_it_is_told_to_stop(live: LiveGateway) -> None:
    """SIGINT ends a run of hours, and the report has the intervals until then."""
    command = [sys.executable, "-m", "graftwork.api.cli.main", "bench", "soak", *options(live, 1.0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        live_requests = live.engine.requests
        while len(live_requests) < 40 and process.poll() is None:
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)

    found = json.loads(stdout)
    assert found["was_stopped"]
    assert sum(one["answered"] for one in found["intervals"]) > 0
    assert process.returncode == 0


@linux
def test_a_process_is_read_with_its_children() -> None:
    """A child with eight open files and 64 MB, started by a child, adds them to what is read of the first."""
    inner = "import os, sys; m = bytearray(64 << 20); f = [open(os.devnull) for _ in range(8)]; print('.', flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)

        use = process_use(process.pid)

        process.communicate()
    assert use is not None
    assert use.processes == 2
    assert use.rss_bytes > 64 << 20
    assert use.descriptors >= 8 + 2 * 3
    assert process_use(process.pid) is None


def interval(number: int, rss: float, ttft: float, failed: int = 0) -> Interval:
    return Interval(float(number), 9, 9 - failed, 0, failed, ttft, ttft, ProcessUse(int(1e6 * rss), 50, 3))


def test_growth_is_judged_after_the_first_quarter() -> None:
    """What only the first quarter fills is no growth; 1.2 x from the second quarter to the last is, and so is a slower p50."""
    warm = [interval(number, 100.0 if number < 2 else 200.0, 0.02) for number in range(8)]
    leaks = [interval(number, 100.0 * 1.04**number, 0.02 * 1.2**number) for number in range(8)]

    assert [claim.holds for claim in claims(warm)] == [True] * 4
    assert [claim.holds for claim in claims(leaks)] == [True, False, True, False]
    assert [claim.holds for claim in claims(warm[:7])] == [True, None, None, None]
    assert claims([*warm, interval(8, 200.0, 0.02, failed=1)])[0].holds is False
