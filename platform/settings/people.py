"""The settings of one subject: how people sign in, and what the groups of their identity provider may do."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import parse_text, seconds

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SCOPE = re.compile(r"[!#-\[\]-~]{1,100}")


def is_safe_url(url: str) -> bool:
    """Returns whether a URL is one of HTTPS, or of plain HTTP on this machine, with no user, query or fragment in it."""
    try:
        parts = urlsplit(url)
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
        host = parts.hostname or ""
    except ValueError:
        return False
    return is_plain and bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK))


def parse_issuer(value: object) -> str:
    """Parses the address of an identity provider, which must be exactly the one that the provider's tokens name."""
    if not is_safe_url(str(value)) or len(str(value)) > 500:
        raise ValueError("give an address such as https://login.example.com; http only on this machine")
    return str(value)


def parse_public_url(value: object) -> str:
    """Parses the address at which browsers reach the gateway."""
    if not is_safe_url(str(value)):
        raise ValueError("give an address such as https://graftwork.example.com; http only on this machine")
    return str(value).rstrip("/")


def parse_scopes(value: object) -> tuple[str, ...]:
    """Parses names of scopes with spaces or commas between them."""
    found = tuple(value) if isinstance(value, list | tuple) else tuple(str(value).replace(",", " ").split())
    if "openid" not in found or not all(_SCOPE.fullmatch(str(one)) for one in found):
        raise ValueError("give names such as openid email profile; openid must be among them")
    return tuple(str(one) for one in found)


def parse_role_map(value: object) -> tuple[tuple[str, str], ...]:
    """Parses roles by groups: a list, or text with commas between, of GROUP=ROLE."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    pairs = [str(part).strip().rpartition("=") for part in parts]
    if not all(group and role for group, _, role in pairs):
        raise ValueError("give GROUP=ROLE, such as platform=operator or team-a=tenant-admin:ten_…")
    return tuple((group, role) for group, _, role in pairs)


@dataclass(frozen=True)
class PeopleSettings:
    """How people sign in."""

    oidc_issuer: str | None = setting(None, parse_issuer)
    """The OpenID Connect provider of the people, such as `https://login.example.com`. It needs `oidc_client_id`.

    It is HTTPS, but for a provider on this machine. Without it, only keys sign in.
    """
    oidc_client_id: str | None = setting(None, parse_text)
    """The id that the provider has given to the console."""
    oidc_client_secret: str | None = setting(None, parse_text, is_secret=True)
    """The secret of that client. None for a public client, which has only PKCE."""
    oidc_cli_client_id: str | None = setting(None, parse_text)
    """The id of a public client with the device flow, for `graftwork login`. None offers no such sign-in."""
    oidc_name: str = setting("single sign-on", parse_text)
    """What the sign-in page calls the provider: Sign in with NAME."""
    oidc_scopes: tuple[str, ...] = setting(("openid", "email", "profile"), parse_scopes)
    """What the gateway asks the provider for; the variable has them with commas or spaces between."""
    oidc_groups_claim: str = setting("groups", parse_text)
    """The claim of the ID token that has the person's groups."""
    oidc_roles: tuple[tuple[str, str], ...] = setting((), parse_role_map)
    """Roles by groups, as GROUP=ROLE with commas between, such as `platform=operator,team-a=tenant-admin:ten_…`."""
    oidc_session_s: float = setting(43_200.0, seconds(300, 604_800))
    """Seconds, 300 to 604800, after which a person must sign in to the console again; sooner if the provider says so."""
    oidc_token_s: float = setting(900.0, seconds(60, 86_400))
    """Seconds, 60 to 86400, for which a token of `graftwork login` is valid; then the command line renews it."""
    public_url: str | None = setting(None, parse_public_url)
    """The address at which browsers reach the gateway. None takes the one that each request names."""
