"""A wall limit on every test, so that nothing can hang a whole run.

pytest-timeout fails a test that runs past its limit, prints the stacks of all threads, and the run goes on. Two hangs
escape it: code that never returns to the interpreter, and the teardown of a test that has failed already. For them
the process prints its stacks and ends; under xdist another worker takes its place.
"""

import faulthandler
import os
from collections.abc import Generator

import pytest

from tests.hypothesis_profiles import is_search

SLOW_LIMIT_S = 1800
"""For slow tests, and for property tests in a search. The limit of all others stands in pyproject.toml."""
TEARDOWN_LIMIT_S = 300
_GRACE_S = 60
"""How long pytest-timeout gets to fail a test before the process ends."""

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real standard error, which pytest captures while tests run."""
    config.stash[_stderr] = os.dup(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time, unless they name a limit themselves."""
    for item in items:
        is_slow = "slow" in item.keywords or (is_search() and "hypothesis" in item.keywords)
        if is_slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Bound the whole test with its fixtures."""
    _end_process_after(_limit_of(item) + _GRACE_S, item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Bound the teardown by itself: a test that fails stops the clocks that ran until then."""
    _end_process_after(TEARDOWN_LIMIT_S, item)
    return (yield)


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker is not None else item.config.getini("timeout"))


def _end_process_after(limit_s: float, item: pytest.Item) -> None:
    faulthandler.dump_traceback_later(limit_s, file=item.config.stash[_stderr], exit=True)
