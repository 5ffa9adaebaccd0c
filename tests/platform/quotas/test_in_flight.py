"""The answers that one gateway has in flight."""

from random import Random

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, InvalidRequest
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.in_flight import HeldPlaces, InFlightBound

ACME, UMBRELLA = TenantId("ten_acme"), TenantId("ten_umbrella")


def bound(total: int | None = None, tenant: int | None = None) -> InFlightBound:
    return InFlightBound(ManualClock(), total, tenant)


def test_a_tenant_takes_its_places_and_no_more() -> None:
    """The next request is refused with a time to retry, and another tenant's is not."""
    places = bound(tenant=3)
    places.take(ACME, 2)
    places.take(ACME, 1)

    with pytest.raises(CapacityContended, match="3 of your answers") as refusal:
        places.take(ACME, 1)
    places.take(UMBRELLA, 3)

    assert refusal.value.code == "queue_full"
    assert refusal.value.retry_after_s


def test_a_request_that_can_never_fit_is_not_to_be_retried() -> None:
    """More answers than a tenant may have is a 400 that names `n`."""
    with pytest.raises(InvalidRequest, match=r"4 answers.*at most 3") as refusal:
        bound(tenant=3).take(ACME, 4)

    assert (refusal.value.param, refusal.value.status) == ("n", 400)


def test_a_full_gateway_refuses_the_tenant_with_most() -> None:
    """A tenant with fewer answers in flight is passed on to the engine."""
    places = bound(total=4)
    places.take(ACME, 3)
    places.take(UMBRELLA, 1)

    with pytest.raises(CapacityContended, match="3 answers in it are yours"):
        places.take(ACME, 1)
    places.take(UMBRELLA, 1)


def test_leaving_the_block_frees_what_no_job_has_kept() -> None:
    """Kept places are freed by their release alone, and only once."""
    places = bound(tenant=1)
    with places.take(ACME, 1):
        pass
    with places.take(ACME, 1) as kept:
        kept.keep()

    with pytest.raises(CapacityContended):
        places.take(ACME, 1)
    kept.release()
    places.take(ACME, 1)
    kept.release()

    with pytest.raises(CapacityContended):
        places.take(ACME, 1)


def test_every_place_comes_back() -> None:
    """After any order of takes and releases, exactly as many fit as at the start."""
    random, places, held = Random(0), bound(tenant=10), list[HeldPlaces]()
    for _ in range(500):
        if held and random.random() < 0.5:
            held.pop(random.randrange(len(held))).release()
            continue
        try:
            held.append(places.take(ACME, random.randint(1, 4)))
        except CapacityContended:
            assert len(held) >= 2
    for one in held:
        one.release()

    places.take(ACME, 10)


def test_a_place_grows_to_the_answers_of_its_request() -> None:
    """The place taken first counts among those asked for; a refused resize leaves it as it was, to be released once."""
    places = bound(tenant=4)
    first = places.take(ACME, 1)
    other = places.take(ACME, 1)

    with pytest.raises(CapacityContended):
        first.resize(4)
    first.resize(3)
    with pytest.raises(CapacityContended):
        places.take(ACME, 1)
    first.release()
    other.release()
    places.take(ACME, 4)


def test_a_place_is_no_ground_for_its_own_refusal() -> None:
    """In a full gateway, a tenant with as much in flight as any other is refused, without counting the place itself."""
    places = bound(total=4)
    places.take(UMBRELLA, 1)
    places.take(ACME, 1)
    first = places.take(ACME, 1)

    with pytest.raises(CapacityContended):
        first.resize(3)
    first.resize(2)
    assert first.is_resized


def test_answers_of_others_lower_a_tenants_limit_by_a_quarter_at_most() -> None:
    """Of eight places a tenant gets seven beside one answer of another tenant, and six beside any more."""
    places = bound(tenant=8)
    one = places.take(UMBRELLA, 1)

    with pytest.raises(CapacityContended, match="at most 7"):
        places.take(ACME, 8)
    places.take(ACME, 7).release()
    places.take(UMBRELLA, 5)
    with pytest.raises(CapacityContended, match="at most 6"):
        places.take(ACME, 7)
    places.take(ACME, 6)

    one.release()
