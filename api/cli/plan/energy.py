"""Reads the energy that this machine takes: of its processors by RAPL, and of its GPUs by nvidia-smi.

Never guesses: what cannot be read is None, with a reason.
"""

import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The counters of one moment."""

    at: float
    """On a monotonic clock, in seconds."""
    packages: dict[str, tuple[int, int]]
    """By package: microjoules so far, and the number at which the counter starts again."""
    gpu_watts: float | None


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy between two readings, in joules; None if it cannot be read."""

    joules: float | None
    source: str
    """What was read, or why nothing was."""


def read_energy(folder: Path = _POWERCAP) -> EnergyReading:
    """Reads all counters that can be read."""
    packages = {}
    for path in sorted(folder.glob("intel-rapl:?")):
        try:
            used, most = ((path / name).read_text(encoding="ascii") for name in ("energy_uj", "max_energy_range_uj"))
            packages[path.name] = (int(used), int(most))
        except (OSError, ValueError):
            continue  # no permission, or no such counter
    return EnergyReading(time.monotonic(), packages, _gpu_watts())


def energy_between(before: EnergyReading, after: EnergyReading) -> Energy:
    """Returns the energy between two readings. A counter that has started again counts on."""
    sources, joules = [], 0.0
    for name, (used, most) in after.packages.items():
        if name in before.packages:
            joules += ((used - before.packages[name][0]) % (most + 1)) / 1e6
            sources.append(name)
    if before.gpu_watts is not None and after.gpu_watts is not None:
        joules += (before.gpu_watts + after.gpu_watts) / 2 * (after.at - before.at)
        sources.append("nvidia-smi, the mean of two readings")
    if not sources:
        return Energy(None, f"not readable: no counter in {_POWERCAP}, or no permission, and no nvidia-smi")
    return Energy(joules, " and ".join(sources))


def _gpu_watts() -> float | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    arguments = [program, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        return sum(float(line) for line in done.stdout.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
