"""Tests of `graftwork bench chaos`: its verdicts, and one run with real processes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from graftwork.api.cli.chaos.chaos import Chaos, Struck, claims
from graftwork.api.cli.chaos.whole_fleet import FleetPlan
from tests.api.cli.conftest import Graftwork

GOOD = Chaos(
    plan=FleetPlan(),
    agents=2,
    struck=(Struck("killed", 35.0, (2.0, 3.0)), Struck("stopped", 1.0)),
    chats=9,
    turns=9,
    failed_turns=0,
    reconnects=3,
    refused=0,
    lost=(),
    wrong_events=(),
    wrong_bills=(),
    untyped_ends=(),
)


def test_a_fault_of_each_kind_breaks_its_promise() -> None:
    """35 s after a fault and a pause of 3 s are in time, more are not; each list of what is wrong breaks one promise."""
    wrong: dict[int, dict[str, Any]] = {
        0: {"struck": (Struck("killed", 35.1, (1.0,)),)},
        1: {"lost": ("turn_1",)},
        2: {"wrong_events": ("event 2",)},
        3: {"wrong_bills": ("turn_1",)},
        4: {"untyped_ends": ("turn_1",)},
        5: {"struck": (Struck("killed", 1.0, (1.0, 3.1)),)},
    }

    verdicts = {place: [claim.holds for claim in claims(replace(GOOD, **fields))] for place, fields in wrong.items()}

    assert all(claim.holds for claim in claims(GOOD))
    assert verdicts == {place: [number != place for number in range(6)] for place in wrong}


def test_without_a_fault_nothing_is_shown() -> None:
    """A run without a fault shows no recovery, and one without a moved stream decides nothing about pauses."""
    holds = [claim.holds for claim in claims(replace(GOOD, struck=()))]

    assert holds == [False, True, True, True, True, None]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_over_sqlite_goes_on(graftwork: Graftwork) -> None:
    """Each fault strikes once, work goes on after each, and nothing is lost, doubled or billed wrongly."""
    result = graftwork("bench", "chaos", "--agents", "4", "--store", "sqlite", "--json")

    found = json.loads(result.stdout)
    assert [claim for claim in found["claims"] if claim["holds"] is False] == []
    assert len({one["fault"] for one in found["struck"]}) == len(found["struck"]) >= 8
    assert found["chats"] > 0
    assert found["turns"] > 0
