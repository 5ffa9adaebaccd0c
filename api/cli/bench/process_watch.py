"""Reads how much memory and how many descriptors a process and its children have, from Linux's /proc.

Owns nothing. Elsewhere than on Linux there are no figures.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_RESIDENT = "VmRSS:"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process and all its descendants have at one moment, added up."""

    rss_bytes: int
    """Resident memory. A page that two processes share counts twice."""
    descriptors: int
    processes: int


def process_use(process_id: int) -> ProcessUse | None:
    """Returns the use of a process with its descendants; None if it is gone, or if this is not Linux."""
    if not (_PROC / str(process_id) / "status").exists():
        return None
    rss, descriptors, processes = 0, 0, 0
    for one in _with_descendants(process_id):
        with suppress(OSError):  # it may end at any moment
            rss += _resident_bytes(one)
            descriptors += sum(1 for _ in (_PROC / str(one) / "fd").iterdir())
            processes += 1
    return ProcessUse(rss, descriptors, processes)


def _with_descendants(process_id: int) -> list[int]:
    found = [process_id]
    for one in found:  # grows while it is read
        with suppress(OSError):
            for task in (_PROC / str(one) / "task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _resident_bytes(process_id: int) -> int:
    for line in (_PROC / str(process_id) / "status").read_text().splitlines():
        if line.startswith(_RESIDENT):
            return 1024 * int(line.split()[1])
    return 0
