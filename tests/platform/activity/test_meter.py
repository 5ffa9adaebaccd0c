"""Tests of what is known of tenants, adapters and sessions at one moment."""

import pytest

from graftwork.platform.activity import meter as module
from graftwork.platform.activity.meter import ActivityMeter, RequestOwner
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import SessionId, TenantId
from graftwork.platform.objectives import Objective

ACME, OTHER = TenantId("ten_acme"), TenantId("ten_other")
OWNER = RequestOwner(ACME, "pirate@3", SessionId("ses_1"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def meter(clock: ManualClock) -> ActivityMeter:
    return ActivityMeter(clock, {"default": Objective(ttft_s=0.5, itl_s=0.1, target=0.9)})


def shown(meter: ActivityMeter) -> list[tuple[int, int]]:
    """The waiting and running requests of the tenant, the adapter and the session."""
    tenant, adapter = meter.tenants[ACME], meter.adapters[ACME, "pirate@3"]
    session = meter.sessions[SessionId("ses_1")]
    return [(tenant.waiting, tenant.running), (adapter.waiting, adapter.running), (session.waiting, session.running)]


def test_a_request_waits_then_runs_then_is_gone(meter: ActivityMeter) -> None:
    """Tenant, adapter and session show the same request: waiting, running, over."""
    watch = meter.begin(OWNER, "default")
    assert shown(meter) == [(1, 0)] * 3
    watch.admitted({"device": 30, "recomputed": 10})
    assert shown(meter) == [(0, 1)] * 3
    watch.end()
    watch.end()
    assert shown(meter) == [(0, 0)] * 3


def test_a_request_that_never_ran_leaves_the_queue(meter: ActivityMeter) -> None:
    """A request that fails before its admission is a refusal with its code, and waits no more."""
    watch = meter.begin(OWNER, "default")
    watch.failed("queue_full", by_server=False)
    watch.end()

    tenant = meter.tenants[ACME]
    assert (tenant.waiting, tenant.running) == (0, 0)
    assert tenant.by_name("refused") == {"queue_full": 1}


def test_a_failure_after_admission_is_no_refusal(meter: ActivityMeter) -> None:
    """The error of a running request counts among the failures."""
    watch = meter.begin(OWNER, "default")
    watch.admitted({"recomputed": 1})
    watch.failed("engine_unavailable", by_server=True)
    watch.end()

    tenant = meter.tenants[ACME]
    assert (tenant.by_name("refused"), tenant.by_name("failed")) == ({}, {"engine_unavailable": 1})


def test_tokens_and_latencies_of_a_request(meter: ActivityMeter, clock: ManualClock) -> None:
    """A tenant has the tokens by tier and what it generated; a session has what its latest turn had."""
    watch = meter.begin(OWNER, "default")
    watch.admitted({"device": 30, "host": 0, "recomputed": 10}, "evicted")
    watch.first_tokens(1, 0.25)
    for _ in range(9):
        watch.tokens(2, 0.05)
    watch.ended_well(0.05)
    watch.end()

    tenant, session = meter.tenants[ACME], meter.sessions[SessionId("ses_1")]
    assert tenant.by_name("tier") == {"device": 30, "recomputed": 10}
    assert (tenant.counts.totals["prompt"], tenant.counts.totals["generated"]) == (40, 19)
    assert tenant.first_token_s(0.99) == pytest.approx(0.25, rel=0.05)
    assert tenant.between_tokens_s(0.5) == pytest.approx(0.05, rel=0.05)
    assert (session.context_tokens, session.turns, session.miss_reason) == (59, 1, "evicted")


@pytest.mark.parametrize(("num_late", "rate"), [(0, 0.0), (1, 1.0), (10, 10.0)])
def test_burn_rate_is_the_bad_share_over_the_budget(meter: ActivityMeter, num_late: int, rate: float) -> None:
    """Of ten requests under a target of 0.9, one late one spends the budget exactly."""
    for number in range(10):
        watch = meter.begin(OWNER, "default")
        watch.admitted({"recomputed": 1})
        watch.first_tokens(1, 2.0 if number < num_late else 0.1)
        watch.ended_well(None)
        watch.end()

    assert meter.burn_rate(meter.tenants[ACME]) == pytest.approx(rate)


def test_no_objective_no_burn_rate(meter: ActivityMeter) -> None:
    """A tier without objectives has no burn rate, rather than 0."""
    watch = meter.begin(OWNER, "flex")
    watch.admitted({"recomputed": 1})
    watch.first_tokens(1, 9.0)
    watch.end()

    assert meter.burn_rate(meter.tenants[ACME]) is None


def test_memory_is_bounded(meter: ActivityMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle tenant is forgotten first; one with a running request never is."""
    monkeypatch.setattr(module, "MAX_OWNERS", 3)
    busy = meter.begin(RequestOwner(TenantId("ten_busy")), "default")
    for number in range(10):
        meter.refuse(TenantId(f"ten_{number}"), "rate_limited")

    assert set(meter.tenants) == {"ten_busy", "ten_8", "ten_9"}
    busy.end()


def test_a_deleted_tenant_is_forgotten(meter: ActivityMeter) -> None:
    """Its adapters and sessions go with it; others stay; a request of it that ends later brings nothing back."""
    running = meter.begin(OWNER, "default")
    meter.refuse(OTHER, "rate_limited")

    meter.forget_tenant(ACME)
    running.end()

    assert (set(meter.tenants), set(meter.adapters), set(meter.sessions)) == ({OTHER}, set(), set())
