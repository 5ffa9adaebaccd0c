"""Keeps the KV pages of one engine on a disk that engines share, and reads the pages of the others.

    SharedStore     what the KV cache and the copier see: one DiskStore, and PeerPages
    take_slot       finds a folder below the shared one that no running engine has, and opens it

Each engine writes only to its own slot, within its own budget. It may read every slot of its layout. A slot of an engine
that has ended stays readable, and the next engine that starts takes it over with its pages.

SharedStore owns the thread that looks for new pages of others. Invariant: what a DiskStore promises of reads holds for
the pages of all slots.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.kv.disk.files import Buffer
from graftwork.engine.kv.disk.index import DiskCounters
from graftwork.engine.kv.disk.peers import PeerPages
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

MAX_SLOTS = 1024
REFRESH_S = 1.0
"""Seconds between two looks at the slots of other engines."""


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
            return SharedStore(own, PeerPages(root, slot, layout, clock), clock)
    raise InvalidRequest(
        f"All {MAX_SLOTS} slots in {root} are taken: use another --shared-kv-dir.", param="shared_kv_dir"
    )


class SharedStore:
    """Implements what the KV cache and the copier ask of a disk store, over all slots."""

    def __init__(self, own: DiskStore, peers: PeerPages, clock: Clock) -> None:
        self.own = own
        self.peers = peers
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, refresh_s: float = REFRESH_S) -> None:
        """Looks at the slots of other engines now, and then every `refresh_s` seconds on a thread, until `close`."""
        self.refresh()
        self._thread = threading.Thread(target=self._keep_fresh, args=(refresh_s,), name="kv-peers", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Looks for files that other engines have written or removed, and removes files that an erasure has left."""
        self.peers.refresh()
        self.peers.sweep()

    def close(self) -> None:
        """Ends the thread and gives the slot back. The files stay on disk."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.own.close()

    @property
    def num_pages(self) -> int:
        """The number of pages in this engine's own slot."""
        return self.own.num_pages

    @property
    def bytes_used(self) -> int:
        """The bytes of this engine's own slot."""
        return self.own.bytes_used

    @property
    def counters(self) -> DiskCounters:
        """What this engine has done in all slots."""
        pairs = zip(astuple(self.own.counters), astuple(self.peers.counters), strict=True)
        return DiskCounters(*map(sum, pairs))

    def holds(self, key: PageKey) -> bool:
        """Returns whether a page is in any slot, as far as this engine knows. O(1). Any thread may call it."""
        return self.own.holds(key) or self.peers.holds(key)

    def write(
        self, domain: bytes, keys: Sequence[PageKey], pages: Sequence[Buffer], above: Sequence[PageKey] = ()
    ) -> int:
        """Stores pages in this engine's own slot. See `DiskStore.write`."""
        return self.own.write(domain, keys, pages, above)

    def read_pages(self, keys: Sequence[PageKey], into: memoryview) -> int:
        """Reads the pages of the longest prefix of `keys` that is in any slot and not damaged. See `DiskStore.read_pages`."""
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
        """Forgets a page. It stays in the slots of other engines until they forget or evict it."""
        self.own.forget(key)
        self.peers.forget(key)

    def forget_domain(self, domain: bytes) -> int:
        """Forgets all pages of a domain (usually one tenant). `sweep` then removes their files from all slots.

        `domain` is the domain's digest. Returns the number of these pages.
        """
        return self.own.forget_domain(domain) + self.peers.forget_domain(domain)

    def sweep(self) -> None:
        """Removes the files of pages that were forgotten: in its own slot, and of forgotten domains in all slots."""
        self.own.sweep()
        self.peers.sweep()

    def enforce_limits(self) -> int:
        """See `DiskStore.enforce_limits`."""
        return self.own.enforce_limits()

    def check_integrity(self) -> None:
        """Checks the own slot and what is known of the others. Call it only while nothing is written."""
        self.own.check_integrity()
        self.peers.check_integrity()

    def _keep_fresh(self, refresh_s: float) -> None:
        while not self._stopping.wait(refresh_s):
            try:
                self.refresh()
            except Exception:  # noqa: BLE001 - the outermost loop of the thread: the next look may succeed
                _log.exception("kv_peers_failed")


TierStore = DiskStore | SharedStore
"""What keeps the pages of the disk tier: in a folder of this engine alone, or in one that engines share."""
