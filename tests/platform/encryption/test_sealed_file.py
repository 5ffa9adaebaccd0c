"""Tests of encrypted files: they come back as they were, and whoever changes one is noticed."""

import io
from collections.abc import Callable
from typing import BinaryIO

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.encryption.sealed_file import CHUNK_BYTES, SealedWriter, open_sealed
from graftwork.platform.errors import InternalFailure

KEY, CONTEXT = bytes(range(32)), b"ten_1/file_1"
HEAD_BYTES, SEALED_CHUNK = 40, CHUNK_BYTES + 16
SIZES = st.integers(0, 3).flatmap(
    lambda chunks: st.sampled_from([-1, 0, 1]).map(lambda more: chunks * CHUNK_BYTES + more)
)


def content_of(size: int) -> bytes:
    """Bytes of which no two chunks are equal."""
    return b"".join(number.to_bytes(4, "big") for number in range(size // 4 + 1))[: max(size, 0)]


def sealed(content: bytes, pieces: int = 10_000, key: bytes = KEY, context: bytes = CONTEXT) -> bytes:
    out = io.BytesIO()
    writer = SealedWriter(out, key, context)
    for first in range(0, len(content), pieces):
        writer.write(content[first : first + pieces])
    writer.finish()
    return out.getvalue()


def opened(stored: bytes, key: bytes = KEY, context: bytes = CONTEXT) -> bytes:
    with open_sealed(io.BytesIO(stored), key, context) as file:
        return file.read()


@given(size=SIZES, pieces=st.sampled_from([1_000, CHUNK_BYTES - 1, CHUNK_BYTES, 200_000]))
def test_content_comes_back(size: int, pieces: int) -> None:
    """Whatever its size, and in whatever pieces it was written, the content comes back."""
    content = content_of(size)

    assert opened(sealed(content, pieces)) == content


def test_the_form_is_the_documented_one() -> None:
    """An independent reading of the form, chunk by chunk, gives the content."""
    content = content_of(CHUNK_BYTES + 100)
    stored = sealed(content)

    cipher = AESGCM(HKDF(SHA256(), 32, stored[8:40], b"graftwork file\0" + CONTEXT).derive(KEY))
    first, last = stored[HEAD_BYTES : HEAD_BYTES + SEALED_CHUNK], stored[HEAD_BYTES + SEALED_CHUNK :]
    assert stored.startswith(b"GWSEAL1\n")
    assert cipher.decrypt(bytes(12), first, None) + cipher.decrypt(bytes(10) + b"\1\1", last, None) == content


def test_nothing_of_the_content_is_stored() -> None:
    """No part of the content is in the file, and two files of one content share nothing but the first eight bytes."""
    content = b"what a tenant has said " * 1000
    one, two = sealed(content), sealed(content)

    assert b"tenant" not in one
    assert not {one[at : at + 8] for at in range(8, 4000)} & {two[at : at + 8] for at in range(8, 4000)}


@pytest.mark.parametrize("at", [0, 8, 39, 40, 5_000, HEAD_BYTES + SEALED_CHUNK, -1])
def test_a_changed_bit_is_noticed(at: int) -> None:
    """One bit that differs, in the head, a chunk or a tag, makes the file unreadable."""
    stored = bytearray(sealed(content_of(2 * CHUNK_BYTES)))
    stored[at] ^= 1

    with pytest.raises(InternalFailure, match="cannot be read"):
        opened(bytes(stored))


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored[:-1],
        lambda stored: stored[: HEAD_BYTES + SEALED_CHUNK],
        lambda stored: stored[:HEAD_BYTES],
        lambda stored: stored[:20],
        lambda stored: b"",
        lambda stored: stored + b"x",
        lambda stored: stored[: HEAD_BYTES + SEALED_CHUNK] + stored[HEAD_BYTES:],
        lambda stored: stored[:HEAD_BYTES] + stored[HEAD_BYTES + SEALED_CHUNK :],
        lambda stored: (
            stored[:HEAD_BYTES]
            + stored[HEAD_BYTES + SEALED_CHUNK : HEAD_BYTES + 2 * SEALED_CHUNK]
            + stored[HEAD_BYTES : HEAD_BYTES + SEALED_CHUNK]
            + stored[HEAD_BYTES + 2 * SEALED_CHUNK :]
        ),
    ],
    ids=["cut", "cut after a chunk", "head only", "half a head", "empty", "longer", "repeated", "missing", "swapped"],
)
def test_chunks_cannot_be_moved(change: Callable[[bytes], bytes]) -> None:
    """A file that was cut, also between two chunks, or whose chunks were moved, is unreadable."""
    stored = sealed(content_of(2 * CHUNK_BYTES + 5))

    with pytest.raises(InternalFailure):
        opened(change(stored))


@pytest.mark.parametrize(("key", "context"), [(bytes(32), CONTEXT), (KEY, b"ten_2/file_1"), (KEY, b"ten_1/file_2")])
def test_a_file_belongs_to_its_key_and_its_name(key: bytes, context: bytes) -> None:
    """A file is unreadable with another key, and under the name of another tenant or file."""
    with pytest.raises(InternalFailure):
        opened(sealed(b"content"), key, context)


def test_lines_and_small_reads() -> None:
    """An encrypted file is read line by line, and in small pieces, as a plain one is; closing it closes what is below."""
    content = b"".join(b"line %d\n" % number for number in range(30_000))
    below = io.BytesIO(sealed(content))
    file: BinaryIO = open_sealed(below, KEY, CONTEXT)

    with file:
        first = file.readline()
        rest = b"".join(iter(lambda: file.read(977), b""))

    assert (first, first + rest) == (b"line 0\n", content)
    assert below.closed
