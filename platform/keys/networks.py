"""Defines the lists of IP networks from which a key may be used.

An IPv4 address that arrives in IPv6 form (`::ffff:192.0.2.1`) counts as the IPv4 address. A client without an IP
address, such as one of a Unix-domain socket, is in no network.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from graftwork.platform.errors import NotPermitted, ValidationFailed

_MOST_NETWORKS = 100
Network = IPv4Network | IPv6Network


def checked_networks(texts: Collection[str] | None) -> tuple[str, ...] | None:
    """Returns the networks of a new key in their usual form, sorted and each once. None means that all are allowed.

    A network is CIDR text such as `192.0.2.0/24` or `2001:db8::/32`, or one address. Raises ValidationFailed for other
    text, for a network whose text has bits behind its prefix, for an empty list and for too many networks.
    """
    if texts is None:
        return None
    if not 1 <= len(texts) <= _MOST_NETWORKS:
        raise ValidationFailed(
            f"allowed_ips has 1 to {_MOST_NETWORKS} networks; leave it out to allow all addresses.",
            param="allowed_ips",
        )
    return tuple(sorted({str(_network(text)) for text in texts}))


def require_network(allowed: Sequence[str] | None, address: str) -> None:
    """Raises NotPermitted if a key with these networks may not be used from the IP address `address`."""
    if allowed is None or is_within(tuple(allowed), address):
        return
    raise NotPermitted(
        f"This key may not be used from the address {address or 'of your client, which is no IP address'}; "
        "use it from an address that it allows, or use another key.",
        code="address_not_allowed",
    )


def is_within(networks: tuple[str, ...], address: str) -> bool:
    """Returns whether an IP address is in one of the networks."""
    try:
        found: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in _parsed(networks))


@lru_cache(maxsize=1024)
def _parsed(networks: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in networks)


def _network(text: str) -> Network:
    try:
        found = ip_network(text.strip())
    except ValueError:
        raise ValidationFailed(
            "allowed_ips holds networks such as '192.0.2.0/24' or '2001:db8::/32', or single addresses, with no bits "
            "behind the prefix.",
            param="allowed_ips",
        ) from None
    if isinstance(found, IPv6Network) and found.prefixlen >= 96 and found.network_address.ipv4_mapped is not None:
        return ip_network((int(found.network_address.ipv4_mapped), found.prefixlen - 96))
    return found
