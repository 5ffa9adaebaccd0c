"""Signs a browser in by the authorization code flow with PKCE.

    browser ──► begin: cookie with a random text, sealed; redirect to the provider with state, nonce, code challenge
    provider ──► callback with code and state ──► finish: cookie checked, code exchanged, ID token checked

State, nonce and code verifier are made from the cookie's random text under the pepper. So they need no table, every
gateway with the same pepper can finish what another has begun, and whoever sees the state cannot tell the verifier.
Owns these derivations. Never makes a session: `platform/people/sign_in.py` does.
Source: OpenID Connect Core 1.0, section 3.1; RFC 7636 (PKCE); RFC 9207 (`iss` in the answer); RFC 9700 (best practice).
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from graftwork.platform.clock import Clock
from graftwork.platform.errors import NotAuthenticated, NotPermitted, Unavailable
from graftwork.platform.oidc.id_tokens import Expected, IdTokens
from graftwork.platform.oidc.provider import Provider
from graftwork.platform.people.person import Identity

SIGN_IN_FOR_S = 600
"""Seconds in which a sign-in that has begun must end."""
_COOKIE = re.compile(r"([0-9a-f]{64})_([0-9]{1,12})_([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Client:
    """The console as a client of the provider."""

    client_id: str
    secret: str | None = field(repr=False)
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """A sign-in that has begun."""

    cookie: str = field(repr=False)
    """What the browser keeps until the provider sends it back."""
    address: str
    """Where the browser goes."""


class CodeFlow:
    """The authorization code flow with one provider. `pepper` makes and seals what a sign-in needs."""

    def __init__(self, provider: Provider, tokens: IdTokens, client: Client, clock: Clock, pepper: bytes) -> None:
        self._provider = provider
        self._tokens = tokens
        self._client = client
        self._clock = clock
        self._pepper = pepper

    async def begin(self, redirect_uri: str) -> Begun:
        """Begins a sign-in, whose answer comes to `redirect_uri`. Raises Unavailable if the provider is away."""
        endpoints = await self._provider.endpoints()
        random, until = secrets.token_hex(32), int(self._clock.now()) + SIGN_IN_FOR_S
        challenge = hashlib.sha256(self._made("verifier", random).encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._client.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self._client.scopes),
            "state": self._made("state", random),
            "nonce": self._made("nonce", random),
            "code_challenge": _base64url(challenge),
            "code_challenge_method": "S256",
        }
        joint = "&" if "?" in endpoints.authorization else "?"
        cookie = f"{random}_{until}_{self._seal(random, until)}"
        return Begun(cookie, f"{endpoints.authorization}{joint}{urlencode(query)}")

    async def finish(self, cookie: str, answer: Mapping[str, str], redirect_uri: str) -> tuple[Identity, str]:
        """Returns who has signed in, and the state of the sign-in. `answer` is the query with which the browser came back.

        Raises NotAuthenticated for an answer that does not belong to this browser's sign-in or cannot be trusted,
        NotPermitted if the person or the provider has refused, and Unavailable if the provider is away.
        """
        random = self._opened(cookie)
        state = self._made("state", random)
        if not hmac.compare_digest(answer.get("state", "").encode("utf-8", "replace"), state.encode()):
            raise NotAuthenticated("This answer belongs to another sign-in; begin again.", code="sign_in_state")
        if answer.get("iss", self._provider.issuer) != self._provider.issuer:
            raise NotAuthenticated("This answer comes from another provider; begin again.", code="sign_in_state")
        if "error" in answer or not answer.get("code"):
            raise NotPermitted("The identity provider has refused the sign-in.", code="sign_in_denied")
        token = await self._exchange(answer["code"], self._made("verifier", random), redirect_uri)
        expected = Expected(self._client.client_id, self._made("nonce", random))
        return await self._tokens.check(token, expected), state

    async def _exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        """Returns the ID token for a code. What else the provider gives is dropped."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        secret = self._client.secret
        auth = None if secret is None else _basic(self._client.client_id, secret)
        if auth is None:
            form["client_id"] = self._client.client_id
        endpoints = await self._provider.endpoints()
        response = await self._provider.post_form(endpoints.token, form, auth)
        if response.status_code >= 500:
            raise Unavailable("The identity provider failed. Try again in a moment.", code="oidc_provider_away")
        try:
            body = response.json()
        except ValueError:
            body = None
        token = body.get("id_token") if isinstance(body, dict) else None
        if response.status_code != 200 or not isinstance(token, str):
            error = str(body.get("error", "no ID token"))[:60] if isinstance(body, dict) else "no JSON"
            message = f"The identity provider has not taken the code ({error}); begin again."
            raise NotAuthenticated(message, code="sign_in_code")
        return token

    def _opened(self, cookie: str) -> str:
        """Returns the random text of a cookie. Raises NotAuthenticated if it is missing, forged or too old."""
        match = _COOKIE.fullmatch(cookie)
        if match is None or not hmac.compare_digest(match[3], self._seal(match[1], int(match[2]))):
            raise NotAuthenticated("This browser has begun no sign-in; begin again.", code="sign_in_state")
        if self._clock.now() >= int(match[2]):
            raise NotAuthenticated("This sign-in took too long; begin again.", code="sign_in_state")
        return match[1]

    def _made(self, purpose: str, random: str) -> str:
        text = f"graftwork sign-in {purpose}\0{random}".encode()
        return _base64url(hmac.digest(self._pepper, text, hashlib.sha256))

    def _seal(self, random: str, until: int) -> str:
        text = f"graftwork sign-in cookie\0{random}_{until}".encode()
        return hmac.new(self._pepper, text, hashlib.sha256).hexdigest()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _basic(client_id: str, secret: str) -> tuple[str, str]:
    """Returns the name and password of HTTP Basic, form-encoded as RFC 6749, section 2.3.1, says."""
    return urlencode({"": client_id})[1:], urlencode({"": secret})[1:]
