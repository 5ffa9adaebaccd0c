"""Tests the header of a file of pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kv.disk.file_format import (
    BLOCK_BYTES,
    MAX_PAGES,
    DamagedFile,
    ForeignFile,
    PageFileHeader,
    decode_header,
    header_bytes,
    promised_header_bytes,
)
from tests.engine.faulty_disk import LAYOUT, chain, domain_named

SALTS = st.none() | st.binary(min_size=32, max_size=32)
"""Of plain and of encrypted files."""


def header_of(num_pages: int, page_bytes: int = 64, salt: bytes | None = None) -> PageFileHeader:
    keys = tuple(chain("a", num_pages))
    return PageFileHeader(LAYOUT, domain_named("x"), page_bytes, keys, b"".join(key[:16] for key in keys), salt)


@given(st.integers(1, MAX_PAGES), st.integers(1, 2**40), SALTS)
def test_a_header_is_read_as_it_was_written(num_pages: int, page_bytes: int, salt: bytes | None) -> None:
    """The first block gives the header's length in whole blocks, and decoding returns every field."""
    header = header_of(num_pages, page_bytes, salt)

    encoded = header.encode()

    assert promised_header_bytes(encoded[:BLOCK_BYTES]) == len(encoded)
    assert len(encoded) == header_bytes(num_pages, is_sealed=salt is not None) == header.header_bytes
    assert len(encoded) % BLOCK_BYTES == 0
    assert decode_header(encoded) == header


@given(st.data())
def test_a_changed_header_is_refused_or_decodes_the_same(data: st.DataObject) -> None:
    """One flipped bit is damage, makes another version, or is in the padding, in plain and encrypted files."""
    header = header_of(3, salt=data.draw(SALTS))
    encoded = bytearray(header.encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    try:
        decoded = decode_header(bytes(encoded))
    except (DamagedFile, ForeignFile):
        return

    assert decoded == header


@pytest.mark.parametrize("length", [0, 7, 40, 200])
def test_a_truncated_header_is_damage(length: int) -> None:
    """A file that ends inside its header is damaged."""
    with pytest.raises(DamagedFile):
        decode_header(header_of(3).encode()[:length])
