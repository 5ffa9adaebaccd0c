"""Holds the keys of tenants' KV files in memory, and encrypts, checks and decrypts pages with them.

A key comes with a request or a session command of its domain (usually one tenant), and is never written or logged. After
a restart the keyring is empty: encrypted pages are found again as soon as a request of their domain has come.

    domain       its plain files               its encrypted files
    no key       are written and read          are not read, and stay until room is needed
    key          are not read, and removed     are written and read
    locked       are not read                  are not read, and nothing is written until the key comes again
    destroyed    are not read                  are not read, and nothing is written any more

The keys of at most `MAX_KEYS` domains are kept: those whose requests came last. The others are locked, and cost a few
bits each, in memory that does not grow.

Invariant: once a domain had a key, none of its pages is written plainly, and no plain page of it is read: whoever can
write to the disk could have put it there. So where it is not sure whether a domain had a key, it is locked.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.file_format import FileSpan, PageFileHeader, checksums_of, page_checksum

if TYPE_CHECKING:
    from graftwork.platform.encryption.sealed_pages import PageCipher

MAX_KEYS = 10_000
"""The most domains whose keys are kept: about 3 MB."""
_FILTER_BITS = 2**20
_FILTER_HASHES = 4

_CUT_OFF = "the file is cut off or gone"
_WRONG = "a page is wrong"
_SEALED_WRONG = "a page does not decrypt: it was changed, or its tenant has another key"
_KEY_CHANGED = "its tenant's key came or went since the page was found"


@dataclass(frozen=True, slots=True)
class PageContents:
    """Pages as they are written to a file."""

    pages: Sequence[memoryview]
    checksums: bytes
    """16 bytes for each page: its checksum, or the tag of an encrypted page."""
    salt: bytes | None
    """The salt of the file's key; None for a plain file."""


@dataclass(frozen=True, slots=True)
class SpanCheck:
    """How many pages of a span are right, counted from the first."""

    num_good: int
    trouble: str | None = None
    """What is wrong with the next page; None if all are right."""


class DomainFilter:
    """Remembers any number of domains in 128 KiB, as a Bloom filter. Never forgets one, and takes some others for known:
    1 in 500,000 after 10,000 domains, and 1 in 100 after 100,000.
    """

    def __init__(self) -> None:
        self._bits = bytearray(_FILTER_BITS // 8)

    def add(self, domain: bytes) -> None:
        """`domain` is a digest, whose bytes are as good as those of a hash."""
        for byte, bit in _places(domain):
            self._bits[byte] |= bit

    def __contains__(self, domain: bytes) -> bool:
        return all(self._bits[byte] & bit for byte, bit in _places(domain))


def _places(domain: bytes) -> Iterator[tuple[int, int]]:
    for start in range(0, 4 * _FILTER_HASHES, 4):
        place = int.from_bytes(domain[start : start + 4], "big") % _FILTER_BITS
        yield place // 8, 1 << place % 8


class Keyring:
    """Owns the keys of KV files, by the digests of their domains. Every method may be called from any thread, but those
    that change something from one thread alone.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, KvFileKey] = OrderedDict()
        """The key whose request came last is the last."""
        self._destroyed: OrderedDict[bytes, None] = OrderedDict()
        self._locked = DomainFilter()

    def add(self, domain: bytes, key: KvFileKey) -> bool:
        """Takes the key of a domain (usually one tenant). Returns whether the domain had none before."""
        before = self._keys.get(domain)
        self._keys[domain] = key
        self._keys.move_to_end(domain)
        self._destroyed.pop(domain, None)
        self._lock_oldest(self._keys)
        return before is None

    def destroy(self, domain: bytes) -> None:
        """Forgets the key of an erased domain. Does nothing for a domain that never had a key."""
        if domain in self._keys or domain in self._locked:
            self._destroyed[domain] = None
            self._keys.pop(domain, None)
            self._lock_oldest(self._destroyed)

    def seals(self, domain: bytes) -> bool:
        """Returns whether the pages of a domain are encrypted when they are written."""
        return domain in self._keys

    def is_destroyed(self, domain: bytes) -> bool:
        """Returns whether the key of a domain was destroyed, among the last `MAX_KEYS` that were."""
        return domain in self._destroyed

    def opens(self, header: PageFileHeader | None) -> bool:
        """Returns whether the pages of a file may be read with the keys that are here now. O(1)."""
        if header is None:
            return False
        return self._is_plain(header.domain) if header.salt is None else header.domain in self._keys

    def _is_plain(self, domain: bytes) -> bool:
        """Returns whether a domain surely never had a key. A domain is always in the next place before it leaves one."""
        return domain not in self._keys and domain not in self._destroyed and domain not in self._locked

    def _lock_oldest(self, domains: OrderedDict[bytes, KvFileKey] | OrderedDict[bytes, None]) -> None:
        while len(domains) > self._max_keys:
            oldest = next(iter(domains))
            self._locked.add(oldest)
            del domains[oldest]

    def prepare(
        self, layout: bytes, domain: bytes, keys: Sequence[PageKey], pages: Sequence[memoryview]
    ) -> PageContents | None:
        """Returns pages as they go into one file of a domain: encrypted if the domain has a key, else as they are.

        Returns None if the domain is locked or its key was destroyed: then nothing may be written.
        """
        secret = self._keys.get(domain)
        if secret is None:
            return PageContents(pages, checksums_of(pages), None) if self._is_plain(domain) else None
        from graftwork.platform.encryption.sealed_pages import new_salt

        salt = new_salt()
        cipher = _cipher(secret, salt, layout, domain)
        room = memoryview(bytearray(sum(map(len, pages))))
        sealed: list[memoryview] = []
        for page in pages:
            start = len(sealed) * len(page)
            sealed.append(room[start : start + len(page)])
        numbered = enumerate(zip(keys, pages, sealed, strict=True))
        tags = b"".join(cipher.seal(number, key, page, into) for number, (key, page, into) in numbered)
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
                if page_checksum(page) != header.checksum(number):
                    return SpanCheck(place, _WRONG)
            elif not cipher.unseal(number, header.keys[number], page, header.checksum(number)):
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
