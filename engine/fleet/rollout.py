"""Decides which engines a fleet must start and stop, so that it has as many as it should, of the newest generation.

    wanted (number, generation) + present engines ──► Changes: start n, stop these

Computes only: never starts a process. Whoever supervises a fleet applies the changes and asks again.
Invariant: no change stops a ready engine if fewer than the wanted number would be ready without it, except those of a
roll-out without a surge, which may lack one.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PresentEngine:
    """One engine of a fleet as its supervisor sees it."""

    replica_id: str
    generation: int
    is_ready: bool
    """Whether gateways may give it requests."""
    is_stopping: bool = False
    """Whether it drains, or was told to end."""
    requests: int = 0
    """Requests that wait or run there."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What must be done now."""

    start: int = 0
    """Engines of the wanted generation to start."""
    stop: tuple[str, ...] = ()
    """Engines to drain and end."""


def changes(wanted: int, generation: int, present: Sequence[PresentEngine], surge: int = 1) -> Changes:
    """Returns what brings a fleet closer to `wanted` engines of a generation.

    During a roll-out, `surge` engines more than wanted may exist; with 0, one engine less than wanted may be ready.
    """
    live = [one for one in present if not one.is_stopping]
    current = [one for one in live if one.generation == generation]
    former = [one for one in live if one.generation != generation]
    start = max(min(wanted - len(current), wanted + surge - len(live)), 0)
    least_ready = wanted if surge or not former else max(wanted - 1, 0)
    spare = sum(one.is_ready for one in live) - least_ready
    stop = []
    surplus = len(current) - wanted
    for one in [*sorted(former, key=_cost), *sorted(current, key=_cost)]:
        is_former = one.generation != generation
        if not is_former and surplus <= 0:
            break
        if one.is_ready and spare <= 0:
            continue
        stop.append(one.replica_id)
        spare -= one.is_ready
        surplus -= not is_former
    return Changes(start, tuple(stop))


def _cost(engine: PresentEngine) -> tuple[bool, int, str]:
    """Returns the order in which engines stop: those that are not ready first, then those with the fewest requests."""
    return engine.is_ready, engine.requests, engine.replica_id


def free_id(prefix: str, taken: Sequence[str]) -> str:
    """Returns the first of `prefix`-0, `prefix`-1, … that no engine has, so that an engine finds the files of a former
    one.
    """
    number = 0
    while f"{prefix}-{number}" in taken:
        number += 1
    return f"{prefix}-{number}"
