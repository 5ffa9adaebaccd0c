"""Tests of the ids that clients give their requests."""

import pytest

from graftwork.platform.tracing.trace_ids import MAX_CLIENT_ID, TraceParent, parse_traceparent, read_trace_ids

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_trace_of_the_client_goes_on() -> None:
    """A well-formed traceparent gives the trace, the parent span and whether it is recorded."""
    ids = read_trace_ids("req_1", [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())])

    assert (ids.trace_id, ids.parent) == (TRACE, TraceParent(TRACE, SPAN, is_sampled=True))


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0x",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_malformed_traceparent_is_ignored(value: str) -> None:
    """What the standard does not allow begins a new trace."""
    assert parse_traceparent(value.encode()) is None
    assert read_trace_ids("req_1", [(b"traceparent", value.encode())]).trace_id != TRACE


def test_a_later_version_is_read_as_the_first() -> None:
    """A version that is not known yet may have more fields after the flags."""
    parent = parse_traceparent(f"01-{TRACE}-{SPAN}-00-more".encode())

    assert parent == TraceParent(TRACE, SPAN, is_sampled=False)


def test_requests_without_a_trace_get_new_ones() -> None:
    """Two requests have two trace ids of 32 hexadecimal digits."""
    one, other = (read_trace_ids("req_1", []).trace_id for _ in range(2))

    assert one != other
    assert len(one) == 32
    int(one, 16)


@pytest.mark.parametrize(
    ("value", "honoured"),
    [
        (b"order-17/retry:2", True),
        (b"a" * MAX_CLIENT_ID, True),
        (b"a" * (MAX_CLIENT_ID + 1), False),
        (b"", False),
        (b"two words", False),
        (b"line\nbreak", False),
        (b"<script>", False),
        ("größe".encode(), False),
    ],
)
def test_only_short_plain_ids_are_honoured(value: bytes, honoured: bool) -> None:
    """A client's id has 1 to 128 letters, digits and a few signs; another is as if it were not there."""
    ids = read_trace_ids("req_1", [(b"x-request-id", value)])

    assert ids.client_request_id == (value.decode() if honoured else None)
    assert ids.shown_id == (value.decode() if honoured else "req_1")
