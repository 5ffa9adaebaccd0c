"""Builds what clients need to run: a virtual environment of a requirements file, or the node packages of a lock file.

They lie in a cache folder outside the tree, under the digest of the file that they were built from. So they are built
once, and again when a version changes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("GRAFTWORK_CLIENTS_CACHE", Path.home() / ".cache" / "graftwork-clients"))
_HERE = Path(__file__).parent
_INSTALL_WITHIN_S = 900
_COMPLETE = ".complete"
"""A file that says that a folder of the cache was built to its end."""


def python_environment(name: str) -> Path:
    """Returns the interpreter of an environment with exactly the packages of requirements/`name`.txt."""
    requirements = _HERE / "requirements" / f"{name}.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"

    def build(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder)], "make a virtual environment")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "-r", str(requirements)], f"install {requirements.name} from the Python registry")

    return _built(f"python-{name}", [requirements.read_bytes(), version.encode()], build) / "bin" / "python"


def node_packages(name: str) -> Path:
    """Returns a folder with the packages of packages/`name`/package-lock.json in its node_modules."""
    source = _HERE / "packages" / name
    files = [source / "package.json", source / "package-lock.json"]

    def build(folder: Path) -> None:
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
        npm = _program("npm")
        _run([npm, "ci", "--no-audit", "--no-fund"], f"install {name} from the npm registry", folder)

    return _built(f"node-{name}", [file.read_bytes() for file in files], build)


def node_program(packages: str, name: str) -> str:
    """Returns the path of the command `name` of one of the packages of packages/`packages`."""
    return str(node_packages(packages) / "node_modules" / ".bin" / name)


def node() -> str:
    """Returns the path of Node.js."""
    return _program("node")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not on PATH. The clients of JavaScript need Node.js 20 or later with npm.")
    return found


def _built(name: str, contents: Sequence[bytes], build: Callable[[Path], None]) -> Path:
    """Returns the folder that `build` fills, of this name and these contents. Builds it if it is not there."""
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    folder = CACHE / f"{name}-{digest}"
    with _locked(folder):
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            build(folder)
            (folder / _COMPLETE).touch()
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time build a folder: tests may run in several."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str], purpose: str, folder: Path | None = None) -> None:
    """Runs one step of a build. A step that fails is a failure of the test, with what the program printed."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"Could not {purpose} within {_INSTALL_WITHIN_S} s. Is the registry reachable from here?")
    if done.returncode != 0:
        said = f"{done.stdout}\n{done.stderr}".strip()[-2000:]
        pytest.fail(f"Could not {purpose}. Is the registry reachable from here? It said:\n{said}")
