"""Tests of the encryption of single values of rows."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.contents.columns import is_sealed
from graftwork.platform.contents.rows import PLAIN_ROWS
from graftwork.platform.encryption.row_cipher import EncryptedRows, ExtendedNonceCipher
from graftwork.platform.errors import InternalFailure
from graftwork.platform.ids import TenantId
from graftwork.platform.tenancy.tables import IdempotencyRow
from graftwork.sessions.store.tables import CheckpointRow, EventRow, ItemRow, ToolCallRow

ROWS = EncryptedRows(b"k" * 32, TenantId("ten_1"))
BODY = {"type": "message", "text": "what the tenant has said \ud800"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def sealed_body(rows: EncryptedRows = ROWS, item_id: str = "item_1") -> Any:
    return rows.sealed(ItemRow, {"id": item_id, "body": BODY, "position": 3})["body"]


@pytest.mark.parametrize(
    ("key", "context", "sealed"),
    [
        (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (b"\3" * 32, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
def test_the_cipher_is_the_published_one(key: bytes, context: bytes, sealed: str) -> None:
    """The cipher gives the test vectors of C2SP's XAES-256-GCM, one for each way to make the subkey of CMAC."""
    cipher = ExtendedNonceCipher(key)

    assert cipher.encrypt(b"ABCDEFGHIJKLMNOPQRSTUVWX", b"XAES-256-GCM", context).hex() == sealed
    assert cipher.decrypt(b"ABCDEFGHIJKLMNOPQRSTUVWX", bytes.fromhex(sealed), context) == b"XAES-256-GCM"


@given(st.dictionaries(st.text(), json_values, max_size=4), st.binary(max_size=40))
def test_content_comes_back(fields: dict[str, Any], tokens: bytes) -> None:
    """JSON and bytes of any content come back as they were; the other columns and the key stay readable."""
    event = ROWS.sealed(EventRow, {"session_id": "ses_1", "seq": 7, "fields": fields, "type": "x"})
    checkpoint = ROWS.sealed(CheckpointRow, {"token_ids": tokens}, "ckp_1")

    assert ROWS.opened(EventRow, "fields", event["fields"], "ses_1", 7) == fields
    assert ROWS.opened(CheckpointRow, "token_ids", checkpoint["token_ids"], "ckp_1") == tokens
    assert (event["session_id"], event["seq"], event["type"]) == ("ses_1", 7, "x")
    assert is_sealed(event["fields"])
    assert is_sealed(checkpoint["token_ids"])


def test_no_value_is_encrypted_twice_the_same_way() -> None:
    """The same content in the same place has another ciphertext each time, and nothing of the text is in it."""
    first, second = sealed_body(), sealed_body()

    assert first != second
    assert "said" not in str(first)


def test_an_encrypted_value_says_how_long_the_plain_one_is() -> None:
    """The second element is the length of the plain JSON, which limits of histories count."""
    assert sealed_body()[1] == len(json.dumps(BODY))


def test_none_stays_none_and_plain_values_are_read_as_they_are() -> None:
    """A column without a value has none, and what is older than encryption is not decrypted."""
    calls = ROWS.sealed(ToolCallRow, {"name": "f", "arguments": "{}", "output": None}, "ses_1", "ckp_1", 0)

    assert calls["output"] is None
    assert ROWS.opened(ItemRow, "body", BODY, "item_1") == BODY
    assert ROWS.opened(ToolCallRow, "name", "gwrow1", "ses_1", "ckp_1", 0) == "gwrow1"
    assert ROWS.opened(CheckpointRow, "token_ids", b"\1\0\0\0", "ckp_1") == b"\1\0\0\0"


def moved_to_another_row(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return ROWS, sealed, "item_2"


def of_another_tenant(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return EncryptedRows(b"k" * 32, TenantId("ten_2")), sealed, "item_1"


def with_another_key(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return EncryptedRows(b"q" * 32, TenantId("ten_1")), sealed, "item_1"


def cut(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return ROWS, [*sealed[:2], sealed[2][:-8]], "item_1"


def cut_to_nothing(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return ROWS, [*sealed[:2], ""], "item_1"


def with_another_length(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return ROWS, [sealed[0], sealed[1] - 1, sealed[2]], "item_1"


def without_its_text(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    return ROWS, sealed[:2], "item_1"


def with_a_changed_character(sealed: Any) -> tuple[EncryptedRows, Any, str]:
    text = sealed[2]
    return ROWS, [*sealed[:2], text[:60] + ("A" if text[60] != "A" else "B") + text[61:]], "item_1"


@pytest.mark.parametrize(
    "spoil",
    [
        moved_to_another_row,
        of_another_tenant,
        with_another_key,
        cut,
        cut_to_nothing,
        with_another_length,
        without_its_text,
        with_a_changed_character,
    ],
)
def test_a_value_in_the_wrong_place_is_an_error(spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A value that was moved, cut or changed, or that belongs to another tenant or key, is an error for its reader; the
    log says where it is.
    """
    rows, stored, item_id = spoil(sealed_body())

    with pytest.raises(InternalFailure, match="backup") as failed:
        rows.opened(ItemRow, "body", stored, item_id)
    assert failed.value.code == "row_unreadable"
    assert caplog.records[-1].__dict__["row"] == item_id


def test_a_value_of_another_column_is_an_error() -> None:
    """The arguments of a call do not pass for its output."""
    call = ROWS.sealed(ToolCallRow, {"name": "f", "arguments": "{}"}, "ses_1", "ckp_1", 0)

    with pytest.raises(InternalFailure):
        ROWS.opened(ToolCallRow, "output", call["arguments"], "ses_1", "ckp_1", 0)


def test_without_a_key_an_encrypted_value_is_an_error() -> None:
    """Nobody gets ciphertext for an answer: without a key there is an error that says what to do."""
    answer = ROWS.sealed(IdempotencyRow, {"body": b"{}"}, "ten_1", "k")["body"]

    for table, attribute, stored in ((ItemRow, "body", sealed_body()), (IdempotencyRow, "body", answer)):
        with pytest.raises(InternalFailure, match="master_key_file") as failed:
            PLAIN_ROWS.opened(table, attribute, stored, "item_1")
        assert failed.value.code == "row_key_missing"
