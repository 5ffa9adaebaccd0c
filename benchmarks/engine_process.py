"""Engines as processes that answer tasks: each in the environment it needs, all of them alive side by side.

Only one computes at a time, so engines can take turns from cell to cell.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cells import Cell
from peers.llama_cpp_files import convert
from peers.protocol import Opening, Result, Task

_HERE = Path(__file__).parent
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as our server starts its engine; for all alike
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine is started."""

    name: str
    module: str
    """With a `serve` in it, run from this folder."""
    environment: str | None = None
    """Its virtual environment's folder below the cache; None runs where the yardstick runs."""
    variables: dict[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"
    serves: Callable[[Cell], bool] = lambda cell: True
    prepare: Callable[[Path, Path], None] = lambda model, environment: None
    """Makes of the model's folder what the engine reads; given the environment's folder, too."""

    checkout: Path | None = None
    """Another checkout of this project, whose engine is measured; None is this one."""

    def python(self, cache: Path) -> Path:
        return Path(sys.executable) if self.environment is None else cache / self.environment / "bin" / "python"


_VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS is obeyed, and `--core` pins every engine alike
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare_llama_cpp(model: Path, environment: Path) -> None:
    """Convert to GGUF, once."""
    convert(Opening(model, "bfloat16"), environment / "source" / "vendor" / "llama.cpp")


OURS = "graftwork"
OURS_FP32 = EngineSpec("graftwork-fp32", "peers.graftwork_engine", dtype="float32")
ENGINES = {
    spec.name: spec
    for spec in (
        EngineSpec(OURS, "peers.graftwork_engine"),
        EngineSpec("vllm-cpu", "peers.vllm_engine", "vllm-cpu", _VLLM),
        EngineSpec(
            "vllm-cpu-base",
            "peers.vllm_engine",
            "vllm-cpu",
            _VLLM | {"YARDSTICK_NO_LORA": "1"},
            serves=lambda cell: cell.adapters == 0,
        ),
        EngineSpec("peft", "peers.peft_engine"),
        EngineSpec("llama.cpp", "peers.llama_cpp_engine", "llama-cpp", prepare=prepare_llama_cpp),
    )
}


def engine_spec(name: str, cache: Path) -> EngineSpec | None:
    """The engine of that name; None if there is none.

    `graftwork@FOLDER` is the engine of another checkout of this project, and `graftwork@COMMIT` that of a commit of this
    one, so that one run compares two states. A commit's files are kept in the cache. Both run in this environment.
    """
    if not name.startswith(f"{OURS}@"):
        return ENGINES.get(name)
    state = name.removeprefix(f"{OURS}@")
    checkout = Path(state).resolve() if Path(state).is_dir() else _files_of(state, cache / "commits")
    if checkout is None:
        return None
    variables = {"PYTHONPATH": str(checkout / "src")}
    label = f"{OURS}@{checkout.name}"
    return EngineSpec(label, "peers.graftwork_engine", variables=variables, checkout=checkout)


def _files_of(commit: str, folder: Path) -> Path | None:
    """Returns a folder with the files of a commit of this project, and makes it once; None if there is no such commit."""
    git = ["git", "-C", str(_HERE)]
    found = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", "--short=12", f"{commit}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        return None
    name = found.stdout.strip()
    if not (folder / name).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as half_made:
            whole = Path(half_made) / name
            whole.mkdir()
            archive = subprocess.Popen([*git, "-C", "..", "archive", name], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", str(whole)], stdin=archive.stdout, check=True)
            if archive.wait():
                return None
            whole.rename(folder / name)
    return folder / name


class EngineFailed(Exception):
    """An engine did not start, or died; the message holds the end of its log."""


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """One engine, from its start to its end."""

    def __init__(self, spec: EngineSpec, model: Path, cache: Path, core: int | None) -> None:
        """Waits until it is ready. Raises EngineFailed."""
        self.spec = spec
        python = spec.python(cache)
        if not python.exists():
            raise EngineFailed(
                f"{spec.name} has no environment {python.parent.parent}: see benchmarks/peers/make_*.sh."
            )
        spec.prepare(model, python.parent.parent)
        self._log = cache / "logs" / f"{spec.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", spec.module, str(model), "--dtype", spec.dtype],
                cwd=_HERE if spec.checkout is None else spec.checkout / "benchmarks",
                env=os.environ | _ONE_THREAD | _HUGE_PAGES | _QUIET | spec.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        self.version: str = self._answer()["version"]

    def run(self, task: Task) -> Result:
        """Raises EngineFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(task)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; reading its answer says why
        return Result(**self._answer())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End of input is the end of the process; one that does not heed it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            end = "\n".join(self._log.read_text().splitlines()[-12:])
            raise EngineFailed(
                f"{self.spec.name} ended with {self._process.returncode}; the end of {self._log}:\n{end}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
