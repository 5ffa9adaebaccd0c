"""Runs the phases one after another, each in a process of its own, and writes the figures after each.

`run` is both programs: the day itself, and with `--phase` the process of one phase.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from gpu.phase_run import SHAPES, PhaseRun
from gpu.phases import PHASE_BY_NAME, PHASES, Phase

_PROGRAM = Path(__file__).resolve().parents[1] / "gpu_day.py"
_PATIENCE = 1.5
"""A phase is killed after so many times its own seconds, in which it compiles kernels and builds its engine too."""


def run(arguments: list[str]) -> int:
    """Runs the program. Returns its exit status: 0, or 1 if a phase has failed, or 2 if there is no GPU."""
    options = _parser().parse_args(arguments)
    if options.phase is not None:
        return _run_phase(options)
    if not options.dry_run and not _has_gpu():
        print("torch finds no CUDA device here. Give --dry-run to run the host's side on the CPU.", file=sys.stderr)
        return 2
    names = options.phases.split(",") if options.phases else [phase.name for phase in PHASES]
    if unknown := sorted(set(names) - set(PHASE_BY_NAME)):
        print(f"There is no phase {unknown[0]!r}: choose from {', '.join(PHASE_BY_NAME)}.", file=sys.stderr)
        return 2
    return _run_day(options, [phase for phase in PHASES if phase.name in names])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Everything that is to be measured when a GPU is at hand.")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go, after each phase")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all phases together")
    parser.add_argument("--shape", choices=SHAPES, help="the model's sizes: llama-8b, in a dry run tiny")
    parser.add_argument("--phases", help="comma-separated names; all, if left out")
    parser.add_argument("--dry-run", action="store_true", help="only the host's side, on the CPU")
    parser.add_argument("--phase", choices=PHASE_BY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _run_phase(options: argparse.Namespace) -> int:
    """The process of one phase."""
    phase = PHASE_BY_NAME[options.phase]
    phase.load()(PhaseRun(options.json, options.seconds, SHAPES[options.shape], is_dry=options.dry_run))
    return 0


def _run_day(options: argparse.Namespace, phases: list[Phase]) -> int:
    ends_at = time.monotonic() + options.limit
    shape = options.shape or ("tiny" if options.dry_run else "llama-8b")
    figures: dict[str, Any] = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_dry_run": options.dry_run,
        "shape": shape,
        "limit_s": options.limit,
        "phases": {},
    }
    for phase in phases:
        found = _outcome(phase, shape, ends_at - time.monotonic(), is_dry=options.dry_run)
        figures["phases"][phase.name] = found
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
        rows = ", ".join(f"{len(rows)} {table}" for table, rows in found["tables"].items())
        trouble = found["error"].splitlines()[-1] if found["error"] else found["left_out"] or ""
        print(f"{phase.name:<10} {found['seconds']:>6.1f} s  {rows}  {trouble}", flush=True)
    return int(any(found["error"] for found in figures["phases"].values()))


def _outcome(phase: Phase, shape: str, seconds_left: float, *, is_dry: bool) -> dict[str, Any]:
    """Runs one phase in its process. Returns its rows, and why they are not all there."""
    outcome: dict[str, Any] = {
        "budget_s": phase.seconds, "seconds": 0.0, "left_out": None, "error": None, "tables": {}, "skipped": [],
    }  # fmt: skip
    wrapper = () if is_dry else phase.tool
    if wrapper and shutil.which(wrapper[0]) is None:
        return outcome | {"left_out": f"{wrapper[0]} is not installed"}
    if seconds_left < 5:
        return outcome | {"left_out": "the time is over"}
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        seconds = min(phase.seconds, seconds_left)
        command = [*wrapper, sys.executable, str(_PROGRAM), "--phase", phase.name, "--json", str(rows)]
        command += ["--seconds", str(seconds), "--shape", phase.shape or shape, *(["--dry-run"] if is_dry else [])]
        error = error_of(command, _environment(phase, is_dry=is_dry), min(_PATIENCE * phase.seconds, seconds_left))
        found = json.loads(rows.read_text()) if rows.exists() else {}
    return outcome | found | {"error": error, "seconds": round(time.monotonic() - started, 2)}


def error_of(command: list[str], environment: dict[str, str], timeout_s: float) -> str | None:
    """Runs a command. Returns the end of what it wrote if it failed; None if it did not.

    After `timeout_s`, kills it with all processes that it has started.
    """
    with TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {timeout_s:.0f} seconds"
        written.seek(0)
        return f"exit status {status}\n{written.read()[-4000:].strip()}" if status else None


def _environment(phase: Phase, *, is_dry: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | ({"TRITON_INTERPRET": "1"} if is_dry and phase.interprets else {})
