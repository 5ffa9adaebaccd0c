"""What the client costs: the size of a fresh environment with `pip install graftwork`, and the time of its import.

Builds the wheel from this tree, installs it without extras, and measures. Exit status 1 where a limit is passed.
Needs a package index.

    python benchmarks/client_install.py [--json OUT]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_BYTES = 80_000_000
MAX_IMPORT_S = 0.3
_ROUNDS = 9
_NOT_PACKED = frozenset({"build", "dist", "site", "graftwork-data", "tests"})
"""Folders at the root that are no part of a distribution."""
_TIMED_IMPORT = """
import time
started_at = time.process_time()
import graftwork
graftwork.Graftwork, graftwork.AsyncGraftwork  # the package loads them on first use
print(time.process_time() - started_at)
"""


@dataclass(frozen=True, slots=True)
class ClientFigures:
    environment_bytes: int
    """Of the whole environment on disk, with pip and setuptools, which are there before."""
    bytes_before: int
    """Of the environment before the client was installed."""
    import_s: float
    """Processor time of loading both clients, the least of fresh processes: other work can only add to it."""
    import_samples_s: tuple[float, ...]
    packages: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.environment_bytes < MAX_BYTES and self.import_s < MAX_IMPORT_S


def build_distributions(into: Path) -> tuple[Path, Path]:
    """The wheel, built from the source distribution, and that; from a copy, so that the tree stays clean."""
    copy = into / "tree"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=_left_out)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into / "dist"), str(copy))
    (wheel,) = (into / "dist").glob("*.whl")
    (source,) = (into / "dist").glob("*.tar.gz")
    return wheel, source


def _left_out(folder: str, names: list[str]) -> set[str]:
    """What of a folder is not copied: hidden and compiled files anywhere, and at the root what is not packed."""
    at_root = _NOT_PACKED if Path(folder) == ROOT else frozenset()
    return {
        name for name in names if name in at_root or name.startswith(".") or name.endswith(("cache__", ".egg-info"))
    }


def install(wheel: Path, environment: Path) -> Path:
    """The interpreter of a new environment with this wheel and what it requires."""
    python = environment / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
    return python


def measure(folder: Path) -> ClientFigures:
    """`folder` is empty, and holds the wheel and the environment afterwards."""
    wheel, _ = build_distributions(folder)
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    bytes_before = _bytes_on_disk(environment)
    python = install(wheel, environment)
    samples = [float(_run(str(python), "-c", _TIMED_IMPORT, cwd=folder)) for _ in range(_ROUNDS)]
    return ClientFigures(
        environment_bytes=_bytes_on_disk(environment),
        bytes_before=bytes_before,
        import_s=min(samples),
        import_samples_s=tuple(samples),
        packages=tuple(_run(str(python), "-m", "pip", "list", "--format=freeze").split()),
    )


def _bytes_on_disk(folder: Path) -> int:
    """What `du` counts: whole blocks, symlinks not followed."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _run(*command: str, cwd: Path | None = None) -> str:
    """Standard output; what failed says why."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graftwork-client-") as folder:
        figures = measure(Path(folder))
    megabytes, before = figures.environment_bytes / 1e6, figures.bytes_before / 1e6
    print(f"environment  {megabytes:6.1f} MB, of which {before:.1f} MB empty (limit {MAX_BYTES / 1e6:.0f} MB)")
    print(
        f"import       {figures.import_s:6.3f} s, least of {_ROUNDS} processes, processor time (limit {MAX_IMPORT_S} s)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    sys.exit(0 if figures.holds else 1)


if __name__ == "__main__":
    main()
