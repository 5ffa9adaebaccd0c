"""Tests of one attempt to send an alert: addresses that are refused, redirects, silence, and signatures."""

import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from graftwork.platform.alerts.sender import AlertSender, Verdict
from graftwork.platform.alerts.signing import is_signed, sign, webhook_secret
from graftwork.platform.clock import ManualClock
from graftwork.platform.outbound.public_addresses import Resolve
from tests.certificates import Authority
from tests.platform.alerts.receiver import Receiver, receiving

HERE = ("127.0.0.0/8",)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as started:
        yield started


def names(*addresses: str) -> tuple[Resolve, list[str]]:
    """A resolver that answers these addresses, and the hosts that it was asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(f"{host}:{port}")
        return addresses

    return resolve, asked


async def test_a_delivered_alert_is_signed(receiver: Receiver, manual_clock: ManualClock) -> None:
    """A receiver gets the alert as JSON to its own name, with an HMAC-SHA256 over the time and the body."""
    resolve, asked = names("127.0.0.1")
    sender = AlertSender(manual_clock, HERE, resolve=resolve)

    attempt = await sender.send(f"http://hooks.test:{receiver.port}/a?b=1", "whsec_1", {"id": "alt_1"})

    assert attempt.verdict is Verdict.DELIVERED
    assert asked == [f"hooks.test:{receiver.port}"]
    assert receiver.heads[0].startswith(b"POST /a?b=1 HTTP/1.1\r\n")
    assert receiver.headers()["host"] == f"hooks.test:{receiver.port}"
    assert json.loads(receiver.bodies[0]) == {"id": "alt_1"}
    at, _, signature = receiver.headers()["graftwork-signature"].removeprefix("t=").partition(",v1=")
    assert at == str(int(manual_clock.now()))
    message = at.encode() + b"." + receiver.bodies[0]
    assert signature == hmac.new(b"whsec_1", message, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), ("93.184.215.14", "10.0.0.7"), ("::1",), ("169.254.169.254",), ("::ffff:127.0.0.1",)]
)
async def test_an_inner_address_is_refused(
    receiver: Receiver, manual_clock: ManualClock, addresses: tuple[str, ...]
) -> None:
    """A name with an address that is not public gets no connection, also if another of its addresses is public."""
    sender = AlertSender(manual_clock, resolve=names(*addresses)[0])

    attempt = await sender.send(f"http://hooks.test:{receiver.port}/", "s", {})

    assert attempt.verdict is Verdict.REFUSED
    assert "not public" in attempt.reason
    assert receiver.connections == 0


async def test_an_address_in_the_url_is_checked_too(receiver: Receiver, manual_clock: ManualClock) -> None:
    """An IP address instead of a name, in any spelling that the system takes, is refused like a name."""
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "0"):
        attempt = await AlertSender(manual_clock).send(f"http://{host}:{receiver.port}/", "s", {})
        assert attempt.verdict is Verdict.REFUSED, host

    assert receiver.connections == 0


async def test_the_checked_address_is_the_one_that_is_used(receiver: Receiver, manual_clock: ManualClock) -> None:
    """A name is resolved once, so a second answer that leads inward is never asked for."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    attempt = await AlertSender(manual_clock, HERE, resolve=rebinding).send(
        f"http://hooks.test:{receiver.port}/", "s", {}
    )

    assert attempt.verdict is Verdict.DELIVERED
    assert len(answers) == 1


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
async def test_redirects_are_not_followed(receiver: Receiver, manual_clock: ManualClock, status: str) -> None:
    """A webhook that redirects inward gets no second request, and is not tried again."""
    receiver.answer = f"HTTP/1.1 {status}\r\nlocation: http://127.0.0.1:{receiver.port}/inner\r\n\r\n".encode()
    sender = AlertSender(manual_clock, HERE, resolve=names("127.0.0.1")[0])

    attempt = await sender.send(f"http://hooks.test:{receiver.port}/", "s", {})

    assert attempt.verdict is Verdict.REFUSED
    assert "redirects" in attempt.reason
    assert receiver.connections == 1


async def test_a_webhook_that_hangs_is_given_up(receiver: Receiver, manual_clock: ManualClock) -> None:
    """An attempt ends after its time, with or without an answer, and may be made again."""
    receiver.answer = None
    sender = AlertSender(manual_clock, HERE, resolve=names("127.0.0.1")[0], within_s=0.3)

    attempt = await sender.send(f"http://hooks.test:{receiver.port}/", "s", {})

    assert attempt.verdict is Verdict.RETRY


async def test_failures_of_the_receiver_are_tried_again(receiver: Receiver, manual_clock: ManualClock) -> None:
    """A 500, a 429, a closed port and a name without an address may all be over a moment later."""
    sender = AlertSender(manual_clock, HERE, resolve=names("127.0.0.1")[0])
    for status in ("500 Oops", "429 Slow down"):
        receiver.answer = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()
        attempt = await sender.send(f"http://hooks.test:{receiver.port}/", "s", {})
        assert (attempt.verdict, attempt.reason) == (Verdict.RETRY, f"HTTP {status[:3]}")

    closed = await sender.send("http://hooks.test:1/", "s", {})
    nobody = await AlertSender(manual_clock, resolve=names()[0]).send("http://hooks.test/", "s", {})

    assert closed.verdict is nobody.verdict is Verdict.RETRY


async def test_the_certificate_is_of_the_name(tmp_path: Path, manual_clock: ManualClock) -> None:
    """Over TLS the certificate must have the webhook's name, although the connection goes to a checked address."""
    authority = Authority(tmp_path, "ca")
    certificate = authority.issue("hooks", "hooks.test")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate.cert, certificate.key)
    trusted = ssl.create_default_context(cafile=str(authority.ca))
    trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
    async with receiving(server) as receiver:
        sender = AlertSender(manual_clock, HERE, resolve=names("127.0.0.1")[0], trusted=trusted)
        right = await sender.send(f"https://hooks.test:{receiver.port}/", "s", {})
        wrong = await sender.send(f"https://other.test:{receiver.port}/", "s", {})

    assert right.verdict is Verdict.DELIVERED
    assert wrong.verdict is Verdict.RETRY
    assert "certificate" in wrong.reason.lower()
    assert len(receiver.bodies) == 1


def test_a_signature_holds_for_its_body_and_time() -> None:
    """Another body, another secret, another time and a broken header are not signed."""
    secret, body = webhook_secret("whk_1", b"pepper"), b'{"id":1}'
    header = sign(secret, body, 1000.9)

    assert is_signed(secret, body, header, 1000.0)
    assert not is_signed(secret, body + b" ", header, 1000.0)
    assert not is_signed(webhook_secret("whk_2", b"pepper"), body, header, 1000.0)
    assert not is_signed(secret, body, header, 1400.0)
    assert not is_signed(secret, body, header.replace("t=1000", "t=1001"), 1000.0)
    assert not any(is_signed(secret, body, broken, 1000.0) for broken in ("", "t=x,v1=y", "v1=", "t=1000"))
