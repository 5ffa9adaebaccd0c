"""Finds the address to which a tenant's URL leads, so that no such URL reaches into the operator's own networks.

Alerts are sent to such URLs, and adapters are fetched from them.

    https://hooks.example.com/budget ──► resolve ──► every address is public ──► connect to the address that was checked

Owns the rules: http or https, no user and no password in the address, and public addresses only, unless the operator
allows their network. A name that has one inner address among public ones is refused as a whole. Never sends anything.
Invariant: the caller connects to an address that was checked here, so a name that resolves differently a moment later
(DNS rebinding) gains nothing.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urlsplit

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.keys.networks import is_within

MAX_URL_CHARACTERS = 2000
_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")


class InwardAddress(Exception):
    """Raised for a URL that leads to an address that is not public."""


class UnknownHost(Exception):
    """Raised if the name of a URL's host has no address now."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one request is sent."""

    url: str
    """The URL with the checked address instead of the host's name."""
    host: str
    """The host's name with its port, for the header `Host`."""
    server_name: str
    """The host's name, which the certificate of the server must have."""


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function that returns the IP addresses of a host's name and port. Raises OSError if there are none."""


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Asks the system for the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def check_url(url: str, param: str = "url") -> SplitResult:
    """Returns the parts of a tenant's URL, which is the field `param`. Raises ValidationFailed for one that is not allowed."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    is_right = (
        parts.scheme in _PORTS
        and parts.hostname
        and parts.username is None
        and parts.password is None
        and not parts.fragment
        and port != 0
        and len(url) <= MAX_URL_CHARACTERS
        and url.isascii()
        and url.isprintable()
        and " " not in url
    )
    if not is_right:
        raise ValidationFailed(
            f"{param} must be an http:// or https:// address of at most {MAX_URL_CHARACTERS} ASCII characters, without user, "
            "password and fragment.",
            param=param,
        )
    return parts


async def find_destination(url: str, allowed_networks: tuple[str, ...], resolve: Resolve) -> Destination:
    """Returns where to connect for a tenant's URL.

    `allowed_networks` are the inner networks that the operator allows. Raises InwardAddress and UnknownHost.
    """
    parts = check_url(url)
    assert parts.hostname is not None
    port = parts.port or _PORTS[parts.scheme]
    try:
        addresses = await resolve(parts.hostname, port)
    except (OSError, UnicodeError) as error:
        raise UnknownHost(f"the host {parts.hostname} has no address: {error}") from error
    if not addresses:
        raise UnknownHost(f"the host {parts.hostname} has no address")
    for address in addresses:
        if not (is_public(address) or is_within(allowed_networks, address)):
            raise InwardAddress(f"the host {parts.hostname} has the address {address}, which is not public")
    shown = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = name if port == _PORTS[parts.scheme] else f"{name}:{port}"
    return Destination(f"{parts.scheme}://{shown}:{port}{path}", host, parts.hostname)


def is_public(text: str) -> bool:
    """Returns whether an IP address is public: not of this machine, a private network, a link, or many receivers.

    An IPv6 address that stands for an IPv4 address is as public as that one.
    """
    try:
        address: IPv4Address | IPv6Address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            embedded.append(IPv4Address(int(address) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in embedded):
            return False
        if address.ipv4_mapped is not None or address in _NAT64:
            return True
    return address.is_global and not address.is_multicast
