"""Keeps a process to some of the machine's cores, so that another one need not share its own.

Owns nothing. Only Linux can do this. A thread takes the cores of the thread that starts it, so call these functions
before a process has started its threads.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from graftwork.platform.errors import InvalidRequest

_SETTING = "engine_cores"


def run_on_engine_cores(cores: Collection[int]) -> None:
    """Keeps this process, an engine, to `cores`. Raises InvalidRequest if this process may not use one of them."""
    before = _usable_cores()
    try:
        os.sched_setaffinity(0, cores)
        got = os.sched_getaffinity(0)
    except (OSError, ValueError, OverflowError):
        got = set()
    if got != set(cores):
        os.sched_setaffinity(0, before)
        raise _refused(f"this engine cannot use core {min(set(cores) - got)}")


def leave_engine_cores(cores: Collection[int]) -> None:
    """Keeps this process, a gateway, and the processes that it starts, to the cores beside those of its engines.

    Raises InvalidRequest if this process may not use one of `cores`, or if none is left.
    """
    usable = _usable_cores()
    if missing := set(cores) - usable:
        raise _refused(
            f"core {min(missing)} is none of the cores that this process may use, which are {_names(usable)}"
        )
    if not usable - set(cores):
        raise _refused(f"that would leave the gateway none of the cores that it may use, which are {_names(usable)}")
    os.sched_setaffinity(0, usable - set(cores))


@contextmanager
def beside_engine_cores(cores: Collection[int]) -> Iterator[None]:
    """Keeps this thread, a client of a server on this machine, off the engine's cores until the end of the block."""
    before = _usable_cores()
    leave_engine_cores(cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def last_core() -> int | None:
    """Returns a core that can be set aside for an engine; None if there is no other one, or if this is not Linux."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    return max(cores) if len(cores) > 1 else None


def _usable_cores() -> set[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise _refused("only Linux can keep a process to some cores")
    return os.sched_getaffinity(0)


def _names(cores: Collection[int]) -> str:
    return ", ".join(str(core) for core in sorted(cores))


def _refused(reason: str) -> InvalidRequest:
    message = f"{_SETTING}: {reason}. Name cores of this machine, such as 1 or 2-7, or leave the setting out."
    return InvalidRequest(message, param=_SETTING)
