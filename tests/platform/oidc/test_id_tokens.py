"""Tests of ID tokens: right ones are taken, and each way to be wrong is refused."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import NotAuthenticated, Unavailable
from graftwork.platform.oidc.id_tokens import CLOCK_SKEW_S, MAX_AGE_S, Expected, IdTokens
from graftwork.platform.oidc.provider import FRESH_FOR_S, RETRY_S, Provider
from tests.identity_provider import CLI, CONSOLE, IdentityProvider, b64, hmac_token, new_key, signed

ISSUER = "https://login.test"
NONCE = "a-nonce"


@pytest.fixture
def issuer(manual_clock: ManualClock) -> IdentityProvider:
    return IdentityProvider(ISSUER, manual_clock.now)


@pytest.fixture
def tokens(issuer: IdentityProvider, manual_clock: ManualClock) -> IdTokens:
    provider = Provider(ISSUER, manual_clock, lambda: httpx.AsyncClient(transport=issuer.transport))
    return IdTokens(provider, manual_clock)


@pytest.mark.parametrize("alg", ["RS256", "PS256", "ES256", "EdDSA"])
async def test_a_right_token_names_its_person(issuer: IdentityProvider, tokens: IdTokens, alg: str) -> None:
    """A token with any allowed signature gives issuer, subject, e-mail address and groups."""
    issuer.key = new_key(alg)
    token = issuer.token(nonce=NONCE, groups=["staff", 7, "ops"])

    identity = await tokens.check(token, Expected(CONSOLE, NONCE))

    assert (identity.issuer, identity.subject, identity.email) == (ISSUER, "ada", "ada@example.com")
    assert identity.groups == ("staff", "ops")


WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "another nonce": {"nonce": "another"},
    "no nonce": {"nonce": None},
    "a nonce that is no text": {"nonce": [NONCE]},
    "another audience": {"aud": CLI},
    "no audience": {"aud": None},
    "several audiences without azp": {"aud": [CONSOLE, CLI]},
    "given to another client": {"aud": [CONSOLE, CLI], "azp": CLI},
    "another issuer": {"iss": "https://evil.test"},
    "almost the issuer": {"iss": f"{ISSUER}/"},
    "no issuer": {"iss": None},
    "no end": {"exp": None},
    "an end that is no number": {"exp": "9999999999"},
    "an end that is true": {"exp": True},
    "no time of issue": {"iat": None},
    "no subject": {"sub": None},
    "an empty subject": {"sub": ""},
    "a long subject": {"sub": "x" * 256},
}


@pytest.mark.parametrize("wrong", WRONG_CLAIMS)
async def test_a_wrong_claim_is_refused(issuer: IdentityProvider, tokens: IdTokens, wrong: str) -> None:
    """A token with one wrong or missing claim is refused, although its signature is right."""
    claims = {"nonce": NONCE} | WRONG_CLAIMS[wrong]

    with pytest.raises(NotAuthenticated) as caught:
        await tokens.check(issuer.token(**claims), Expected(CONSOLE, NONCE))

    assert caught.value.code == "id_token_refused"


@pytest.mark.parametrize(
    ("claim", "offset", "is_taken"),
    [
        ("exp", -CLOCK_SKEW_S + 1, True),
        ("exp", -CLOCK_SKEW_S - 1, False),
        ("iat", CLOCK_SKEW_S - 1, True),
        ("iat", CLOCK_SKEW_S + 1, False),
        ("nbf", CLOCK_SKEW_S - 1, True),
        ("nbf", CLOCK_SKEW_S + 1, False),
        ("iat", -MAX_AGE_S - CLOCK_SKEW_S + 1, True),
        ("iat", -MAX_AGE_S - CLOCK_SKEW_S - 1, False),
    ],
)
async def test_times_hold_within_the_skew(
    issuer: IdentityProvider, tokens: IdTokens, manual_clock: ManualClock, claim: str, offset: float, is_taken: bool
) -> None:
    """End, issue and begin of a token may be off by a minute, and no more. An old token signs nobody in."""
    wrong: dict[str, Any] = {claim: manual_clock.now() + offset}
    token = issuer.token(nonce=NONCE, **wrong)

    if is_taken:
        await tokens.check(token, Expected(CONSOLE, NONCE))
    else:
        with pytest.raises(NotAuthenticated):
            await tokens.check(token, Expected(CONSOLE, NONCE))


def _unsigned(issuer: IdentityProvider, claims: dict[str, Any], alg: str) -> str:
    return signed({"alg": alg, "kid": issuer.key.kid}, claims, lambda _: b"")


def _public_pem(issuer: IdentityProvider) -> bytes:
    made: bytes = issuer.key.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return made


def _changed(issuer: IdentityProvider, claims: dict[str, Any]) -> str:
    head, _, seal = issuer.token(**claims).split(".")
    body = json.dumps({**claims, "iss": ISSUER, "aud": CONSOLE, "sub": "eve", "exp": 9e9, "iat": issuer.now()}).encode()
    return f"{head}.{b64(body)}.{seal}"


FORGERIES: dict[str, Callable[[IdentityProvider, dict[str, Any]], str]] = {
    "alg none": lambda issuer, claims: _unsigned(issuer, claims, "none"),
    "alg None": lambda issuer, claims: _unsigned(issuer, claims, "None"),
    "an HMAC with the public key as PEM": lambda issuer, claims: hmac_token(
        claims, _public_pem(issuer), issuer.key.kid
    ),
    "an HMAC with the public key as JWK": lambda issuer, claims: hmac_token(
        claims, json.dumps(issuer.key.jwk).encode(), issuer.key.kid
    ),
    "an HMAC with an empty secret": lambda issuer, claims: hmac_token(claims, b"", issuer.key.kid),
    "another key under the right name": lambda issuer, claims: signed(
        {"alg": "RS256", "kid": issuer.key.kid}, claims, new_key(number=1).sign
    ),
    "a key in the header": lambda issuer, claims: signed(
        {"alg": "RS256", "kid": "mine", "jwk": new_key(number=1, kid="mine").jwk}, claims, new_key(number=1).sign
    ),
    "an algorithm that the key does not have": lambda issuer, claims: signed(
        {"alg": "PS256", "kid": issuer.key.kid}, claims, new_key("PS256").sign
    ),
    "an extension": lambda issuer, claims: signed(
        {"alg": "RS256", "kid": issuer.key.kid, "crit": ["b64"], "b64": True}, claims, issuer.key.sign
    ),
    "changed claims": _changed,
    "an empty text": lambda issuer, claims: "",
    "two parts": lambda issuer, claims: "a.b",
    "no JSON": lambda issuer, claims: ".".join([b64(b"[]"), b64(b"[]"), ""]),
    "a very long text": lambda issuer, claims: "a" * 100_000,
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_token_is_refused(issuer: IdentityProvider, tokens: IdTokens, forgery: str) -> None:
    """A token that the provider has not signed, or not so, is refused. The error never quotes the token."""
    now = issuer.now()
    claims = {"iss": ISSUER, "sub": "eve", "aud": CONSOLE, "iat": now, "exp": now + 300, "nonce": NONCE}
    token = FORGERIES[forgery](issuer, claims)

    with pytest.raises(NotAuthenticated) as caught:
        await tokens.check(token, Expected(CONSOLE, NONCE))

    assert caught.value.code == "id_token_refused"
    assert not token or token not in caught.value.message


async def test_rotated_keys_are_read_again(issuer: IdentityProvider, tokens: IdTokens) -> None:
    """A token under a new key makes the server read the keys again; one under a key that is gone is refused."""
    old = issuer.token(nonce=NONCE)
    await tokens.check(old, Expected(CONSOLE, NONCE))
    issuer.key = new_key("ES256")

    await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))

    with pytest.raises(NotAuthenticated):
        await tokens.check(old, Expected(CONSOLE, NONCE))
    assert issuer.asked.count("/keys") == 2


async def test_unknown_keys_do_not_make_the_server_ask_without_end(
    issuer: IdentityProvider, tokens: IdTokens, manual_clock: ManualClock
) -> None:
    """A hundred tokens under unknown keys read the keys once more, and once again after ten seconds."""
    await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))

    for number in range(100):
        with pytest.raises(NotAuthenticated):
            await tokens.check(signed({"alg": "RS256", "kid": f"k{number}"}, {}, issuer.key.sign), Expected(CONSOLE))
    assert issuer.asked.count("/keys") == 2

    manual_clock.advance(RETRY_S)
    with pytest.raises(NotAuthenticated):
        await tokens.check(signed({"alg": "RS256", "kid": "new"}, {}, issuer.key.sign), Expected(CONSOLE))
    assert issuer.asked.count("/keys") == 3


async def test_known_keys_outlast_a_provider_that_is_away(
    issuer: IdentityProvider, tokens: IdTokens, manual_clock: ManualClock
) -> None:
    """With the provider away, keys that were read before go on being used; without any, the server says that it is away."""
    issuer.is_away = True
    with pytest.raises(Unavailable):
        await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))
    issuer.is_away = False
    manual_clock.advance(RETRY_S)
    await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))

    issuer.is_away = True
    manual_clock.advance(FRESH_FOR_S + 1)

    await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.test"},
        {"issuer": None},
        {"jwks_uri": "http://login.test/keys"},
        {"jwks_uri": None},
        {"token_endpoint": "ftp://login.test/token"},
        {"authorization_endpoint": "https://user:password@login.test/"},
    ],
)
async def test_a_document_that_cannot_be_trusted_is_not_used(
    issuer: IdentityProvider, tokens: IdTokens, document: dict[str, Any]
) -> None:
    """A discovery document of another issuer, or with an address that is not HTTPS, signs nobody in."""
    issuer.document = document

    with pytest.raises(Unavailable):
        await tokens.check(issuer.token(nonce=NONCE), Expected(CONSOLE, NONCE))


async def test_an_address_that_is_not_verified_is_not_kept(issuer: IdentityProvider, tokens: IdTokens) -> None:
    """An e-mail address that the provider has not verified names nobody."""
    token = issuer.token(nonce=NONCE, email_verified=False)

    assert (await tokens.check(token, Expected(CONSOLE, NONCE))).email is None
