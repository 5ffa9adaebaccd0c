"""Which requests repeat the one before on their connection, and what they are answered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.api.http.repeats import LatestGet, Reply, offer_repeat

_REPLY = Reply(200, {"etag": '"1"'}, b"body")
_HEAD = b"GET /v1/overview HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n\r\n"


def _state(*headers: tuple[bytes, bytes]) -> dict[str, object]:
    """The state of a request with these headers whose answer may be repeated. The reply's body is `if-none-match`."""
    scope = {"headers": [(b"host", b"a"), *headers], "state": dict[str, object]()}
    offer_repeat(scope, lambda condition: Reply(200, {}, condition.encode("latin-1")))
    state = scope["state"]
    assert isinstance(state, dict)
    return state


def _with(head: bytes, line: bytes) -> bytes:
    return head[:-2] + line + b"\r\n\r\n"


@given(before=st.sampled_from([b"", b'"1"', b'W/"2", "3"']), after=st.sampled_from([b"", b'"1"', b'"4"']))
def test_only_the_condition_may_differ(before: bytes, after: bytes) -> None:
    """The same head is repeated, whatever its `if-none-match` was and is; the answer is made for the present one."""
    heads = [_with(_HEAD, b"If-None-Match:  " + one + b" ") if one else _HEAD for one in (before, after)]

    found = LatestGet(heads[0]).repeated(heads[1], _state())

    assert found is not None
    assert found.body == after


@pytest.mark.parametrize(
    "other",
    [
        _HEAD.replace(b"Bearer k", b"Bearer l"),
        _HEAD.replace(b"overview", b"overview?rows=1"),
        _HEAD.replace(b"GET", b"HEAD"),
        _with(_HEAD, b"x-request-id: mine"),
        _HEAD + _HEAD,
        _HEAD + b"GET ",
        _HEAD[:-1],
        b"",
    ],
)
def test_another_request_is_read(other: bytes) -> None:
    """A request that differs in any other byte, a part of one, and two at once are no repeats; nor is what follows such
    bytes.
    """
    assert LatestGet(_HEAD).repeated(_HEAD, _state()) is not None
    assert LatestGet(_HEAD).repeated(other, _state()) is None
    assert LatestGet(other).repeated(_HEAD, _state()) is None


@pytest.mark.parametrize("first", [_HEAD + _HEAD, _HEAD[20:], _HEAD[:20], b"POST" + _HEAD[3:], b""])
def test_what_is_not_one_whole_get_is_never_repeated(first: bytes) -> None:
    assert LatestGet(first).repeated(first, _state()) is None


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-id", b"mine"),
        (b"traceparent", b"00-1-1-01"),
        (b"x-graftwork-trace", b"1"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"connection", b"close"),
        (b"connection", b"upgrade"),
        (b"upgrade", b"websocket"),
        (b"origin", b"https://chat.example.com"),
    ],
)
def test_requests_that_need_an_answer_of_their_own(header: tuple[bytes, bytes]) -> None:
    """A request with a body, with ids, of another origin, or that ends its connection is never repeated."""
    assert LatestGet(_HEAD).repeated(_HEAD, _state(header)) is None
    assert LatestGet(_HEAD).repeated(_HEAD, _state((b"connection", b"Keep-Alive"))) is not None


def test_an_answer_that_nobody_offers_again() -> None:
    """Without an offer of the application, the same bytes are read again."""
    assert LatestGet(_HEAD).repeated(_HEAD, {}) is None


def test_the_bytes_of_a_reply() -> None:
    """A reply has its status, its headers, those of the server and new ids; a 304 has neither body nor length."""
    whole = _REPLY.encode([(b"date", b"today")])
    unchanged = Reply(304, {"etag": '"1"'}).encode([])
    head, _, body = whole.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")

    assert lines[:4] == [b"HTTP/1.1 200 OK", b'etag: "1"', b"content-length: 4", b"date: today"]
    assert [line.partition(b": ")[0] for line in lines[4:]] == [b"x-request-id", b"x-graftwork-trace-id"]
    assert body == b"body"
    assert unchanged.startswith(b'HTTP/1.1 304 Not Modified\r\netag: "1"\r\nx-request-id: ')
    assert unchanged.endswith(b"\r\n\r\n")
    assert _REPLY.encode([]) != _REPLY.encode([])
