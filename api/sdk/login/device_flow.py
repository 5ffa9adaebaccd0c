"""Signs a person in without a browser on this machine: the device flow of the identity provider.

    start ──► a code and an address, which the person opens anywhere ──► poll until the provider has an answer

Speaks only with the provider, whose addresses come from its discovery document. Follows no redirect. Owns nothing that
lasts: the tokens go to the caller.
Source: RFC 8628 (device authorization grant), sections 3.1 to 3.5; RFC 6749, section 6 (refresh); RFC 7009 (revocation).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from graftwork.api.sdk.transport.errors import GraftworkError

_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_DEFAULT_INTERVAL_S = 5.0
_SLOWER_BY_S = 5.0
_DEFAULT_LIFE_S = 600.0
_MOST_WAIT_S = 60.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class LoginError(GraftworkError):
    """A sign-in has failed. `code` is that of the identity provider, or None."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """What the person must type where."""

    user_code: str
    verification_uri: str
    verification_uri_complete: str | None
    """The address with the code in it; None if the provider gives none."""
    device_code: str = field(repr=False)
    interval_s: float
    """The shortest time between two questions."""
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class ProviderTokens:
    """What the identity provider gives for a sign-in."""

    id_token: str = field(repr=False)
    refresh_token: str | None = field(repr=False)


class DeviceFlow:
    """The device flow with one provider. Tests replace `sleep` and `now`, which is in seconds."""

    def __init__(
        self,
        issuer: str,
        client_id: str,
        scopes: tuple[str, ...],
        http: httpx.Client,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuer = issuer
        self._client_id = client_id
        self._scopes = scopes
        self._http = http
        self._sleep = sleep
        self._now = now
        self._document: Mapping[str, Any] | None = None

    def start(self) -> DeviceCode:
        """Asks the provider for a code. Raises LoginError if the provider has no device flow, or refuses."""
        form = {"client_id": self._client_id, "scope": " ".join(self._scopes)}
        status, body = self._post("device_authorization_endpoint", form)
        names = ("device_code", "user_code", "verification_uri")
        if status != 200 or not all(isinstance(body.get(name), str) for name in names):
            raise _failed(body, "The identity provider gave no code")
        complete = body.get("verification_uri_complete")
        return DeviceCode(
            body["user_code"],
            body["verification_uri"],
            complete if isinstance(complete, str) else None,
            body["device_code"],
            _seconds(body.get("interval"), _DEFAULT_INTERVAL_S),
            _seconds(body.get("expires_in"), _DEFAULT_LIFE_S),
        )

    def poll(self, code: DeviceCode) -> ProviderTokens:
        """Waits until the person has agreed, and returns the tokens.

        Asks no more often than the provider allows: 5 seconds less often after each `slow_down`, and half as often after
        each time without an answer. Raises LoginError when the person has refused or the code has expired.
        """
        form = {"grant_type": _DEVICE_GRANT, "device_code": code.device_code, "client_id": self._client_id}
        wait_s, ends_at = code.interval_s, self._now() + code.expires_in_s
        while self._now() < ends_at:
            self._sleep(wait_s)
            try:
                status, body = self._post("token_endpoint", form)
            except httpx.TransportError:
                wait_s = min(wait_s * 2, _MOST_WAIT_S)
                continue
            if status == 200:
                return _tokens(body, None)
            match body.get("error"):
                case "authorization_pending":
                    pass
                case "slow_down":
                    wait_s += _SLOWER_BY_S
                case _:
                    raise _failed(body, "The sign-in was not finished")
        raise LoginError("The code has expired: run `graftwork login` again.", "expired_token")

    def refresh(self, refresh_token: str) -> ProviderTokens:
        """Returns new tokens for a refresh token. Raises LoginError if the provider does not take it any more."""
        form = {"grant_type": "refresh_token", "refresh_token": refresh_token, "client_id": self._client_id}
        status, body = self._post("token_endpoint", form)
        if status != 200:
            raise _failed(body, "The identity provider has ended this sign-in: run `graftwork login` again")
        return _tokens(body, refresh_token)

    def revoke(self, refresh_token: str) -> None:
        """Ends a refresh token at the provider (RFC 7009). Raises LoginError if the provider cannot do that."""
        form = {"token": refresh_token, "token_type_hint": "refresh_token", "client_id": self._client_id}
        status, body = self._post("revocation_endpoint", form)
        if status != 200:
            raise _failed(body, "The identity provider has not ended the sign-in")

    def _post(self, endpoint: str, form: Mapping[str, str]) -> tuple[int, Mapping[str, Any]]:
        address = self._discovered().get(endpoint)
        if not isinstance(address, str):
            raise LoginError(f"{self._issuer} has no {endpoint}, which this needs at the command line.")
        _require_safe(address)
        answer = self._http.post(address, data=dict(form), headers={"accept": "application/json"})
        return answer.status_code, _json(answer)

    def _discovered(self) -> Mapping[str, Any]:
        if self._document is None:
            _require_safe(self._issuer)
            answer = self._http.get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            body = _json(answer) if answer.status_code == 200 else {}
            if body.get("issuer") != self._issuer:
                raise LoginError(f"{self._issuer} is no OpenID Connect provider; ask the operator of the server.")
            self._document = body
        return self._document


def _json(answer: httpx.Response) -> Mapping[str, Any]:
    """Returns the JSON object of an answer; an empty one for anything else."""
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _tokens(body: Mapping[str, Any], refresh_token: str | None) -> ProviderTokens:
    token, newer = body.get("id_token"), body.get("refresh_token")
    if not isinstance(token, str):
        raise LoginError("The identity provider gave no ID token: its client needs the scope openid.")
    return ProviderTokens(token, newer if isinstance(newer, str) else refresh_token)


def _failed(body: Mapping[str, Any], what: str) -> LoginError:
    code = body.get("error")
    known = {
        "access_denied": "You have refused the sign-in.",
        "expired_token": "The code has expired: run `graftwork login` again.",
    }
    if not isinstance(code, str):
        return LoginError(f"{what}.")
    return LoginError(known.get(code, f"{what} ({code[:60]})."), code)


def _require_safe(address: str) -> None:
    """Raises LoginError for an address to which no token may be sent: only HTTPS, or this machine."""
    url = httpx.URL(address)
    if url.scheme != "https" and not (url.scheme == "http" and url.host in _LOOPBACK):
        raise LoginError(f"{address} is not HTTPS, so no token is sent there.")


def _seconds(value: object, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value > 0 else default  # type: ignore[arg-type, operator]  # checked above
