"""Tests of the bound on uploads in flight."""

import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import CapacityContended, RequestTimeout, Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.uploads import UploadBound

A, B, C = TenantId("ten_a"), TenantId("ten_b"), TenantId("ten_c")


def test_one_tenant_may_have_only_its_part() -> None:
    """Above its own limit a tenant is refused with a 429, and another tenant is not."""
    bound = UploadBound(3, 2, ManualClock(), 60.0)

    with bound.place(A), bound.place(A):
        with pytest.raises(CapacityContended, match="wait until one") as caught, bound.place(A):
            pass
        with bound.place(B):
            pass

    assert (caught.value.code, caught.value.status) == ("too_many_uploads", 429)
    assert caught.value.retry_after_s is not None


def test_all_tenants_together_have_a_limit() -> None:
    """Above the limit of all tenants an upload is refused with a 503, and admitted when another has ended."""
    bound = UploadBound(2, 2, ManualClock(), 60.0)

    with bound.place(A):
        with bound.place(B), pytest.raises(Unavailable, match="later") as caught, bound.place(C):
            pass
        with bound.place(C):
            pass

    assert (caught.value.code, caught.value.status) == ("too_many_uploads", 503)


def test_a_failed_upload_frees_its_place() -> None:
    """An upload that ends with an error holds no place."""
    bound = UploadBound(1, 1, ManualClock(), 60.0)

    with pytest.raises(ValueError, match="broken"), bound.place(A):
        raise ValueError("broken")

    with bound.place(A):
        pass


def test_a_place_is_a_lease() -> None:
    """A place is good for the whole lease and lost after it, and then another upload has it."""
    clock = ManualClock()
    bound = UploadBound(1, 1, clock, 60.0)

    with bound.place(A) as place:
        clock.advance(60.0)
        place.check()
        clock.advance(0.1)
        with pytest.raises(RequestTimeout) as caught:
            place.check()

    assert caught.value.headers() == {"x-should-retry": "false"}
    with bound.place(A) as next_place:
        next_place.check()
