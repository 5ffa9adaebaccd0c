"""The form of a file of KV pages: a header that says what the file holds, then the pages.

    magic  version  count  page_bytes  layout  domain  │ key, checksum │ … │ header's checksum │ zeros │ page │ page │ …
      8       4       4        8         32     32         32 + 16                16         to 4096

Numbers are little-endian. Whatever a header promises is checked before it is believed: its own checksum, its version
and its size when it is read, each page's checksum when that page is read. A file is never changed once it has its name.

Checksums are SHA-256, cut to 16 bytes: a torn or stale sector goes unseen with a chance of 2^-128 rather than the
2^-32 of a CRC, and with the processor's SHA instructions it is the fastest digest of the standard library
(benchmarks/disk_tier.py prints the rates).
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from graftwork.engine.core.prefix_keys import KEY_BYTES, PageKey

BLOCK_BYTES = 4096
"""What a header is rounded up to, so that pages start where blocks do; also the least that one read asks for."""


CHECKSUM_BYTES = 16


MAX_PAGES = 1024
"""Pages in one file at most, so that reading a header is a bounded read."""


_MAGIC = b"GRAFTKV\n"


_VERSION = 1


_FIXED = struct.Struct("<8sIIQ32s32s")


_ENTRY_BYTES = KEY_BYTES + CHECKSUM_BYTES


class DamagedFile(Exception):
    """The file is not what it says it is: cut off, changed, or never a file of pages."""


class ForeignFile(Exception):
    """A whole header of another version of this format."""


@dataclass(frozen=True, slots=True)
class PageFileHeader:
    """What one file holds."""

    layout: bytes
    """32 bytes: pages of different layouts mean nothing to each other."""
    domain: bytes
    """32 bytes: the domain that the file's bytes are counted against."""
    page_bytes: int
    keys: tuple[PageKey, ...]
    checksums: tuple[bytes, ...]

    @property
    def header_bytes(self) -> int:
        return header_bytes(len(self.keys))

    @property
    def file_bytes(self) -> int:
        return file_bytes(len(self.keys), self.page_bytes)

    def page_offset(self, number: int) -> int:
        """Where page `number` begins in the file."""
        return self.header_bytes + number * self.page_bytes

    def encode(self) -> bytes:
        """The header's bytes, with its checksum and its padding."""
        fixed = _FIXED.pack(_MAGIC, _VERSION, len(self.keys), self.page_bytes, self.layout, self.domain)
        entries = (key + checksum for key, checksum in zip(self.keys, self.checksums, strict=True))
        content = b"".join((fixed, *entries))
        return (content + page_checksum(content)).ljust(self.header_bytes, b"\0")


def page_checksum(content: bytes | memoryview) -> bytes:
    """16 bytes of SHA-256. Lets other threads run while it computes."""
    return hashlib.sha256(content).digest()[:CHECKSUM_BYTES]


def header_bytes(num_pages: int) -> int:
    """The size of a header of `num_pages` entries, in whole blocks."""
    content = _FIXED.size + num_pages * _ENTRY_BYTES + CHECKSUM_BYTES
    return -(-content // BLOCK_BYTES) * BLOCK_BYTES


def file_bytes(num_pages: int, page_bytes: int) -> int:
    """The size of a file of `num_pages` pages."""
    return header_bytes(num_pages) + num_pages * page_bytes


def promised_header_bytes(start: bytes) -> int:
    """How long the header is that begins with `start` (at most a bounded few blocks). Raises DamagedFile, ForeignFile."""
    num_pages = _fixed_fields(start)[0]
    return header_bytes(num_pages)


def decode_header(content: bytes) -> PageFileHeader:
    """The header at the start of `content`. Raises DamagedFile if a single bit of it is wrong, or ForeignFile."""
    num_pages, page_bytes, layout, domain = _fixed_fields(content)
    end = _FIXED.size + num_pages * _ENTRY_BYTES
    if content[end : end + CHECKSUM_BYTES] != page_checksum(content[:end]):
        raise DamagedFile("the header's checksum is wrong")
    starts = range(_FIXED.size, end, _ENTRY_BYTES)
    return PageFileHeader(
        layout=layout,
        domain=domain,
        page_bytes=page_bytes,
        keys=tuple(PageKey(content[start : start + KEY_BYTES]) for start in starts),
        checksums=tuple(content[start + KEY_BYTES : start + _ENTRY_BYTES] for start in starts),
    )


def checksums_of(pages: Iterable[memoryview]) -> tuple[bytes, ...]:
    """The checksum of each page."""
    return tuple(map(page_checksum, pages))


def _fixed_fields(content: bytes) -> tuple[int, int, bytes, bytes]:
    if len(content) < _FIXED.size:
        raise DamagedFile("shorter than a header")
    magic, version, num_pages, page_bytes, layout, domain = _FIXED.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedFile("not a file of pages")
    if version != _VERSION:
        raise ForeignFile(f"version {version}")
    if not 1 <= num_pages <= MAX_PAGES:
        raise DamagedFile(f"{num_pages} pages")
    return num_pages, page_bytes, layout, domain


@dataclass(slots=True, eq=False)
class PageFile:
    """One file: a run of pages that were written together."""

    name: str
    num_bytes: int
    header: PageFileHeader | None
    """None where the pages are not ours to read: another layout's file, or one that could not be removed."""
    used_at_ns: int
    num_live: int = 0
    """Pages that the index finds here; fewer than there are once some are forgotten."""

    @property
    def num_pages(self) -> int:
        """Pages in the file."""
        return len(self.header.keys) if self.header is not None else 0

    @property
    def domain(self) -> bytes | None:
        """The domain that the bytes are counted against; None for what nobody can read."""
        return self.header.domain if self.header is not None else None


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Neighbouring pages of one file, to be read at once."""

    file: PageFile
    header: PageFileHeader
    first: int
    count: int
