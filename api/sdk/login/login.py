"""Signs a person in at a server, keeps the sign-in, and gives its tokens to the clients.

    provider's ID token ──POST /v1/auth/tokens──► a token as an operator, and one in a tenant, both short-lived
    when they end       ──provider's refresh token──► a new ID token ──► new tokens
    at the sign-out     ──provider's refresh token──► revoked

Owns what is done when. Never shows a token. The server's tokens are used until a minute before they end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import httpx

from graftwork.api.sdk.login.device_flow import DeviceCode, DeviceFlow, LoginError, ProviderTokens
from graftwork.api.sdk.login.login_file import LoginFile, StoredLogin
from graftwork.api.sdk.transport.errors import APIConnectionError, ConfigurationError
from graftwork.platform.answers.people import PersonTokens

RENEW_BEFORE_S = 60.0
_TIMEOUT_S = 30.0
_NO_OPERATOR = "You have signed in, but are no operator: ask one for the role, or set GRAFTWORK_ADMIN_KEY."
_NO_TENANT = "You have signed in, but in no tenant: run `graftwork login --tenant NAME`, or set GRAFTWORK_API_KEY."


@dataclass(frozen=True, slots=True)
class SignInOffer:
    """With what a server lets people sign in at the command line."""

    name: str
    issuer: str
    client_id: str
    scopes: tuple[str, ...]


class SignOut(Enum):
    """What a sign-out has done."""

    WAS_OUT = auto()
    """Nothing: there was no sign-in."""
    DONE = auto()
    """It has forgotten the tokens, and none of them can be renewed any more."""
    PROVIDER_NOT_TOLD = auto()
    """It has forgotten the tokens. The identity provider still knows the sign-in, because it could not be told."""


class Logins:
    """Signs in and out at servers. Tests replace `transport`, `sleep` and `now`, which is in unix seconds."""

    def __init__(
        self,
        file: LoginFile | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.file = file or LoginFile()
        self._transport = transport
        self._sleep = sleep
        self._now = now

    def sign_in(self, url: str, tenant: str | None, show: Callable[[SignInOffer, DeviceCode], None]) -> PersonTokens:
        """Signs a person in at a server by the device flow, and keeps the sign-in. Returns what the server has given.

        `show` tells the person what to do. Raises LoginError if the server offers no sign-in, or the sign-in fails.
        """
        with self._open() as http:
            try:
                offer = _offer(http, url)
                flow = self._flow(http, offer.issuer, offer.client_id, offer.scopes)
                code = flow.start()
                show(offer, code)
                given = flow.poll(code)
                tokens = _exchange(http, url, given.id_token, tenant)
            except httpx.TransportError as error:
                raise _unreachable(url, error) from error
        login = StoredLogin(
            url, offer.issuer, offer.client_id, offer.scopes, tokens.person.id, tokens.person.email, given.refresh_token
        )
        with self.file.locked():
            self.file.keep(self._with(login, given, tokens))
        return tokens

    def sign_out(self, url: str) -> SignOut:
        """Forgets the sign-in at a server, and ends it at the identity provider, if that can be done.

        The server's tokens end by themselves. Never fails because of the provider.
        """
        with self.file.locked():
            login = self.file.find(url)
            if not self.file.forget(url) or login is None:
                return SignOut.WAS_OUT
        if login.refresh_token is None:
            return SignOut.DONE
        with self._open() as http:
            try:
                self._flow(http, login.issuer, login.client_id, login.scopes).revoke(login.refresh_token)
            except (LoginError, httpx.HTTPError, httpx.InvalidURL):
                return SignOut.PROVIDER_NOT_TOLD
        return SignOut.DONE

    def token(self, url: str, *, admin: bool) -> str | None:
        """Returns the token of the sign-in at a server: as an operator, or in the tenant; None if there is none.

        Renews the tokens if they end within a minute. Raises LoginError if the provider has ended the sign-in, and
        ConfigurationError for a person who cannot act so.
        """
        login = self.file.find(url)
        if login is None:
            return None
        if login.expires_at - self._now() <= RENEW_BEFORE_S:
            login = self._renew(url)
        found = login.operator_token if admin else login.tenant_token
        if found is None:
            raise ConfigurationError(_NO_OPERATOR if admin else _NO_TENANT)
        return found

    def _renew(self, url: str) -> StoredLogin:
        with self.file.locked(), self._open() as http:
            login = self.file.find(url)  # another process may have renewed it while this one waited
            if login is None:
                raise LoginError("You have signed out meanwhile: run `graftwork login` again.")
            if login.expires_at - self._now() > RENEW_BEFORE_S:
                return login
            if login.refresh_token is None:
                message = "Your sign-in has ended, and the identity provider lets nobody renew it: run `graftwork login` again."
                raise LoginError(message)
            try:
                given = self._flow(http, login.issuer, login.client_id, login.scopes).refresh(login.refresh_token)
                self.file.keep(replace(login, refresh_token=given.refresh_token))  # the old one may be used up
                tokens = _exchange(http, url, given.id_token, login.tenant_id)
            except httpx.TransportError as error:
                raise _unreachable(url, error) from error
            renewed = self._with(login, given, tokens)
            self.file.keep(renewed)
            return renewed

    def _with(self, login: StoredLogin, given: ProviderTokens, tokens: PersonTokens) -> StoredLogin:
        ends = [one.expires_at for one in (tokens.operator, tokens.tenant) if one is not None]
        return replace(
            login,
            email=tokens.person.email,
            refresh_token=given.refresh_token,
            operator_token=None if tokens.operator is None else tokens.operator.access_token,
            tenant_token=None if tokens.tenant is None else tokens.tenant.access_token,
            tenant_id=tokens.tenant_id,
            expires_at=float(min(ends)) if ends else self._now(),
        )

    def _flow(self, http: httpx.Client, issuer: str, client_id: str, scopes: tuple[str, ...]) -> DeviceFlow:
        return DeviceFlow(issuer, client_id, scopes, http, self._sleep, self._now)

    def _open(self) -> httpx.Client:
        return httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False, transport=self._transport)


def _offer(http: httpx.Client, url: str) -> SignInOffer:
    answer = http.get(f"{url}/console/sign-in/provider")
    found = answer.json().get("provider") if answer.status_code == 200 else None
    if not isinstance(found, dict) or not found.get("cli_client_id"):
        raise LoginError(
            f"{url} offers no sign-in at the command line: its operator sets oidc_cli_client_id. Use a key."
        )
    scopes = tuple(dict.fromkeys((*found["scopes"], "offline_access")))
    return SignInOffer(found["name"], found["issuer"], found["cli_client_id"], scopes)


def _exchange(http: httpx.Client, url: str, id_token: str, tenant: str | None) -> PersonTokens:
    body = {} if tenant is None else {"tenant": tenant}
    answer = http.post(f"{url}/v1/auth/tokens", json=body, headers={"authorization": f"Bearer {id_token}"})
    try:
        found = answer.json()
    except ValueError:
        found = {}
    if answer.status_code != 200:
        error = found.get("error") if isinstance(found, dict) else None
        message = error.get("message") if isinstance(error, dict) else f"{url} answered {answer.status_code}."
        raise LoginError(str(message), error.get("code") if isinstance(error, dict) else None)
    return PersonTokens.read(found)


def _unreachable(url: str, error: httpx.TransportError) -> APIConnectionError:
    return APIConnectionError(f"{url}, or its identity provider, does not answer: {error}", code="unreachable")
