"""Tests of draining one of three engines under the load of agents. The engines, gateways and stores are real."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.drain import measure

pytestmark = pytest.mark.slow

AGENTS = 12


def test_sessions_of_a_drained_engine_find_their_history_in_a_tier(tmp_path: Path) -> None:
    """No turn fails or is refused while one of three engines drains; it ends in good order, and the sessions that move
    go on with 80 % of their tokens from a tier.
    """
    drain = asyncio.run(measure(tmp_path, AGENTS, warm_s=10.0))

    assert (drain.failed, drain.exit_status) == (0, 0)
    assert drain.turns_meanwhile >= AGENTS
    assert drain.sessions_moved > 0
    assert drain.cached_share is not None
    assert drain.cached_share >= 0.8
