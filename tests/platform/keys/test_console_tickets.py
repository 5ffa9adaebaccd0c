"""Tests of the tickets that browsers hold instead of keys."""

from dataclasses import replace

import pytest

from graftwork.platform.errors import NotAuthenticated
from graftwork.platform.keys.console_tickets import (
    SESSION_FOR_S,
    TICKET_FOR_S,
    ConsoleTicket,
    parse_ticket,
    ticket_of_admin,
    ticket_of_key,
)
from graftwork.platform.keys.keys import KeyKind, hash_key, key_digest, make_key
from graftwork.platform.tracing.logs import redact

PEPPER = b"a pepper for tests"
KEY = make_key(KeyKind.TENANT)
HASH = hash_key(KEY, PEPPER)


@pytest.fixture
def ticket() -> ConsoleTicket:
    return ticket_of_key(KEY, 1000.0, PEPPER)


def test_a_ticket_is_read_as_it_was_written(ticket: ConsoleTicket) -> None:
    """A ticket survives the way through its text, and is right only for its key and pepper."""
    read = parse_ticket(ticket.text)

    assert read == ticket
    assert ticket.is_of(HASH, PEPPER)
    assert not ticket.is_of(HASH, b"another pepper")
    assert not ticket.is_of(hash_key(make_key(KeyKind.TENANT), PEPPER), PEPPER)
    assert not ticket.is_of(None, PEPPER)


@pytest.mark.parametrize(
    "change",
    [{"until": 10**6}, {"ends": 10**7}, {"public_id": "another"}, {"kind": KeyKind.ADMIN}, {"session": "0" * 32}],
    ids=lambda change: next(iter(change)),
)
def test_no_part_can_be_changed(ticket: ConsoleTicket, change: dict[str, object]) -> None:
    """The seal covers every part."""
    assert not replace(ticket, **change).is_of(HASH, PEPPER)  # type: ignore[arg-type]


def test_a_ticket_ends(ticket: ConsoleTicket) -> None:
    """A ticket ends half an hour after it was renewed, and never later than twelve hours after the sign-in."""
    renewed = ticket.renewed(1000 + SESSION_FOR_S - 60, HASH, PEPPER)

    ticket.check_time(1000 + TICKET_FOR_S - 1)
    with pytest.raises(NotAuthenticated):
        ticket.check_time(1000 + TICKET_FOR_S)
    assert renewed.until == 1000 + SESSION_FOR_S
    assert renewed.is_of(HASH, PEPPER)
    assert renewed.csrf_token(PEPPER) == ticket.csrf_token(PEPPER)


def test_sign_ins_have_tokens_of_their_own(ticket: ConsoleTicket) -> None:
    """Two sign-ins with one key have different tokens against forged requests."""
    assert ticket_of_key(KEY, 1000.0, PEPPER).csrf_token(PEPPER) != ticket.csrf_token(PEPPER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gwc_",
        pytest.param(KEY.plaintext, id="a key"),
        "gwc_gw_a_b_1_2_c",
        "gwc_gw_é_" + "0" * 32 + "_1_2_" + "0" * 64,
    ],
)
def test_other_texts_are_no_tickets(text: str) -> None:
    """Keys and broken texts are no tickets."""
    assert parse_ticket(text) is None


def test_logs_never_show_a_ticket(ticket: ConsoleTicket) -> None:
    """The log masks what stands after the public id, of both kinds of ticket; no repr shows the seal."""
    admins = ticket_of_admin(key_digest("gwa_operator_secret"), 1000.0, PEPPER)
    for one in (ticket, admins):
        line = redact(f'{{"cookie": "graftwork_console={one.text}"}}')

        assert one.seal not in line
        assert one.session not in line
        assert one.public_id in line
        assert one.seal not in repr(one)
