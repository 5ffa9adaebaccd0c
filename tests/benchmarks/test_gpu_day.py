"""Tests of the program that measures everything on a GPU, by its dry run on the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MISSING = (
    "xgrammar", "llguidance", "flashinfer", "transformers", "peft", "tokenizers", "numba", "rich", "typer", "httpx",
    "pydantic", "fastapi", "sqlalchemy", "grpc", "google", "redis", "jinja2", "prometheus_client", "hypothesis",
    "asyncpg", "pytest_asyncio",
)  # fmt: skip
"""What a GPU machine may lack."""
NAMES = {"cell", "feature", "trial", "failure", "way", "copy", "python", "torch", "triton", "cuda", "commit"}
SIZES = {"context_tokens", "history_tokens", "num_items", "bytes"}
"""The columns that a CPU can fill: what was measured, and how large it was."""


def run(folder: Path, *arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, or `code`, in a Python that cannot import what a GPU machine may lack."""
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({MISSING}))")
    program = ["-m", "benchmarks.gpu_day", *arguments] if code is None else ["-c", code]
    paths = os.pathsep.join(map(str, (folder, ROOT / "src")))
    return subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def figures_of(value: Any, column: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each column of a row and its value; dictionaries of figures are opened."""
    if isinstance(value, dict) and column not in NAMES:
        for name, inner in value.items():
            yield from figures_of(inner, name)
    else:
        yield column, value


def test_every_phase_needs_torch_triton_and_numpy_only(tmp_path: Path) -> None:
    """The modules of all phases can be imported without the packages that a GPU machine may lack."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from gpu.phases import PHASES\n"
        "print(*(phase.load().__name__ for phase in PHASES))"
    )

    done = run(tmp_path, code=code)

    assert done.returncode == 0, done.stderr
    assert "measure_steps" in done.stdout


def test_the_suite_of_a_gpu_needs_pytest_and_torch_only(tmp_path: Path) -> None:
    """Every module of tests/gpu can be collected where pytest is the only tool; what lacks peft says so."""
    code = "import pytest, sys; sys.exit(pytest.main(['tests/gpu', '-q', '-p', 'no:cacheprovider']))"

    done = run(tmp_path, code=code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "peft and transformers, which make the models of these tests, are not installed" in done.stdout


def test_without_a_gpu_the_day_is_refused(tmp_path: Path) -> None:
    """Without a CUDA device the program says what to do, and writes nothing."""
    done = run(tmp_path, "--json", str(tmp_path / "day.json"))

    assert done.returncode == 2
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "day.json").exists()


def test_a_day_without_time_leaves_its_phases_out(tmp_path: Path) -> None:
    """A phase for which no time is left is in the figures, with the reason."""
    done = run(tmp_path, "--dry-run", "--limit", "0", "--json", str(tmp_path / "day.json"))

    assert done.returncode == 0, done.stderr
    phases = json.loads((tmp_path / "day.json").read_text())["phases"]
    assert {phase["left_out"] for phase in phases.values()} == {"the time is over"}


@pytest.mark.parametrize(
    ("program", "timeout_s", "error"),
    [("print('seen'); raise SystemExit(3)", 60.0, "exit status 3\nseen"), ("while True: pass", 0.5, "killed after 0")],
)
def test_a_phase_that_fails_or_hangs_is_reported(
    monkeypatch: pytest.MonkeyPatch, program: str, timeout_s: float, error: str
) -> None:
    """A process that fails is reported with its output; one that outlasts its time is killed, and reported too."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu.day import error_of  # type: ignore[import-not-found]

    found = error_of([sys.executable, "-c", program], dict(os.environ), timeout_s)

    assert found is not None
    assert found.startswith(error)


@pytest.mark.timeout(900)
def test_a_dry_run_fills_every_table_but_no_figure_of_a_gpu(tmp_path: Path) -> None:
    """A dry run goes through all phases without an error, and invents no figure."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")

    done = run(tmp_path, "--dry-run", "--limit", "900", "--json", str(tmp_path / "day.json"))

    assert done.returncode == 0, done.stdout + done.stderr
    phases = json.loads((tmp_path / "day.json").read_text())["phases"]
    assert [name for name, phase in phases.items() if phase["error"] or phase["left_out"] or phase["skipped"]] == []
    tables = {name: rows for phase in phases.values() for name, rows in phase["tables"].items()}
    assert tables.keys() == {
        *("versions", "device", "ceilings", "trials", "attention", "lora", "weights", "experts", "sampler"),
        *("starts", "steps", "mixed_steps", "launches", "kernels", "copies", "adapter_loads", "resume"),
        "lora_plans",
    }
    figures = [(table, *pair) for table, rows in tables.items() for row in rows for pair in figures_of(row)]
    assert [found for found in figures if found[1] not in NAMES | SIZES and found[2] is not None] == []
    assert all(row["failure"] is None for row in tables["trials"])
    ways = {row["way"] for row in phases["coded_kv"]["tables"]["steps"]}
    assert ways == {"kv auto", "kv int8", "kv fp8"}
