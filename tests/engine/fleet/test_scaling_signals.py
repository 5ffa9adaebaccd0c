"""Tests of what the autoscaler is told, from what engines report."""

from dataclasses import replace

import pytest

from graftwork.engine.core.load import EngineLoad
from graftwork.engine.fleet.autoscaler import EngineSignals
from graftwork.engine.fleet.members import Member, MemberAddress
from graftwork.engine.fleet.scaling_signals import SignalReader
from tests.adapters.adapter_files import DESCRIPTION
from tests.engine.fleet.fake_members import FakeMember

PAGES = 200


def ready(load: EngineLoad) -> Member:
    """An engine of 200 pages that has reported this load."""
    member = Member(MemberAddress("one", "one"), lambda address: FakeMember())
    member.description, member.problem = replace(DESCRIPTION, device_pages=PAGES), None
    member.note_load(load)
    return member


def read(*loads: EngineLoad, every_s: float = 1.0, sent_tokens: int = 0) -> EngineSignals:
    """The signals after the last of several reports of one engine, to which the gateway has then sent tokens."""
    reader, member = SignalReader(), ready(loads[0])
    for number, load in enumerate(loads):
        member.note_load(load)
        member.sent_tokens = sent_tokens
        (found,) = reader.read(number * every_s, [member]).engines
    return found


def test_all_that_an_engine_reports_counts() -> None:
    """The queue in seconds has what was sent since the report, KV is the share of pages that requests hold, and the
    estimate of a first token is the queue and the request's own token at the engine's speed.
    """
    load = EngineLoad(queued_tokens=300, free_pages=50, prefill_token_s=0.002, running_requests=2, waiting_requests=3)

    signals = read(load, sent_tokens=100)

    assert signals.queued_s == pytest.approx(0.8)
    assert signals.kv_use == pytest.approx(0.75)
    assert signals.first_token_s == pytest.approx(401 * 0.002)
    assert signals.requests == 5
    assert signals.adapter_load_share == 0.0


@pytest.mark.parametrize(("measured_s", "share"), [(None, 4 * 0.1 / 2), (0.75, 4 * 0.75 / 2), (0.002, 4 * 0.002 / 2)])
def test_missed_adapters_cost_what_the_engine_has_measured(measured_s: float | None, share: float) -> None:
    """Four loads in two seconds count with the engine's own time for a load, or with the usual one before its first."""
    before = EngineLoad(free_pages=PAGES, adapter_loads=10, adapter_load_s=measured_s)

    signals = read(before, replace(before, adapter_loads=14), every_s=2.0)

    assert signals.adapter_load_share == pytest.approx(share)


def test_an_engine_that_has_started_again_has_missed_nothing() -> None:
    """Counters that begin anew are no loads, and an engine that gets no requests tells the autoscaler nothing."""
    before = EngineLoad(free_pages=PAGES, adapter_loads=10)
    draining = ready(before)
    draining.is_draining = True

    assert read(before, replace(before, adapter_loads=2)).adapter_load_share == 0.0
    assert SignalReader().read(0.0, [draining]).engines == ()
