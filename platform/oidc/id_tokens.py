"""Checks ID tokens, and reads from them who has signed in.

Only asymmetric signatures of an allow list count: `none` has no signature, and an HMAC could be made with the public
key. Which key is used is decided by the token's `kid`, and whether its type fits the token's algorithm by us.
Never logs or stores a token; errors do not quote one.
Source: OpenID Connect Core 1.0, section 3.1.3.7; RFC 8725 (JWT best practices), sections 3.1 to 3.10.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
from jwt.types import Options

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.oidc.provider import Provider
from graftwork.platform.people.person import Identity

CLOCK_SKEW_S = 60.0
"""By how much the clocks of the provider and of the gateway may differ."""
MAX_AGE_S = 600.0
"""How long after it was made a token may sign somebody in."""
_KEY_TYPES = {
    "RS256": ("RSA", None),
    "RS384": ("RSA", None),
    "RS512": ("RSA", None),
    "PS256": ("RSA", None),
    "PS384": ("RSA", None),
    "PS512": ("RSA", None),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""By allowed algorithm: the type of its keys, and their curve."""
_MOST_CHARACTERS = 32_768
_MOST_GROUPS = 1000


@dataclass(frozen=True, slots=True)
class Expected:
    """What a token must say."""

    client_id: str
    """The client to which the token was given."""
    nonce: str | None = None
    """The nonce of the sign-in. None for the device flow, which has none."""


class IdTokens:
    """Checks the tokens of one provider. `groups_claim` is the claim that has the person's groups."""

    def __init__(self, provider: Provider, clock: Clock, groups_claim: str = "groups") -> None:
        self._provider = provider
        self._clock = clock
        self._groups_claim = groups_claim

    async def check(self, token: str, expected: Expected) -> Identity:
        """Returns who has signed in. Raises NotAuthenticated for a token that is not right in any way, and Unavailable if
        the provider's keys cannot be read.
        """
        claims = await self._verified(token)
        self._check_claims(claims, expected)
        return self._identity(claims)

    async def _verified(self, token: str) -> Mapping[str, Any]:
        """Returns the claims of a token whose signature is right. Checks no claim."""
        if len(token) > _MOST_CHARACTERS:
            raise _refused("it is too long")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError as error:
            raise _refused("it is not a signed token") from error
        algorithm, kid = str(header.get("alg")), header.get("kid")
        if algorithm not in _KEY_TYPES:
            raise _refused(f"its algorithm {algorithm[:20]!r} is not allowed")
        if "crit" in header:
            raise _refused("it needs an extension")
        keys = _fitting(await self._provider.signing_keys(), algorithm, kid)
        if not keys:
            keys = _fitting(await self._provider.signing_keys(again=True), algorithm, kid)
        if len(keys) != 1:
            raise _refused("its key is not among the provider's")
        try:
            key = jwt.PyJWK(dict(keys[0]), algorithm=algorithm)
            claims = jwt.decode(token, key, algorithms=[algorithm], options=_NO_CHECKS)
        except (jwt.InvalidTokenError, jwt.PyJWKError) as error:
            raise _refused("its signature is not right") from error
        return claims

    def _check_claims(self, claims: Mapping[str, Any], expected: Expected) -> None:
        now = self._clock.now()
        if claims.get("iss") != self._provider.issuer:
            raise _refused("it is of another issuer")
        audience = claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if expected.client_id not in audiences:
            raise _refused("it is for another client")
        if claims.get("azp", expected.client_id) != expected.client_id or (len(audiences) > 1 and "azp" not in claims):
            raise _refused("it was given to another client")
        if _time(claims, "exp") <= now - CLOCK_SKEW_S:
            raise _refused("it has expired")
        if _time(claims, "iat") > now + CLOCK_SKEW_S or ("nbf" in claims and _time(claims, "nbf") > now + CLOCK_SKEW_S):
            raise _refused("it is not valid yet: compare the clocks of the provider and of the gateway")
        if _time(claims, "iat") < now - MAX_AGE_S - CLOCK_SKEW_S:
            raise _refused("it is too old to sign in with")
        if expected.nonce is not None:
            nonce = claims.get("nonce")
            if not isinstance(nonce, str) or not hmac.compare_digest(nonce.encode(), expected.nonce.encode()):
                raise _refused("it belongs to another sign-in")

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        subject, email = claims.get("sub"), claims.get("email")
        if not isinstance(subject, str) or not 1 <= len(subject) <= 255 or "\0" in subject:
            raise _refused("it names no subject")
        is_usable = isinstance(email, str) and 1 <= len(email) <= 320 and "\0" not in email
        is_verified = claims.get("email_verified", True) in (True, "true")
        ends_at = claims.get("session_expiry")
        return Identity(
            self._provider.issuer,
            subject,
            email if is_usable and is_verified else None,
            _groups(claims.get(self._groups_claim)),
            float(ends_at) if isinstance(ends_at, int | float) and not isinstance(ends_at, bool) else None,
        )


_NO_CHECKS: Options = {
    "verify_exp": False,
    "verify_nbf": False,
    "verify_iat": False,
    "verify_aud": False,
    "verify_iss": False,
    "verify_sub": False,
    "verify_jti": False,
}
"""Our own checks of claims use the gateway's clock, and also refuse what PyJWT lets pass, such as a missing claim."""


def _fitting(keys: Sequence[Mapping[str, Any]], algorithm: str, kid: object) -> list[Mapping[str, Any]]:
    """Returns the keys that may have made a signature: all that fit, if the token names no key."""
    key_type, curve = _KEY_TYPES[algorithm]
    return [
        key
        for key in keys
        if key.get("kty") == key_type
        and (curve is None or key.get("crv") == curve)
        and key.get("use", "sig") == "sig"
        and key.get("alg", algorithm) == algorithm
        and (kid is None or key.get("kid") == kid)
    ]


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refused(f"it has no time {name}")
    return float(value)


def _groups(value: object) -> tuple[str, ...]:
    groups = value if isinstance(value, list) else [value]
    return tuple(group for group in groups[:_MOST_GROUPS] if isinstance(group, str))


def _refused(reason: str) -> NotAuthenticated:
    return NotAuthenticated(f"This ID token cannot be used: {reason}. Sign in again.", code="id_token_refused")
