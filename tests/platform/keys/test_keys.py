"""Tests of keys as text, and of secrets in files."""

import hashlib
import hmac
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.errors import InternalFailure
from graftwork.platform.keys.keys import KeyKind, checksum, hash_key, make_key, matches, parse_key
from graftwork.platform.settings.settings import Settings
from graftwork.platform.tenancy.secret_files import load_admin_key, load_pepper, read_or_make

PEPPER = b"a pepper for tests"


def test_a_key_is_read_back_as_it_was_made() -> None:
    """A key's text gives back its kind, public id and secret of at least 256 bits."""
    for kind in KeyKind:
        key = make_key(kind)

        assert parse_key(key.plaintext) == key
        assert key.plaintext.startswith(f"{kind}_")
        assert 62 ** len(key.secret) >= 2**256


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """Reading a key from any text never raises, and a key that is read is written as the same text."""
    key = parse_key(text)

    assert key is None or key.plaintext == text


def test_the_stored_hash_is_an_hmac_of_the_whole_key() -> None:
    """The stored hash is HMAC-SHA256 of the whole key under the pepper."""
    key = make_key(KeyKind.TENANT)

    expected = hmac.new(PEPPER, b"graftwork key\0" + key.plaintext.encode(), hashlib.sha256).digest()

    assert hash_key(key, PEPPER) == expected
    assert matches(key, expected, PEPPER)
    assert not matches(key, expected, b"another pepper")
    assert not matches(make_key(KeyKind.TENANT), expected, PEPPER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "000000"), ("gw_000000000000_" + "A" * 43, "3Yw8jg"), ("123456789", "3jZRME")],
)
def test_a_checksum_is_a_crc_in_base_62(text: str, expected: str) -> None:
    """The checksum is the CRC-32 in base 62 with the digits 0-9, A-Z, a-z. 123456789 has the CRC cbf43926."""
    assert checksum(text) == expected


def test_a_scanner_knows_a_key_from_a_look_alike() -> None:
    """A new key has the documented pattern, and with one character changed, moved or swapped it is not a key any more."""
    key = make_key(KeyKind.TENANT).plaintext
    others = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    spoiled = {key[:at] + other + key[at + 1 :] for at in range(3, len(key)) if key[at] != "_" for other in others}
    spoiled |= {key[:at] + key[at + 1] + key[at] + key[at + 2 :] for at in range(16, len(key) - 1)}

    assert re.fullmatch(r"gwa?_[0-9A-Za-z]{12}_[0-9A-Za-z]{49}", key)
    assert len(spoiled - {key}) > 3000
    assert [text for text in spoiled - {key} if parse_key(text) is not None] == []


def test_a_key_of_an_older_version_is_still_read() -> None:
    """A key of 43 characters after the public id, without a checksum, is read as it always was."""
    old = "gw_" + "a" * 12 + "_" + "b" * 43

    key = parse_key(old)

    assert key is not None
    assert (key.secret, key.plaintext) == ("b" * 43, old)
    assert matches(key, hash_key(key, PEPPER), PEPPER)


def test_a_hash_moved_to_another_row_is_worthless() -> None:
    """A hash does not match under another public id, because the id is part of the hashed text."""
    key = parse_key("gw_" + "a" * 12 + "_" + "b" * 43)
    assert key is not None
    moved = parse_key(f"gw_otherotherot_{key.secret}")

    assert moved is not None
    assert not matches(moved, hash_key(key, PEPPER), PEPPER)


@pytest.mark.parametrize("exists", [True, False])
def test_a_comparison_takes_the_same_path_for_unknown_keys(monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    """A wrong key and an unknown one both cost one HMAC and one constant-time comparison of 32 bytes."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def spy(given: bytes, stored: bytes) -> bool:
        compared.append((len(given), len(stored)))
        return compare(given, stored)

    monkeypatch.setattr(hmac, "compare_digest", spy)

    assert not matches(make_key(KeyKind.TENANT), bytes(31) + b"x" if exists else None, PEPPER)

    assert compared == [(32, 32)]


def test_a_key_does_not_show_its_secret() -> None:
    """The repr of a key has no secret."""
    key = make_key(KeyKind.TENANT)

    assert key.secret not in repr(key)


def test_secrets_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    """The first start writes the pepper and the admin key with mode 0600; later starts read the same."""
    settings = Settings(data_dir=tmp_path / "new" / "folder")

    pepper, admin_key = load_pepper(settings), load_admin_key(settings)

    assert (load_pepper(settings), load_admin_key(settings)) == (pepper, admin_key)
    parsed = parse_key(admin_key)
    assert parsed is not None
    assert parsed.kind is KeyKind.ADMIN
    assert (settings.data_dir / "admin.key").read_text().strip() == admin_key
    for path in settings.data_dir.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(list(settings.data_dir.iterdir())) == 2


def test_given_secrets_write_no_file(tmp_path: Path) -> None:
    """A pepper and an admin key from the settings are used as they are."""
    settings = Settings(data_dir=tmp_path / "data", pepper="p", admin_key="gwa_a_b")

    assert (load_pepper(settings), load_admin_key(settings)) == (b"p", "gwa_a_b")
    assert not settings.data_dir.exists()


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    """If several processes make a secret's file at once, all read the same secret."""
    with ThreadPoolExecutor(8) as threads:
        made = [
            threads.submit(read_or_make, tmp_path / "secret", make_key(KeyKind.ADMIN).secret.lower) for _ in range(50)
        ]

    assert len({future.result() for future in made}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_an_empty_secret_is_not_used(tmp_path: Path) -> None:
    """A secret file that is empty is an error."""
    (tmp_path / "pepper").write_text("\n")

    with pytest.raises(InternalFailure, match="delete it"):
        read_or_make(tmp_path / "pepper", lambda: "new")
