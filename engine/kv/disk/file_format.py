"""Defines the format of a file of KV pages: a header that describes the pages, then the pages.

    magic  version  count  page_bytes  layout  domain  salt │ key, checksum │ … │ header's checksum │ zeros │ page │ …
      8       4       4        8         32      32    0, 32    32 + 16                16         to 4096

The second line is the size of each field in bytes. `count` is the number of pages, and `page_bytes` the size of one
page. `layout` is a digest of the page layout, `domain` a digest of the domain (usually one tenant) that the file is
charged to. The header has one key and one checksum for each page. Zeros fill the header up to a multiple of 4096 bytes.
Version 1 is a plain file. Version 2 is an encrypted one: its header has a salt, and each page is encrypted as
platform/encryption/sealed_pages.py does, with the tag in the place of the checksum (keyring.py has the keys).

Numbers are little-endian. A header is used only after its checksum, its version and the file's size were checked. Each
page is checked when it is read. A file never changes after it got its final name.

A checksum is the first 16 bytes of SHA-256. A damaged page has a correct checksum with probability 2^-128; with a CRC,
the probability would be 2^-32. On processors with SHA instructions, SHA-256 is the fastest digest of the standard
library (benchmarks/disk_tier.py prints the rates).
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from graftwork.engine.core.prefix_keys import KEY_BYTES, PageKey

BLOCK_BYTES = 4096
"""The size of a header is a multiple of this number of bytes, so that pages start at block borders. The first read of a
file has this size.
"""

CHECKSUM_BYTES = 16

MAX_PAGES = 1024
"""The most pages in one file. This bounds the size of a header."""

_MAGIC = b"GRAFTKV\n"

_PLAIN, _SEALED = 1, 2
"""The versions of the format."""

SALT_BYTES = 32

_FIXED_FIELDS = struct.Struct("<8sIIQ32s32s")

_ENTRY_BYTES = KEY_BYTES + CHECKSUM_BYTES


class DamagedFile(Exception):
    """The file's content is wrong: it was cut off or changed, or the file was never a file of KV pages."""


class ForeignFile(Exception):
    """This engine cannot use the file: it has another format version or page layout, or a name that the store does not
    use.
    """


@dataclass(frozen=True, slots=True)
class PageFileHeader:
    """The decoded header of a page file: which KV pages the file contains, and what is needed to check and to use them."""

    layout: bytes
    """A digest of 32 bytes that identifies the page layout. An engine cannot use pages of another layout."""
    domain: bytes
    """A digest of 32 bytes that identifies the domain (usually one tenant) that the file is charged to."""
    page_bytes: int
    keys: tuple[PageKey, ...]
    checksums: bytes
    """16 bytes for each page: its checksum, or the tag of an encrypted page."""
    salt: bytes | None = None
    """The salt of an encrypted file's key, 32 bytes; None for a plain file."""

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.keys), is_sealed=self.salt is not None)

    @property
    def file_bytes(self) -> int:
        return file_bytes(len(self.keys), self.page_bytes, is_sealed=self.salt is not None)

    def checksum(self, number: int) -> bytes:
        """Returns the checksum, or the tag, of a page. `number` is the page's index in `keys`."""
        return self.checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]

    def page_offset(self, number: int) -> int:
        """Returns the offset of a page from the start of the file, in bytes. `number` is the page's index in `keys`."""
        return self.header_bytes + number * self.page_bytes

    def encode(self) -> bytes:
        """Returns the header as bytes, with its checksum and zeros as padding, ready to be written to the file."""
        assert len(self.checksums) == CHECKSUM_BYTES * len(self.keys), "a page has no checksum"
        version = _PLAIN if self.salt is None else _SEALED
        fixed = _FIXED_FIELDS.pack(_MAGIC, version, len(self.keys), self.page_bytes, self.layout, self.domain)
        entries = (key + self.checksum(number) for number, key in enumerate(self.keys))
        content = b"".join((fixed, self.salt or b"", *entries))
        return (content + page_checksum(content)).ljust(self.header_bytes, b"\0")


def page_checksum(content: bytes | memoryview) -> bytes:
    """Returns the first 16 bytes of the SHA-256 of `content`. Releases the GIL while it computes."""
    return hashlib.sha256(content).digest()[:CHECKSUM_BYTES]


def header_bytes(num_pages: int, *, is_sealed: bool = False) -> int:
    """Returns the size in bytes of the header of a file with `num_pages` pages: always a multiple of BLOCK_BYTES.

    `is_sealed` says whether the file is encrypted.
    """
    content = _entries_start(is_sealed=is_sealed) + num_pages * _ENTRY_BYTES + CHECKSUM_BYTES
    return -(-content // BLOCK_BYTES) * BLOCK_BYTES


def file_bytes(num_pages: int, page_bytes: int, *, is_sealed: bool = False) -> int:
    """Returns the size in bytes of a file with `num_pages` pages, including the header."""
    return header_bytes(num_pages, is_sealed=is_sealed) + num_pages * page_bytes


def promised_header_bytes(start: bytes) -> int:
    """Returns the size in bytes of a whole file header. `start` is the first part of this header.

    Raises DamagedFile if `start` is not the start of a header, or ForeignFile if the header has another version.
    """
    fixed = _fixed_fields(start)
    return header_bytes(fixed.num_pages, is_sealed=fixed.is_sealed)


def decode_header(content: bytes) -> PageFileHeader:
    """Decodes the header at the start of `content`.

    Raises DamagedFile if any bit of the header is wrong, or ForeignFile if the header has another version.
    """
    fixed = _fixed_fields(content)
    first = _entries_start(is_sealed=fixed.is_sealed)
    end = first + fixed.num_pages * _ENTRY_BYTES
    if content[end : end + CHECKSUM_BYTES] != page_checksum(content[:end]):
        raise DamagedFile("the header's checksum is wrong")
    starts = range(first, end, _ENTRY_BYTES)
    return PageFileHeader(
        layout=fixed.layout,
        domain=fixed.domain,
        page_bytes=fixed.page_bytes,
        keys=tuple(PageKey(content[start : start + KEY_BYTES]) for start in starts),
        checksums=b"".join(content[start + KEY_BYTES : start + _ENTRY_BYTES] for start in starts),
        salt=content[_FIXED_FIELDS.size : first] if fixed.is_sealed else None,
    )


def checksums_of(pages: Iterable[memoryview]) -> bytes:
    """Returns the checksum of each page's content, 16 bytes each."""
    return b"".join(map(page_checksum, pages))


class _FixedFields(NamedTuple):
    """The first fields of a header."""

    num_pages: int
    page_bytes: int
    layout: bytes
    domain: bytes
    is_sealed: bool


def _entries_start(*, is_sealed: bool) -> int:
    """Returns the offset of the first page's key in a header."""
    return _FIXED_FIELDS.size + (SALT_BYTES if is_sealed else 0)


def _fixed_fields(content: bytes) -> _FixedFields:
    if len(content) < _FIXED_FIELDS.size:
        raise DamagedFile("shorter than a header")
    magic, version, num_pages, page_bytes, layout, domain = _FIXED_FIELDS.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedFile("not a file of pages")
    if version not in (_PLAIN, _SEALED):
        raise ForeignFile(f"version {version}")
    if not 1 <= num_pages <= MAX_PAGES:
        raise DamagedFile(f"{num_pages} pages")
    return _FixedFields(num_pages, page_bytes, layout, domain, version == _SEALED)


@dataclass(slots=True, eq=False)
class PageFile:
    """The disk store's record of one file of KV pages."""

    name: str
    num_bytes: int
    header: PageFileHeader | None
    """The file's header; None if the pages cannot be used: the file has another layout, or could not be removed."""
    used_at_ns: int
    num_live: int = 0
    """The number of pages that the index still finds in this file."""

    @property
    def num_pages(self) -> int:
        """The number of pages in the file, including pages that the store no longer finds; 0 if the header is None."""
        return len(self.header.keys) if self.header is not None else 0

    @property
    def domain(self) -> bytes | None:
        """A digest of the domain (usually one tenant) that the file is charged to; None if the header is None."""
        return self.header.domain if self.header is not None else None


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Consecutive pages of one file. One read operation reads all of them."""

    file: PageFile
    header: PageFileHeader
    first: int
    count: int

    def is_followed_by(self, key: PageKey) -> bool:
        """Returns whether the file's next page has this key."""
        end = self.first + self.count
        return end < len(self.header.keys) and self.header.keys[end] == key
