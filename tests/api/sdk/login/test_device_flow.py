"""Tests of the device flow: when it asks, and what ends it."""

from collections.abc import Callable

import httpx
import pytest

from graftwork.api.sdk.login.device_flow import DeviceFlow, LoginError
from graftwork.platform.clock import ManualClock
from tests.identity_provider import CLI, IdentityProvider

ISSUER = "https://login.test"


class Bench:
    """A device flow over a scripted provider, and the waits between its questions."""

    def __init__(self, clock: ManualClock, transport: httpx.BaseTransport | None = None) -> None:
        self.provider = IdentityProvider(ISSUER, clock.now)
        self.waits: list[float] = []

        def sleep(seconds: float) -> None:
            self.waits.append(seconds)
            clock.advance(seconds)

        http = httpx.Client(transport=transport or self.provider.transport)
        self.flow = DeviceFlow(ISSUER, CLI, ("openid",), http, sleep, clock.monotonic)


@pytest.fixture
def bench(manual_clock: ManualClock) -> Bench:
    return Bench(manual_clock)


def test_it_polls_as_the_provider_says(bench: Bench) -> None:
    """It waits for the interval, and five seconds longer after each `slow_down` (RFC 8628, section 3.5)."""
    bench.provider.device_answers = ["authorization_pending", "slow_down", "authorization_pending", "slow_down"]

    tokens = bench.flow.poll(bench.flow.start())

    assert bench.waits == [5, 5, 10, 10, 15]
    assert tokens.id_token.count(".") == 2
    assert tokens.refresh_token in bench.provider.refreshes


@pytest.mark.parametrize(
    ("error", "said"), [("access_denied", "refused"), ("expired_token", "expired"), ("server_error", "server_error")]
)
def test_an_error_ends_it(bench: Bench, error: str, said: str) -> None:
    """A refusal, an expired code and any other error end the sign-in at once."""
    bench.provider.device_answers = ["authorization_pending", error]

    with pytest.raises(LoginError, match=said) as caught:
        bench.flow.poll(bench.flow.start())

    assert (caught.value.code, bench.waits) == (error, [5, 5])


def test_it_ends_when_the_code_has_expired(bench: Bench) -> None:
    """It asks no longer than the code lives, whatever the provider says."""
    bench.provider.device_answers = ["authorization_pending"] * 1000

    with pytest.raises(LoginError, match="expired"):
        bench.flow.poll(bench.flow.start())

    assert sum(bench.waits) == 600


def test_it_asks_less_often_while_nobody_answers(manual_clock: ManualClock) -> None:
    """After a question without an answer it waits twice as long, a minute at most, and goes on."""
    failures = 4
    bench = Bench(manual_clock)

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal failures
        if request.url.path == "/token" and failures:
            failures -= 1
            raise httpx.ConnectTimeout("away")
        return bench.provider.transport.handle_request(request)

    waits: list[float] = []
    http = httpx.Client(transport=httpx.MockTransport(answer))
    flow = DeviceFlow(ISSUER, CLI, ("openid",), http, waits.append, manual_clock.monotonic)

    flow.poll(flow.start())

    assert waits == [5, 10, 20, 40, 60]


UNSAFE: dict[str, Callable[[IdentityProvider], None]] = {
    "another issuer": lambda one: one.document.update(issuer="https://evil.test"),
    "no device flow": lambda one: one.document.update(device_authorization_endpoint=None),
    "plain http": lambda one: one.document.update(device_authorization_endpoint="http://login.test/device"),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_it_sends_nothing_to_who_is_not_the_provider(bench: Bench, unsafe: str) -> None:
    """A document of another issuer, without the flow, or with plain addresses starts nothing."""
    UNSAFE[unsafe](bench.provider)

    with pytest.raises(LoginError):
        bench.flow.start()

    assert "/device" not in bench.provider.asked
