"""Tests of the addresses to which tenants' URLs may lead. `tests/platform/alerts` and `tests/adapters/sources` connect."""

import pytest

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.outbound.public_addresses import check_url, is_public


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("2002:a00:1::1", False),
        ("fe80::1%eth0", False),
        ("hooks", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    """Only addresses of the public internet are public, however an inner one is written."""
    assert is_public(address) is expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.test",
        "ftp://hooks.test/",
        "file:///etc/passwd",
        "http://",
        "http://user@hooks.test/",
        "http://:secret@hooks.test/",
        "http://hooks.test/#part",
        "http://hooks.test:0/",
        "http://hooks.test:99999/",
        "http://hooks.test/a b",
        "http://hooks.test/\r\nx: y",
        "http://hööks.test/",
        "http://hooks.test/" + "a" * 2000,
        "http://[::1",
    ],
)
def test_urls_that_are_not_allowed(url: str) -> None:
    """A URL that is no plain http or https address is refused when it is set."""
    with pytest.raises(ValidationFailed) as caught:
        check_url(url)

    assert caught.value.param == "url"
    with pytest.raises(ValidationFailed, match=r"^source must be") as of_source:
        check_url(url, "source")
    assert of_source.value.param == "source"
