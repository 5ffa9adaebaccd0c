"""Notices engines that have fallen silent, such as stopped processes and machines that were cut off.

    question ──(ticks pass)──► answer: its wait is remembered
        └──(more ticks than the limit)──► silent: its requests go on elsewhere

Owns the waits. Never talks to an engine. The limit follows the waits of the last questions, so that an engine that
answers late because its machine is busy is not taken for a stopped one. Time counts only while this process runs: a
gateway that was stopped itself, or whose event loop was late, counts a late tick as two ticks at most. Ticks are needed
only while a question is open.
Source: accrual failure detectors (Hayashibara et al. 2004), with the largest recent wait in place of a distribution.
"""

from collections import deque

TICK_S = 0.1
"""Seconds between two ticks."""
LEAST_LIMIT_S = 0.8
"""The least silence, in seconds, after which an engine counts as silent."""
_FACTOR = 3.0
"""How many times longer than the largest recent wait a silence must be."""
_RECENT = 64
"""The answers whose waits are remembered: those of 16 seconds, if an engine is asked four times a second."""
_ANSWERS_S = 0.3
"""An engine that has waited no longer than this shows that the gateway and the network work."""


class SilenceMonitor:
    """Measures how long each engine of a fleet has not answered. Times are seconds."""

    def __init__(self, most_limit_s: float) -> None:
        """`most_limit_s` is the longest silence that no engine may have, however late it answers at other times."""
        self._most_limit_s = most_limit_s
        self._waited: dict[str, float] = {}
        """By replica with an open question: how long it has waited."""
        self._recent: dict[str, deque[float]] = {}
        self._ticked_at: float | None = None

    @property
    def has_questions(self) -> bool:
        """Whether an engine owes an answer."""
        return bool(self._waited)

    def start(self, now: float) -> None:
        """Notes that ticks begin again: what passed before `now` counts in no wait."""
        self._ticked_at = now

    def ask(self, replica_id: str) -> None:
        """Notes that an engine was asked. Does nothing if an earlier question is open."""
        self._waited.setdefault(replica_id, 0.0)

    def note_answer(self, replica_id: str) -> None:
        """Notes that an engine has answered."""
        waited = self._waited.pop(replica_id, None)
        if waited is not None:
            self._recent.setdefault(replica_id, deque(maxlen=_RECENT)).append(waited)

    def note_sign(self, replica_id: str) -> None:
        """Notes a sign of life, such as a token, of an engine that has not answered yet."""
        if replica_id in self._waited:
            self._waited[replica_id] = 0.0

    def forget(self, replica_id: str) -> None:
        """Forgets an engine, because it is gone or has started again."""
        self._waited.pop(replica_id, None)
        self._recent.pop(replica_id, None)

    def tick(self, now: float) -> None:
        """Lets time pass. A tick counts at most twice its length."""
        passed = 0.0 if self._ticked_at is None else min(now - self._ticked_at, 2 * TICK_S)
        self._ticked_at = now
        for replica_id in self._waited:
            self._waited[replica_id] += passed

    def limit_s(self, replica_id: str) -> float:
        """Returns the silence after which the engine counts as silent."""
        longest = max(self._recent.get(replica_id, ()), default=0.0)
        return min(max(LEAST_LIMIT_S, _FACTOR * longest), max(self._most_limit_s, LEAST_LIMIT_S))

    def silent_s(self, replica_id: str) -> float:
        """Returns for how long the engine has been silent; 0 unless that is more than its limit."""
        waited = self._waited.get(replica_id, 0.0)
        return waited if waited > self.limit_s(replica_id) else 0.0

    def answers(self, replica_id: str) -> bool:
        """Returns whether the engine answers right now, as far as this gateway can tell."""
        return bool(self._recent.get(replica_id)) and self._waited.get(replica_id, 0.0) <= _ANSWERS_S
