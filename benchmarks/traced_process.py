"""Runs a `graftwork` command while recording, on demand, which of the package's functions are entered and by whom.

    python benchmarks/traced_process.py --package DIR --control PATH -- module:function ARGUMENTS...

Recording is `sys.setprofile` in every thread, from the process's start; a generator or coroutine that is resumed counts
as entered. It also counts the transactions that SQLAlchemy begins and commits, by engine events. Each line that comes
over the Unix socket PATH is a command: `start` forgets what was recorded, `stop` answers it as one line of JSON.
With --transactions-only no function is recorded, so that the process keeps its speed.
"""

import argparse
import importlib
import json
import socket
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_NO_FUNCTIONS = frozenset({"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})


@dataclass(frozen=True, slots=True)
class Function:
    """Where a function stands."""

    file: str
    """Relative to the package."""
    line: int
    """Of its first decorator, or of its `def`."""
    name: str
    """Qualified."""


@dataclass(slots=True)
class Recording:
    """What was entered between a `start` and a `stop`."""

    functions: list[Function] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    """Caller and callee, as places in `functions`."""
    transactions: dict[str, int] = field(default_factory=dict)
    """`begin`, `commit` and `rollback`, as SQLAlchemy names them."""


class Recorder:
    """Owns what is recorded; `profile` is called by every thread, and only ever adds."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self._is_on = False
        self._codes: dict[int, CodeType] = {}  # by id: equal code objects of two files are two functions
        self._calls: set[tuple[int, int]] = set()
        self.transactions: Counter[str] = Counter()

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._is_on or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._package) or code.co_name in _NO_FUNCTIONS:
            return
        self._codes[id(code)] = code
        if frame.f_back is not None:
            self._calls.add((id(frame.f_back.f_code), id(code)))

    def start(self) -> None:
        self._codes, self._calls = {}, set()
        self.transactions.clear()
        self._is_on = True

    def stop(self) -> Recording:
        self._is_on = False
        codes, calls = self._codes, self._calls
        place_by_id = {code_id: place for place, code_id in enumerate(codes)}
        return Recording(
            functions=[self._function(code) for code in codes.values()],
            calls=[(place_by_id[one], place_by_id[other]) for one, other in calls if one in codes and other in codes],
            transactions=dict(self.transactions),
        )

    def _function(self, code: CodeType) -> Function:
        return Function(code.co_filename.removeprefix(self._package), code.co_firstlineno, code.co_qualname)


def count_transactions(transactions: Counter[str]) -> None:
    """Count what every SQLAlchemy engine of this process does, under the events' own names."""
    from sqlalchemy import Engine, event

    for name in ("begin", "commit", "rollback"):

        def count(connection: Any, name: str = name) -> None:
            transactions[name] += 1

        event.listen(Engine, name, count)


def answer_commands(recorder: Recorder, listener: socket.socket) -> None:
    """For ever; one connection a command."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            if stream.readline().strip() == "start":
                recorder.start()
                stream.write("{}\n")
            else:
                stream.write(json.dumps(asdict(recorder.stop())) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="functions of files below this folder are recorded")
    parser.add_argument("--control", required=True, help="the Unix socket on which commands are taken")
    parser.add_argument("--transactions-only", action="store_true", help="record no function")
    parser.add_argument("target", help="module:function of the command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    recorder = Recorder(options.package)
    count_transactions(recorder.transactions)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(options.control)
    listener.listen()
    threading.Thread(target=answer_commands, args=(recorder, listener), daemon=True).start()
    if not options.transactions_only:
        threading.setprofile(recorder.profile)
        sys.setprofile(recorder.profile)
    module, _, function = options.target.partition(":")
    sys.argv = ["graftwork", *options.arguments]
    sys.exit(getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    main()
