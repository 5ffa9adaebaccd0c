"""The memory of keys that were right a moment ago."""

from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.verified_keys import RecentKeys

ACME, UMBRELLA = TenantId("ten_acme"), TenantId("ten_umbrella")


def test_a_key_is_known_for_ten_seconds_after_it_was_last_right(manual_clock: ManualClock) -> None:
    """Each right use begins the ten seconds anew; a key that never was right is unknown."""
    keys = RecentKeys(manual_clock)
    keys.note_right("gw_a_secret", ACME)
    manual_clock.advance(9)
    keys.note_right("gw_a_secret", ACME)
    manual_clock.advance(9)

    assert keys.tenant_of("gw_a_secret") == ACME
    assert keys.tenant_of("gw_a_secreT") is None
    manual_clock.advance(1)
    assert keys.tenant_of("gw_a_secret") is None


def test_a_key_that_was_refused_is_forgotten_at_once(manual_clock: ManualClock) -> None:
    """A revoked key has no tenant from its first refusal on; other keys keep theirs."""
    keys = RecentKeys(manual_clock)
    keys.note_right("gw_a_secret", ACME)
    keys.note_right("gw_b_secret", UMBRELLA)

    keys.note_wrong("gw_a_secret")

    assert (keys.tenant_of("gw_a_secret"), keys.tenant_of("gw_b_secret")) == (None, UMBRELLA)


def test_ten_thousand_keys_are_held(manual_clock: ManualClock) -> None:
    """One key more drops the key that was not used for longest."""
    keys = RecentKeys(manual_clock)
    for number in range(10_000):
        keys.note_right(str(number), ACME)
    keys.note_right("0", ACME)
    keys.note_right("one more", ACME)

    assert (keys.tenant_of("0"), keys.tenant_of("1"), keys.tenant_of("2")) == (ACME, None, ACME)
