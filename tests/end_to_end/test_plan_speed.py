"""The plan's tokens a second on this machine, against what a server of the demo model gives."""

from dataclasses import asdict

import pytest

from graftwork.api.cli.bench.load import Target
from graftwork.api.cli.bench.runs import throughput
from graftwork.api.cli.plan.speeds import MeasuredSpeed, levels_of
from graftwork.platform.clock import SystemClock
from tests.end_to_end.conftest import DemoServer

pytestmark = pytest.mark.slow


async def test_the_plan_is_near_a_measurement_that_it_has_not_seen(server: DemoServer) -> None:
    """From 1, 4 and 16 chats outstanding, the plan for 8 is within 20 % of what is measured; Little's law holds to 20 %."""
    target, clock = Target(server.url, server.key("Blackbeard"), "graftwork-demo"), SystemClock()
    phases = await throughput(target, (1, 4, 8, 16), 6.0, clock, lambda name, load: None)
    levels = levels_of({"phases": [asdict(phase) for phase in phases]})

    speed = MeasuredSpeed.fit([one for one in levels if one.outstanding != 8])

    (unseen,) = (one for one in levels if one.outstanding == 8)
    assert 8 / speed.step_s(8) == pytest.approx(unseen.tokens_per_s, rel=0.2)
    for one in levels:
        assert one.little == pytest.approx(1.0, abs=0.2)
