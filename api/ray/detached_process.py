"""Starts and watches a process that is no child of this one, so that it lives on when this one ends.

Ray ends the children of an actor with the actor. An engine that is none of them goes on to serve when its actor, or all
of Ray, is gone; the next actor finds it by its identity.
Owns no process. Works on Linux, where Ray's clusters run.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from graftwork.platform.environment import child_environment

_START_TIME_FIELD = 19
"""The place of the start time in /proc/PID/stat, after the name in parentheses."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this machine. Unlike a process id alone, it never means another process later."""

    process_id: int
    started: int
    """The time of its start, in clock ticks since the machine's boot."""

    @classmethod
    def of(cls, process_id: int) -> "ProcessIdentity | None":
        """Returns the identity of a running process; None if there is none, or if it has ended and is a zombie."""
        try:
            content = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = content.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else cls(process_id, int(fields[_START_TIME_FIELD]))

    @classmethod
    def read(cls, file: Path) -> "ProcessIdentity | None":
        """Returns the process that a file names, if it still runs."""
        try:
            kept = cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return kept if kept.is_running else None

    def write(self, file: Path) -> None:
        """Replaces the file at once, so that no reader sees a part of it."""
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(file)

    @property
    def is_running(self) -> bool:
        return ProcessIdentity.of(self.process_id) == self

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.process_id, number)


def start_detached(command: Sequence[str], environment: Mapping[str, str], log: Path) -> ProcessIdentity | None:
    """Starts a process in a session of its own, whose parent ends at once. Its output is appended to `log`.

    Returns None if it has ended already.
    """
    orders = json.dumps({"command": [*command], "environment": {**environment}, "log": str(log)})
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.api.ray.detached_process"],
        input=orders,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ProcessIdentity.of(int(done.stdout))


def main() -> None:
    """Starts the process that standard input describes, prints its id, and ends without waiting for it."""
    orders = json.load(sys.stdin)
    with Path(orders["log"]).open("ab") as log:
        process = subprocess.Popen(
            orders["command"],
            env=child_environment({}, orders["environment"]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    sys.stdout.write(str(process.pid))
    sys.stdout.flush()
    os._exit(0)  # without Python's wait for its child


if __name__ == "__main__":
    main()
