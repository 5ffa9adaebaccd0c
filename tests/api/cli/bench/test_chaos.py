"""Tests of `graftwork bench chaos`: its verdicts, and one run with real processes."""

import json

import pytest

from graftwork.api.cli.bench.chaos import Chaos, Struck, claims
from tests.api.cli.conftest import Graftwork


def test_a_slow_client_or_a_lost_message_breaks_a_promise() -> None:
    """35 s after a fault are in time, more are not; one session that differs is a loss; without a fault nothing is shown."""
    good = Chaos((Struck("killed", 35.0), Struck("stopped", 1.0)), 9, 9, 0, ())
    slow = Chaos((Struck("killed", 35.1),), 9, 9, 0, ())
    lost = Chaos((Struck("killed", 1.0),), 9, 9, 0, ("ses_1",))

    assert [claim.holds for claim in claims(good)] == [True, True]
    assert [claim.holds for claim in claims(slow)] == [False, True]
    assert [claim.holds for claim in claims(lost)] == [True, False]
    assert [claim.holds for claim in claims(Chaos((), 0, 0, 0, ()))] == [False, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_over_sqlite_goes_on(graftwork: Graftwork) -> None:
    """Each fault of processes strikes once, work goes on after each, and nothing is lost."""
    result = graftwork("bench", "chaos", "--json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len({one["fault"] for one in found["struck"]}) == len(found["struck"]) == 5
    assert found["chats"] > 0
    assert found["turns"] > 0
