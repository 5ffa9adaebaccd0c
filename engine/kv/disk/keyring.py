"""Holds the keys of tenants' KV files in memory, and encrypts, checks and decrypts pages with them.

A key comes with a request or a session command of its domain (usually one tenant), and is never written or logged. After
a restart the keyring is empty: encrypted pages are found again as soon as a request of their domain has come.

    domain       its plain files               its encrypted files
    no key       are written and read          are not read, and stay until room is needed
    key          are not read, and removed     are written and read
    destroyed    are not read                  are not read, and nothing is written any more

Invariant: once a domain had a key, none of its pages is written plainly, and no plain page of it is read: whoever can
write to the disk could have put it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.file_format import FileSpan, PageFileHeader, checksums_of, page_checksum

if TYPE_CHECKING:
    from graftwork.platform.encryption.sealed_pages import PageCipher

_CUT_OFF = "the file is cut off or gone"
_WRONG = "a page is wrong"
_SEALED_WRONG = "a page does not decrypt: it was changed, or its tenant has another key"
_KEY_CHANGED = "its tenant's key came or went since the page was found"


@dataclass(frozen=True, slots=True)
class PageContents:
    """Pages as they are written to a file."""

    pages: Sequence[memoryview]
    checksums: tuple[bytes, ...]
    """16 bytes for each page: its checksum, or the tag of an encrypted page."""
    salt: bytes | None
    """The salt of the file's key; None for a plain file."""


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """How many pages of a span are right, counted from the first."""

    num_good: int
    trouble: str | None = None
    """What is wrong with the next page; None if all are right."""


class Keyring:
    """Owns the keys of KV files, by the digests of their domains. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._keys: dict[bytes, KvFileKey | None] = {}
        """None for a domain whose key was destroyed."""

    def add(self, domain: bytes, key: KvFileKey) -> bool:
        """Takes the key of a domain (usually one tenant). Returns whether the domain had none before."""
        before = self._keys.get(domain)
        self._keys[domain] = key
        return before is None

    def destroy(self, domain: bytes) -> None:
        """Forgets the key of an erased domain. Does nothing for a domain without a key."""
        if domain in self._keys:
            self._keys[domain] = None

    def seals(self, domain: bytes) -> bool:
        """Returns whether the pages of a domain are encrypted when they are written."""
        return self._keys.get(domain) is not None

    def opens(self, header: PageFileHeader | None) -> bool:
        """Returns whether the pages of a file may be read with the keys that are here now. O(1)."""
        if header is None:
            return False
        return header.domain not in self._keys if header.salt is None else self._keys.get(header.domain) is not None

    def prepare(
        self, layout: bytes, domain: bytes, keys: Sequence[PageKey], pages: Sequence[memoryview]
    ) -> PageContents | None:
        """Returns pages as they go into one file of a domain: encrypted if the domain has a key, else as they are.

        Returns None if the domain's key was destroyed: then nothing may be written.
        """
        if domain not in self._keys:
            return PageContents(pages, checksums_of(pages), None)
        secret = self._keys[domain]
        if secret is None:
            return None
        from graftwork.platform.encryption.sealed_pages import new_salt

        salt = new_salt()
        cipher = _cipher(secret, salt, layout, domain)
        room = memoryview(bytearray(sum(map(len, pages))))
        sealed: list[memoryview] = []
        for page in pages:
            start = len(sealed) * len(page)
            sealed.append(room[start : start + len(page)])
        numbered = enumerate(zip(keys, pages, sealed, strict=True))
        tags = tuple(cipher.seal(number, key, page, into) for number, (key, page, into) in numbered)
        return PageContents(sealed, tags, salt)

    def check(self, span: FileSpan, num_bytes: int, space: memoryview) -> SpanCheck:
        """Checks pages that were read from a file into `space`, and decrypts them there if they are encrypted.

        `num_bytes` is how many bytes of the span the file had.
        """
        header, size, cipher = span.header, span.header.page_bytes, self._cipher_of(span.header)
        if cipher is None and (header.salt is not None or not self.opens(header)):
            return SpanCheck(0, _KEY_CHANGED)
        for place in range(span.count):
            if num_bytes < (place + 1) * size:
                return SpanCheck(place, _CUT_OFF)
            number, page = span.first + place, space[place * size : (place + 1) * size]
            if cipher is None:
                if page_checksum(page) != header.checksums[number]:
                    return SpanCheck(place, _WRONG)
            elif not cipher.unseal(number, header.keys[number], page, header.checksums[number]):
                return SpanCheck(place, _SEALED_WRONG)
        return SpanCheck(span.count)

    def _cipher_of(self, header: PageFileHeader) -> "PageCipher | None":
        secret = self._keys.get(header.domain)
        if header.salt is None or secret is None:
            return None
        return _cipher(secret, header.salt, header.layout, header.domain)


def _cipher(secret: KvFileKey, salt: bytes, layout: bytes, domain: bytes) -> "PageCipher":
    """Returns the cipher of one file. An engine whose tenants have no keys never loads the library."""
    from graftwork.platform.encryption.sealed_pages import PageCipher

    return PageCipher(secret.secret, salt, layout + domain)
