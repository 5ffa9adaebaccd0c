"""Keeps one engine of a Ray fleet running: starts it, or finds the one that a former keeper has started; starts it again.

    EngineKeeper ──► `graftwork engine` (a process that outlives the keeper) ──► lease in the database ──► gateways

Owns the engine's process while it lives. Never sends it a request, and imports nothing of Ray.
Invariant: on one machine, one process at most has a replica id. `stop` lets the engine drain before it ends.
"""

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from graftwork.api.ray.detached_process import ProcessIdentity, start_detached
from graftwork.api.ray.engine_spec import EngineSpec, engine_command, free_address

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 15.0
_HEALTHY_AFTER_S = 30.0
"""After an engine that lived longer, the wait before the next start is the shortest one."""
_LOG_BYTES = 2000
"""The bytes at the end of an engine's log that are shown when it does not start."""


@dataclass(frozen=True, slots=True)
class KeeperState:
    """What a keeper says of its engine."""

    process_id: int | None
    """None while no engine runs."""
    starts: int
    """How often the engine was started by this keeper; 0 for one that was found."""
    is_stopping: bool
    has_ended: bool
    """Whether the engine has ended for good."""
    last_words: str
    """The end of the log of an engine that has ended by itself."""


class EngineKeeper:
    """Keeps one engine. Its methods may be called from any thread."""

    def __init__(
        self, replica_id: str, spec: EngineSpec, host: str, command: Callable[[str], list[str]] = engine_command
    ) -> None:
        """The engine listens at a free port of `host`. `command` returns the engine's command for an address."""
        self._replica_id, self._spec, self._host, self._command = replica_id, spec, host, command
        self._file, self._log_file = spec.identity_file(replica_id), spec.log_file(replica_id)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._must_stop = threading.Event()
        self._has_ended = threading.Event()
        self._process: ProcessIdentity | None = None
        self._starts = 0
        self._last_words = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self._thread.start()

    def state(self) -> KeeperState:
        process = self._process
        return KeeperState(
            None if process is None or not process.is_running else process.process_id,
            self._starts,
            self._must_stop.is_set(),
            self._has_ended.is_set(),
            self._last_words,
        )

    def stop(self) -> None:
        """Lets the engine drain and end. Returns at once. A second call changes nothing."""
        with self._lock:
            if self._must_stop.is_set():
                return
            self._must_stop.set()
            if self._process is not None:
                self._process.send(signal.SIGTERM)

    def wait(self, within_s: float | None = None) -> bool:
        """Waits until the engine has ended for good. Returns whether it has."""
        return self._has_ended.wait(within_s)

    def _keep(self) -> None:
        found = ProcessIdentity.read(self._file)
        backoff_s = _FIRST_BACKOFF_S
        while True:
            with self._lock:
                self._process = found
                if self._must_stop.is_set():
                    if found is None:
                        break
                    found.send(signal.SIGTERM)  # `stop` came before this process was known
                elif found is None:
                    self._process = self._start()
            if self._process is not None and self._watch(self._process) > _HEALTHY_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            found = None
            if not self._must_stop.is_set():
                self._last_words = self._end_of_log()
                _log.warning("engine_ended", extra={"replica": self._replica_id, "log": self._last_words})
                self._must_stop.wait(backoff_s * Random().uniform(0.8, 1.2))
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        self._file.unlink(missing_ok=True)
        self._has_ended.set()

    def _start(self) -> ProcessIdentity | None:
        address = free_address(self._host)
        environment = self._spec.engine_environment(self._replica_id, address)
        try:
            process = start_detached(self._command(address), environment, self._log_file)
        except (OSError, ValueError) as error:  # such as no memory, no process or no descriptor that is free
            _log.error("engine_not_started", extra={"replica": self._replica_id, "reason": str(error)})
            return None
        self._starts += 1
        if process is not None:
            process.write(self._file)
        return process

    def _watch(self, process: ProcessIdentity) -> float:
        """Waits until the process has ended. Returns about how many seconds that took."""
        waiting, watched_s = threading.Event(), 0.0
        while process.is_running:
            waiting.wait(_LOOK_EVERY_S)
            watched_s += _LOOK_EVERY_S
        return watched_s

    def _end_of_log(self) -> str:
        try:
            return self._log_file.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        except OSError:
            return ""
