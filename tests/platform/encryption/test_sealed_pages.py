"""Tests of encrypted pages: what is read back, what is refused, and a reference of another kind."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.encryption.sealed_pages import PageCipher, new_salt

KEY, SALT = b"k" * 32, b"s" * 32


def cipher(key: bytes = KEY, salt: bytes = SALT, context: bytes = b"context") -> PageCipher:
    return PageCipher(key, salt, context)


def sealed(page: bytes, number: int = 3, name: bytes = b"name") -> tuple[bytearray, bytes]:
    into = bytearray(len(page))
    return into, cipher().seal(number, name, memoryview(page), memoryview(into))


@given(st.binary(min_size=1, max_size=600).map(lambda piece: piece * 900), st.integers(0, 1023), st.binary(max_size=40))
def test_pages_are_those_of_the_library_in_one_call(page: bytes, number: int, name: bytes) -> None:
    """Whatever its length, a page and its tag are what AES-256-GCM makes with the derived key in one call."""
    key = HKDF(SHA256(), 32, SALT, b"graftwork page file\0context").derive(KEY)
    content, tag = sealed(page, number, name)

    assert bytes(content) + tag == AESGCM(key).encrypt(number.to_bytes(12, "big"), page, name)
    assert cipher().unseal(number, name, memoryview(content), tag)
    assert bytes(content) == page


@given(st.integers(0, 299_999), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(where: int, bit: int) -> None:
    """A page with any bit changed is refused."""
    content, tag = sealed(bytes(300_000))
    content[where] ^= 1 << bit

    assert not cipher().unseal(3, b"name", memoryview(content), tag)


@pytest.mark.parametrize(
    ("reader", "number", "name"),
    [
        (cipher(key=b"o" * 32), 3, b"name"),
        (cipher(salt=b"o" * 32), 3, b"name"),
        (cipher(context=b"other"), 3, b"name"),
        (cipher(), 4, b"name"),
        (cipher(), 3, b"nama"),
    ],
)
def test_a_page_is_read_with_its_own_key_and_name_only(reader: PageCipher, number: int, name: bytes) -> None:
    """Another key, salt, context, number or name reads nothing."""
    content, tag = sealed(b"page" * 100)

    assert not reader.unseal(number, name, memoryview(content), tag)


def test_a_changed_tag_is_noticed() -> None:
    """A page is refused with the tag of another one."""
    content, _ = sealed(b"page" * 100)
    _, tag = sealed(b"other" * 80)

    assert not cipher().unseal(3, b"name", memoryview(content), tag)


def test_salts_differ() -> None:
    """No two files have the same salt."""
    assert len({new_salt() for _ in range(100)}) == 100
