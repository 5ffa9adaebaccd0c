"""Keeps the KV pages of one engine where other engines can read them, and reads the pages of the others.

    SharedStore     what the KV cache and the copier see: one DiskStore, and the pages of others
    take_slot       finds a folder below the shared one that no running engine has, and opens it
    open_bucket     opens a folder of this engine alone, whose files are copied to a bucket that engines share

In a shared folder, each engine writes only to its own slot, within its own budget. It may read every slot of its layout.
A slot of an engine that has ended stays readable, and the next engine that starts takes it over with its pages.
In a bucket, all objects belong to all engines (object_pages.py).

SharedStore owns the thread that looks for new pages of others, and removes what is forgotten. Invariant: what a DiskStore
promises of reads holds for the pages of others.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.bucket import Bucket
from graftwork.engine.kv.disk.files import Buffer
from graftwork.engine.kv.disk.index import DiskCounters, ObjectFigures
from graftwork.engine.kv.disk.object_pages import ObjectPages
from graftwork.engine.kv.disk.peers import PeerPages
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

MAX_SLOTS = 1024
REFRESH_S = 1.0
"""Seconds between two looks at the slots of other engines."""
LIST_EVERY_S = 2.0
"""Seconds between two listings of a bucket."""


class OtherPages(Protocol):
    """The pages of other engines. `holds`, `offer` and the methods that forget never wait."""

    @property
    def counters(self) -> DiskCounters: ...
    @property
    def objects(self) -> ObjectFigures: ...
    @property
    def num_pages(self) -> int: ...

    def holds(self, key: PageKey) -> bool: ...

    def refresh(self) -> None:
        """Looks for pages that others have written or removed."""
        ...

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """See `DiskStore.read_pages`."""
        ...

    def offer(self, own: DiskStore, keys: Sequence[PageKey]) -> None:
        """Lets others read those pages of `keys` that this engine has on its disk."""
        ...

    def forget(self, key: PageKey) -> None: ...
    def forget_plain(self, domain: bytes) -> int:
        """Forgets the pages of a domain that are not encrypted. Returns their number, if `sweep` shall remove them."""
        ...

    def forget_domain(self, domain: bytes) -> int: ...

    def sweep(self) -> None:
        """Removes what was forgotten, and must not stay."""
        ...

    def close(self) -> None: ...
    def check_integrity(self) -> None: ...


def take_slot(root: Path, max_bytes: int, layout: bytes, reserve_share: float = 0.0) -> "SharedStore":
    """Opens the first slot below `root` that no running engine has, and returns the store of this engine.

    `layout` is a 32-byte digest of everything that decides the meaning of a page's bytes. The other parameters are those
    of DiskStore. Call `start` on the result. Raises InvalidRequest if the folder cannot be used.
    """
    clock = SystemClock()
    for number in range(MAX_SLOTS):
        slot = root / layout.hex()[:32] / f"slot-{number}"
        own = DiskStore(slot, max_bytes, layout, clock=clock, reserve_share=reserve_share)
        if own.try_open():
            return SharedStore(own, PeerPages(root, slot, layout, clock, own.keyring), clock)
    raise InvalidRequest(
        f"All {MAX_SLOTS} slots in {root} are taken: use another --shared-kv-dir.", param="shared_kv_dir"
    )


def open_bucket(own: DiskStore, url: str, max_bytes: int, layout: bytes) -> "SharedStore":
    """Returns the store of an engine that has opened its folder `own`, with the bucket at `url`.

    `layout` is that of `own`, and `max_bytes` what all engines together may keep in the bucket. Call `start` on the
    result. Raises InvalidRequest if the URL names no bucket.
    """
    clock = SystemClock()
    return SharedStore(own, ObjectPages(Bucket(url), layout, max_bytes, clock, own.keyring), clock)


class SharedStore:
    """Implements what the KV cache and the copier ask of a disk store, over the pages of all engines."""

    def __init__(self, own: DiskStore, peers: OtherPages, clock: Clock) -> None:
        self.own = own
        self.peers = peers
        self._clock = clock
        self._stopping = threading.Event()
        self._must_look = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, refresh_s: float = REFRESH_S, *, waits: bool = True) -> None:
        """Looks at the pages of other engines every `refresh_s` seconds on a thread, until `close`.

        With `waits`, returns after the first look.
        """
        if waits:
            self.refresh()
        else:
            self._must_look.set()
        self._thread = threading.Thread(target=self._keep_fresh, args=(refresh_s,), name="kv-peers", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Looks for what other engines have written or removed, and removes what an erasure has left."""
        self.peers.refresh()
        self.peers.sweep()

    def close(self) -> None:
        """Ends the thread, removes what is forgotten, and gives the folder back. The files stay on disk."""
        self._stopping.set()
        has_work = self._must_look.is_set()
        self._must_look.set()
        if self._thread is not None:
            self._thread.join()
        if has_work:
            self.peers.sweep()
        self.peers.close()
        self.own.close()

    @property
    def num_pages(self) -> int:
        """The number of pages in this engine's own folder."""
        return self.own.num_pages

    @property
    def bytes_used(self) -> int:
        """The bytes of this engine's own folder."""
        return self.own.bytes_used

    @property
    def counters(self) -> DiskCounters:
        """What this engine has done with its own pages and those of others."""
        pairs = zip(astuple(self.own.counters), astuple(self.peers.counters), strict=True)
        return DiskCounters(*map(sum, pairs))

    @property
    def objects(self) -> ObjectFigures:
        """What is in the bucket."""
        return self.peers.objects

    def holds(self, key: PageKey) -> bool:
        """Returns whether any engine has stored a page, as far as this one knows. O(1). Any thread may call it."""
        return self.own.holds(key) or self.peers.holds(key)

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        """Takes the key of a domain, with which the pages of all engines are read. See `DiskStore.unlock`."""
        is_new = not self.own.keyring.seals(domain)
        must_sweep = self.own.unlock(domain, key)
        return (is_new and self.peers.forget_plain(domain) > 0) or must_sweep

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[Buffer], above: Sequence[PageKey] = ()
    ) -> int:
        """Stores pages in this engine's own folder, and lets others read them. See `DiskStore.write`."""
        num_written = self.own.write(domain, keys, pages, above)
        self.peers.offer(self.own, [*above, *keys])
        return num_written

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads the pages of the longest prefix of `keys` that is stored and not damaged. See `DiskStore.read_pages`."""
        space, done = into.cast("B"), 0
        page_bytes = len(space) // len(keys)
        while done < len(keys):
            rest, room = keys[done:], space[done * page_bytes :]
            got = self.own.read_pages(rest, room) or self.peers.read_pages(rest, room)
            if not got:
                break
            done += got
        return done

    def forget(self, key: PageKey) -> None:
        """Forgets a page. It stays in the slots of other engines until they forget or evict it, and leaves a bucket."""
        self.own.forget(key)
        self.peers.forget(key)

    def forget_domain(self, domain: bytes) -> int:
        """Forgets all pages of a domain (usually one tenant). `sweep` then removes them everywhere.

        `domain` is the domain's digest. Returns the number of these pages.
        """
        return self.own.forget_domain(domain) + self.peers.forget_domain(domain)

    def sweep(self) -> None:
        """Removes the files of pages that were forgotten: in its own folder, and of forgotten domains everywhere.

        Where others keep theirs, the thread removes them, if it was started.
        """
        self.own.sweep()
        if self._thread is None:
            self.peers.sweep()
        else:
            self._must_look.set()

    def enforce_limits(self) -> int:
        """See `DiskStore.enforce_limits`."""
        return self.own.enforce_limits()

    def check_integrity(self) -> None:
        """Checks the own folder and what is known of the others. Call it only while nothing is written."""
        self.own.check_integrity()
        self.peers.check_integrity()

    def _keep_fresh(self, refresh_s: float) -> None:
        while not self._stopping.is_set():
            self._must_look.wait(refresh_s)
            if self._stopping.is_set():
                return
            self._must_look.clear()
            try:
                self.refresh()
            except Exception:  # noqa: BLE001 - the outermost loop of the thread: the next look may succeed
                _log.exception("kv_peers_failed")


TierStore = DiskStore | SharedStore
"""What keeps the pages of the disk tier: in a folder of this engine alone, or in one that engines share."""
