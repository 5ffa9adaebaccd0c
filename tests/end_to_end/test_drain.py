"""Tests of what draining one of three engines costs the agents that it serves."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.drain import measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_AGENTS = 12
_WARM_S = 8.0
"""So long do the agents talk before the drain, so that their sessions have some pages."""
_GRACE_S = 30.0
"""The default of `drain_grace_s`."""
_LEAST_SHARE = 0.8


def test_a_drain_fails_no_turn_and_its_sessions_keep_their_pages(tmp_path: Path) -> None:
    """One of three engines drains under load: no turn fails or is refused, the engine ends with status 0 within its grace
    and the longest turn, and the sessions that move find four fifths of their tokens in a tier.
    """
    found = asyncio.run(measure(tmp_path, _AGENTS, _WARM_S, store="sqlite"))

    assert found.failed == 0
    assert found.exit_status == 0
    assert found.seconds <= _GRACE_S + found.longest_turn_s
    assert found.sessions_moved > 0
    assert found.cached_share is not None
    assert found.cached_share >= _LEAST_SHARE
