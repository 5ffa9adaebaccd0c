"""Runs `graftwork` with a wall clock that another process can move: python -m graftwork.api.cli.chaos.clock_jump FILE …

Owns `time.time` of its process: it adds the seconds that stand in FILE, which is read ten times a second. The monotonic
clock stays right, as it does when an operator or NTP sets the time of a machine.
"""

import runpy
import sys
import threading
import time
from pathlib import Path

_READ_EVERY_S = 0.1

_true_time = time.time
_offset_s = 0.0


def _moved_time() -> float:
    return _true_time() + _offset_s


def _follow(file: Path) -> None:
    global _offset_s
    while True:
        try:
            _offset_s = float(file.read_text() or 0)
        except (OSError, ValueError):
            _offset_s = 0.0
        time.sleep(_READ_EVERY_S)


def main() -> None:
    """Replaces the clock before any other module has read it, and runs the program with the other arguments."""
    file = Path(sys.argv.pop(1))
    time.time = _moved_time
    threading.Thread(target=_follow, args=(file,), daemon=True, name="clock").start()
    runpy.run_module("graftwork.api.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
