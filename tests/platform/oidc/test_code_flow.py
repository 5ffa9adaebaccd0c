"""Tests of the authorization code flow: state, nonce, PKCE, and answers that do not belong to the browser."""

from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import NotAuthenticated, NotPermitted
from graftwork.platform.oidc.code_flow import SIGN_IN_FOR_S, Client, CodeFlow
from graftwork.platform.oidc.id_tokens import IdTokens
from graftwork.platform.oidc.provider import Provider
from tests.identity_provider import CLI, CONSOLE, IdentityProvider

ISSUER = "https://login.test"
BACK = "https://graftwork.test/console/sign-in/callback"


@pytest.fixture
def issuer(manual_clock: ManualClock) -> IdentityProvider:
    return IdentityProvider(ISSUER, manual_clock.now)


def flow_of(issuer: IdentityProvider, clock: ManualClock, pepper: bytes = b"a pepper") -> CodeFlow:
    provider = Provider(ISSUER, clock, lambda: httpx.AsyncClient(transport=issuer.transport))
    client = Client(CONSOLE, "a secret", ("openid", "email"))
    return CodeFlow(provider, IdTokens(provider, clock), client, clock, pepper)


def answer_of(address: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(address).query))


async def test_a_sign_in_from_its_begin_to_its_end(issuer: IdentityProvider, manual_clock: ManualClock) -> None:
    """A browser that comes back with the provider's answer has signed in, at another gateway with the same pepper too."""
    begun = await flow_of(issuer, manual_clock).begin(BACK)

    back = answer_of(issuer.authorize(begun.address))
    identity, state = await flow_of(issuer, manual_clock).finish(begun.cookie, back, BACK)

    assert (identity.subject, state) == ("ada", back["state"])


async def test_the_provider_sees_nothing_that_ends_a_sign_in(
    issuer: IdentityProvider, manual_clock: ManualClock
) -> None:
    """The address has none of the cookie's text, and each sign-in has a state, a nonce and a challenge of its own."""
    flow = flow_of(issuer, manual_clock)

    first, second = await flow.begin(BACK), await flow.begin(BACK)

    assert all(part not in first.address for part in first.cookie.split("_"))
    queries = [answer_of(one.address) for one in (first, second)]
    assert all(queries[0][name] != queries[1][name] for name in ("state", "nonce", "code_challenge"))


SPOILED: dict[str, Callable[[dict[str, str], str, str], tuple[dict[str, str], str]]] = {
    "another state": lambda answer, cookie, other: ({**answer, "state": "x" * 43}, cookie),
    "no state": lambda answer, cookie, other: ({"code": answer["code"]}, cookie),
    "the cookie of another browser": lambda answer, cookie, other: (answer, other),
    "no cookie": lambda answer, cookie, other: (answer, ""),
    "a forged cookie": lambda answer, cookie, other: (answer, cookie[:-1] + ("0" if cookie[-1] != "0" else "1")),
    "a cookie that lives longer": lambda answer, cookie, other: (answer, cookie.replace("_17", "_18")),
    "another code": lambda answer, cookie, other: ({**answer, "code": "guessed"}, cookie),
    "another issuer": lambda answer, cookie, other: ({**answer, "iss": "https://evil.test"}, cookie),
}


@pytest.mark.parametrize("spoil", SPOILED)
async def test_an_answer_of_another_sign_in_is_refused(
    issuer: IdentityProvider, manual_clock: ManualClock, spoil: str
) -> None:
    """An answer with a wrong state, code, issuer or cookie signs nobody in."""
    flow = flow_of(issuer, manual_clock)
    begun, other = await flow.begin(BACK), await flow.begin(BACK)
    answer, cookie = SPOILED[spoil](answer_of(issuer.authorize(begun.address)), begun.cookie, other.cookie)

    with pytest.raises(NotAuthenticated):
        await flow.finish(cookie, answer, BACK)


async def test_a_stolen_code_is_worth_nothing(issuer: IdentityProvider, manual_clock: ManualClock) -> None:
    """A code that was given to another browser is refused in one's own sign-in: PKCE binds it."""
    flow = flow_of(issuer, manual_clock)
    victim, thief = await flow.begin(BACK), await flow.begin(BACK)
    stolen, own = answer_of(issuer.authorize(victim.address)), answer_of(issuer.authorize(thief.address))

    with pytest.raises(NotAuthenticated) as caught:
        await flow.finish(thief.cookie, {**own, "code": stolen["code"]}, BACK)

    assert caught.value.code == "sign_in_code"


async def test_a_token_with_the_nonce_of_another_sign_in_is_refused(
    issuer: IdentityProvider, manual_clock: ManualClock
) -> None:
    """A provider's token with another nonce, or for another client, signs nobody in."""
    flow = flow_of(issuer, manual_clock)
    for wrong in ({"nonce": "another"}, {"aud": CLI}):
        begun = await flow.begin(BACK)
        issuer.claims = wrong

        with pytest.raises(NotAuthenticated) as caught:
            await flow.finish(begun.cookie, answer_of(issuer.authorize(begun.address)), BACK)

        assert caught.value.code == "id_token_refused"


async def test_a_sign_in_ends_after_ten_minutes(issuer: IdentityProvider, manual_clock: ManualClock) -> None:
    """An answer that comes too late signs nobody in."""
    flow = flow_of(issuer, manual_clock)
    begun = await flow.begin(BACK)
    manual_clock.advance(SIGN_IN_FOR_S)

    with pytest.raises(NotAuthenticated):
        await flow.finish(begun.cookie, answer_of(issuer.authorize(begun.address)), BACK)


async def test_a_person_who_refuses_is_not_signed_in(issuer: IdentityProvider, manual_clock: ManualClock) -> None:
    """An error of the provider ends the sign-in."""
    flow = flow_of(issuer, manual_clock)
    begun = await flow.begin(BACK)
    state = answer_of(begun.address)["state"]

    with pytest.raises(NotPermitted) as caught:
        await flow.finish(begun.cookie, {"error": "access_denied", "state": state}, BACK)

    assert caught.value.code == "sign_in_denied"
