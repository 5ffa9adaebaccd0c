"""What keys allow: scopes, models and networks."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.errors import NotPermitted, ValidationFailed
from graftwork.platform.keys.networks import checked_networks, is_within, require_network
from graftwork.platform.keys.scopes import (
    ALL_SCOPES,
    Scope,
    allows_model,
    checked_adapters,
    checked_scopes,
    require_models,
    require_scope,
)


@pytest.mark.parametrize("needed", list(Scope))
@pytest.mark.parametrize("held", list(Scope))
def test_a_scope_opens_its_own_routes(held: Scope, needed: Scope) -> None:
    """A scope allows itself, inference allows to read, and every refusal names the scope that is missing."""
    if needed is held or (held, needed) == (Scope.INFERENCE, Scope.READ):
        require_scope({held}, needed)
        return

    with pytest.raises(NotPermitted) as refusal:
        require_scope({held}, needed)

    assert refusal.value.code == "missing_scope"
    assert f"'{needed}'" in refusal.value.message


def test_unknown_scopes() -> None:
    """An unknown scope is refused by name; no list means all scopes, and an empty one none."""
    with pytest.raises(ValidationFailed, match="'everything'"):
        checked_scopes(["inference", "everything"])

    assert (checked_scopes(None), checked_scopes([])) == (ALL_SCOPES, frozenset())


@pytest.mark.parametrize(
    ("adapters", "model", "is_allowed"),
    [
        (None, "anything@7", True),
        ({"pirate"}, "pirate", True),
        ({"pirate"}, "pirate@3", True),
        ({"pirate"}, "pirate@prod", True),
        ({"pirate"}, "pirate2", False),
        ({"pirate"}, "base", False),
        ({"pirate"}, "@pirate", False),
        ({"pirate"}, "x@pirate", False),
        ({"pirate"}, "Pirate", False),
        ({"org/base"}, "org/base", True),
        (set(), "pirate", False),
    ],
)
def test_models(adapters: set[str] | None, model: str, is_allowed: bool) -> None:
    """A list of adapters allows each of them in all versions, and nothing else."""
    assert allows_model(adapters, model) is is_allowed
    if is_allowed:
        require_models(adapters, [model])
        return
    with pytest.raises(NotPermitted) as refusal:
        require_models(adapters, ["pirate", model])
    assert (refusal.value.code, refusal.value.param) == ("adapter_not_allowed", "model")


@pytest.mark.parametrize("names", [["pirate@2"], [""], ["  "], ["a\nb"], ["a"] * 101, ["x" * 201]])
def test_impossible_adapters(names: list[str]) -> None:
    """A list of adapters with an impossible name, or too many, is refused."""
    with pytest.raises(ValidationFailed) as refusal:
        checked_adapters(names)
    assert refusal.value.param == "adapters"


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("192.0.2.0/24", ["192.0.2.0", "192.0.2.255", "::ffff:192.0.2.9"], ["192.0.3.0", "191.0.2.1", "::192.0.2.9"]),
        ("192.0.2.7", ["192.0.2.7"], ["192.0.2.8"]),
        ("2001:db8::/32", ["2001:db8::1", "2001:DB8:ffff::"], ["2001:db9::", "192.0.2.7"]),
        ("::ffff:192.0.2.0/120", ["192.0.2.9", "::ffff:192.0.2.9"], ["192.0.3.9"]),
        ("0.0.0.0/0", ["255.255.255.255"], ["::1", "", "testclient", "192.0.2.1/24", "192.0.2.1 "]),
    ],
)
def test_networks(network: str, inside: list[str], outside: list[str]) -> None:
    """An address is in a network by its number, whatever its form; a client without an address is in none."""
    networks = checked_networks([network])
    assert networks is not None

    for address in inside:
        require_network(networks, address)
    for address in outside:
        with pytest.raises(NotPermitted):
            require_network(networks, address)


@given(st.ip_addresses(v=4), st.integers(0, 32), st.ip_addresses(v=4))
def test_networks_compare_the_first_bits(base: IPv4Address, length: int, address: IPv4Address) -> None:
    """An IPv4 address is in a network of n bits if its first n bits are the network's."""
    low = 32 - length
    network = IPv4Address(int(base) >> low << low)

    assert is_within((f"{network}/{length}",), str(address)) == (int(network) >> low == int(address) >> low)


@given(st.ip_addresses(v=6), st.integers(0, 128), st.ip_addresses(v=6))
def test_networks_of_ipv6_compare_the_first_bits(base: IPv6Address, length: int, address: IPv6Address) -> None:
    """The same for IPv6, but for addresses that are IPv4 ones in another form."""
    low = 128 - length
    network = IPv6Address(int(base) >> low << low)
    is_first = int(network) >> low == int(address) >> low

    assert is_within((f"{network}/{length}",), str(address)) == (is_first and address.ipv4_mapped is None)


@pytest.mark.parametrize("texts", [[], ["192.0.2.1/24"], ["192.0.2.0/33"], ["example.com"], [""], ["10.0.0.0/8"] * 101])
def test_impossible_networks(texts: list[str]) -> None:
    """A network with bits behind its prefix, other text, an empty list and too long a list are refused."""
    with pytest.raises(ValidationFailed) as refusal:
        checked_networks(texts)
    assert refusal.value.param == "allowed_ips"


def test_networks_are_stored_in_one_form() -> None:
    """Networks are stored in their usual form, each once; None stays None."""
    assert checked_networks(["2001:DB8:0::/32", "192.0.2.1", "192.0.2.1/32"]) == ("192.0.2.1/32", "2001:db8::/32")
    assert checked_networks(None) is None
