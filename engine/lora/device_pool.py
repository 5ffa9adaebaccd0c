"""Keeps adapters in device memory. Device memory is divided into frames: a frame has the size of one KV page.

Owns which frames each adapter has, which requests use the adapter, and when it was last used. The frames of an adapter
are adjacent. An adapter is pinned while requests use it, and a pinned adapter is never evicted. An adapter that is not
pinned is idle. Idle adapters and KV pages have one common eviction order. An idle adapter is evicted as early as a KV
page whose lease (time for which it is kept) is over, because its weights can be copied from the host again.

Invariant: some frames are reserved for adapters, and KV pages cannot take them. Others are reserved for KV pages, and
adapters cannot take them (see KvSizes).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.eviction_policy import EvictionClass
from graftwork.engine.kv.index.eviction_queue import EvictionRank
from graftwork.engine.kv.index.frame_allocator import FrameAllocator, FrameRun
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.lora.adapter_copies import AdapterCopies, DirectCopies
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.torch_backend import LoraRows


class PlacementResult(Enum):
    """Says whether adapters could be copied to the device. If not, says which memory is in use."""

    DONE = auto()
    SHARE_IN_USE = auto()
    """Adapters in use fill the memory that adapters may use, so the new adapters do not fit."""
    FRAMES_IN_USE = auto()
    """Too few frames can be freed now: running requests or copies use the other frames."""


@dataclass(slots=True)
class _Slot:
    """The record of one adapter on the device: its frames, its users and its last use."""

    adapter: ResidentAdapter
    """The adapter's tensors, as views of the memory of `run`."""
    run: FrameRun
    last_used: int
    """When the adapter was last used, in ticks that the prefix tree counts. Adapters and pages have one eviction order.
    """
    num_pins: int = 0
    is_copying: bool = False
    """Whether the adapter's bytes are still on their way to the device."""
    is_load_reported: bool = False
    """Whether a request has reported that the adapter was loaded."""


class DeviceAdapterPool:
    """Owns the adapters in device memory, by digest, the least recently used first.

    When KV pages need memory, they may evict idle adapters (adapters that no request uses). For this, the pool
    implements FrameUser, the interface of everything besides KV pages that uses device memory.
    """

    def __init__(
        self,
        device_memory: DeviceMemory,
        page_store: PageStore,
        lora: LoraBackend,
        most_bytes: int | None = None,
        copies: AdapterCopies | None = None,
    ) -> None:
        """`most_bytes` limits the bytes of all adapters. The memory that is reserved for KV limits them too.

        Without `copies`, adapters are copied at once.
        """
        self._device_memory = device_memory
        self._page_store = page_store
        self._lora = lora
        self._most_bytes = most_bytes
        self._copies = copies or DirectCopies()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._allocated: list[FrameRun] = []
        """The runs of frames of the adapters that are being placed now."""
        self.frame_allocator = FrameAllocator(page_store, device_memory)
        self.frame_allocator.on_runs_moved = self._runs_moved
        self.num_bytes = 0
        """Bytes of the adapters themselves, without the unused ends of their last frames."""
        self.wanted: Collection[str] = ()
        """The adapters that queued requests need. KV pages cannot evict them."""
        self.claimed_pages = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._slots

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that the LoRA backend has made of the adapters' weights, outside of the frames."""
        return self._lora.copied_bytes

    @property
    def rows(self) -> LoraRows:
        """The rows of all steps that had an adapter, by what applied it."""
        return self._lora.rows

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self._slots)

    @property
    def num_frames(self) -> int:
        return self._page_store.device.lent_pages

    def find(self, digest: str) -> ResidentAdapter | None:
        slot = self._slots.get(digest)
        return None if slot is None else slot.adapter

    # ---- use --------------------------------------------------------------------------------------------------

    def is_pinned(self, digest: str) -> bool:
        """Whether the adapter must stay on the device: requests use it, or it is being copied there."""
        return digest in self._slots and (self._slots[digest].num_pins > 0 or self._slots[digest].is_copying)

    def is_usable(self, digest: str) -> bool:
        """Whether the whole adapter is on the device."""
        return digest in self._slots and not self._slots[digest].is_copying

    def pin(self, digest: str) -> None:
        """Adds one pin to an adapter, so that it is not evicted, and marks it as just used.

        Each request that uses the adapter has one pin.
        """
        self._slots[digest].num_pins += 1
        self._touch(digest)

    def unpin(self, digest: str) -> None:
        """Removes one pin from an adapter. An adapter without pins is idle and may be evicted."""
        self._slots[digest].num_pins -= 1
        if not self.is_pinned(digest):
            self._touch(digest)

    def take_loaded_bytes(self, digest: str) -> int:
        """Returns the adapter's bytes if it was loaded since the last call for it, else 0."""
        slot = self._slots.get(digest)
        if slot is None or slot.is_load_reported:
            return 0
        slot.is_load_reported = True
        return slot.adapter.num_bytes

    def _touch(self, digest: str) -> None:
        self._slots[digest].last_used = self._page_store.tree.ticks
        self._slots.move_to_end(digest)

    # ---- coming and going -------------------------------------------------------------------------------------

    def why_never(self, adapters: Sequence[ResidentAdapter]) -> str | None:
        """Returns why these adapters can never be on the device together, and which setting to change.

        Returns None if they can be. Reads only sizes that never change, so any thread may call this method.
        """
        num_bytes = sum(adapter.num_bytes for adapter in adapters)
        if self._most_bytes is not None and num_bytes > self._most_bytes:
            return (
                f"need {num_bytes} bytes on the device at once; lora_pool_bytes leaves them {self._most_bytes}. "
                f"Start the engine with lora_pool_bytes of at least {num_bytes}."
            )
        sizes, frames = self._page_store.sizes, self.frames_for(adapters)
        if frames > sizes.max_lora_pages:
            each = self._device_memory.frame_bytes
            return (
                f"need {frames * each} bytes on the device at once; beside KV there are {sizes.max_lora_pages * each}. "
                f"Start the engine with device_bytes of at least {sizes.device_pages_for(frames) * each}."
            )
        return None

    def place(self, on_host: Sequence[ResidentAdapter], spared: Collection[str]) -> PlacementResult:
        """Starts to copy adapters to the device, either all of them or none. The result says whether it did.

        An adapter is usable when its copy has ended: at once on a CPU, and after `finish_copy` on CUDA. To make room, evicts idle KV pages and idle adapters (those that no request uses). Never evicts the adapters
        whose digests are in `spared`.
        """
        room = self._make_room(on_host, spared)
        if room is not PlacementResult.DONE:
            return room
        for adapter in on_host:
            run = self.frame_allocator.allocate(self._frames_of(adapter))
            if run is None:
                for allocated in self._allocated:
                    self.frame_allocator.free(allocated)
                self._allocated.clear()
                return PlacementResult.FRAMES_IN_USE
            self._allocated.append(run)
        for adapter, run in zip(on_host, self._allocated, strict=True):  # after all moves of frames
            self._settle(adapter, run)
        self._allocated.clear()
        return PlacementResult.DONE

    def finish_copy(self, digest: str) -> None:
        """Makes an adapter usable whose copy to the device has ended."""
        slot = self._slots[digest]
        self._end_copy(slot)
        self._place_in_backend(slot)

    def fail_copy(self, digest: str) -> None:
        """Frees the memory of an adapter whose copy to the device has failed."""
        slot = self._slots.pop(digest)
        self._end_copy(slot)
        self.num_bytes -= slot.adapter.num_bytes
        self.frame_allocator.free(slot.run)

    def _end_copy(self, slot: _Slot) -> None:
        slot.is_copying = False
        self.frame_allocator.unfix(slot.run)

    def close(self) -> None:
        """Waits for the copies to the device that have begun."""
        self._copies.close()

    def evict(self, digest: str) -> None:
        """Removes an adapter from the device and frees its memory.

        Raises AssertionError if a request uses the adapter.
        """
        assert not self.is_pinned(digest), f"{digest} is in use"
        slot = self._slots.pop(digest)
        self.num_bytes -= slot.adapter.num_bytes
        self._lora.forget(digest)
        self.frame_allocator.free(slot.run)

    def _settle(self, on_host: ResidentAdapter, run: FrameRun) -> None:
        on_device = on_host.over(self._device_memory.buffer(run.first, on_host.num_bytes))
        adapter = replace(on_device, shares=on_host.shares)
        self._slots[adapter.digest] = slot = _Slot(adapter, run, self._page_store.tree.ticks)
        self.num_bytes += adapter.num_bytes
        if self._copies.begin(adapter.digest, on_host.buffer, adapter.buffer):
            self._place_in_backend(slot)
        else:
            slot.is_copying = True
            self.frame_allocator.fix(run)

    def _place_in_backend(self, slot: _Slot) -> None:
        """Lets the backend use an adapter that was just copied. The backend passes the shares on, and nobody keeps them."""
        self._lora.place(slot.adapter)
        if slot.adapter.shares is not None:
            slot.adapter = replace(slot.adapter, shares=None)

    def room_for(self, coming: Sequence[ResidentAdapter], spared: Collection[str]) -> PlacementResult:
        """Returns DONE if evicting idle adapters and KV seems to make enough room for `coming`, else why it cannot.

        Changes nothing. Even if the result is DONE, `place` may find that the room cannot be used yet.
        """
        frames, num_bytes = self.frames_for(coming), sum(adapter.num_bytes for adapter in coming)
        idle = self._idle(spared)
        pool, idle_frames = self._page_store.device, sum(self._slots[digest].run.num_frames for digest in idle)
        if self._victims(idle, self.num_frames + frames, self.num_bytes + num_bytes) is None:
            return PlacementResult.SHARE_IN_USE
        has_room = pool.free_pages + pool.idle_pages + idle_frames >= frames
        return PlacementResult.DONE if has_room else PlacementResult.FRAMES_IN_USE

    def _idle(self, spared: Collection[str]) -> list[str]:
        return [digest for digest in self._slots if not self.is_pinned(digest) and digest not in spared]

    def _make_room(self, coming: Sequence[ResidentAdapter], spared: Collection[str]) -> PlacementResult:
        """Evicts idle adapters and KV as necessary. Evicts nothing if it is clear that this cannot free enough."""
        room = self.room_for(coming, spared)
        if room is not PlacementResult.DONE:
            return room
        frames, num_bytes = self.frames_for(coming), sum(adapter.num_bytes for adapter in coming)
        for digest in self._victims(self._idle(spared), self.num_frames + frames, self.num_bytes + num_bytes) or ():
            self.evict(digest)
        candidates = _Idle(self, lambda digest: digest not in spared)
        has_room = self._page_store.make_room_for_frames(Tier.DEVICE, frames, candidates)
        return PlacementResult.DONE if has_room else PlacementResult.FRAMES_IN_USE

    def _victims(self, idle: Sequence[str], num_frames: int, num_bytes: int) -> list[str] | None:
        """Returns which idle adapters to evict so that the new total is within the limits.

        None if evicting all of them is not enough.
        """
        victims: list[str] = []
        for digest in (*idle, None):
            is_within = self._most_bytes is None or num_bytes <= self._most_bytes
            if is_within and num_frames <= self._page_store.sizes.max_lora_pages:
                return victims
            if digest is not None:
                victims.append(digest)
                num_frames -= self._slots[digest].run.num_frames
                num_bytes -= self._slots[digest].adapter.num_bytes
        return None

    def to_drain(
        self, coming: Sequence[ResidentAdapter], draining: Collection[str], spared: Collection[str]
    ) -> set[str]:
        """Returns the digests of the adapters that must leave the device so that the adapters `coming` fit.

        The caller then drains them: it lets no new request use them, so that each becomes idle and can be evicted.

        The adapters in `draining` are chosen first. If they are not enough, the least recently used adapters that are
        not in `spared` are chosen too.
        """
        chosen = [*draining]
        chosen += [digest for digest in self._slots if digest not in draining and digest not in spared]
        frames, num_bytes = self.frames_for(coming), sum(adapter.num_bytes for adapter in coming)
        victims = self._victims(chosen, self.num_frames + frames, self.num_bytes + num_bytes)
        return set(chosen if victims is None else victims)

    def frames_for(self, adapters: Iterable[ResidentAdapter]) -> int:
        """Returns how many frames these adapters need together. A frame has the size of one KV page."""
        return sum(map(self._frames_of, adapters))

    def _frames_of(self, adapter: ResidentAdapter) -> int:
        return max(self._device_memory.frames_for(adapter.num_bytes), 1)

    def _runs_moved(self, moves: Mapping[FrameRun, FrameRun]) -> None:
        """Renews the views of all adapters whose frames were moved, also in the backend. None of them is being copied."""
        self._allocated = [moves.get(run, run) for run in self._allocated]
        moved = [slot for slot in self._slots.values() if slot.run in moves]
        for slot in moved:
            self._lora.forget(slot.adapter.digest)
        for slot in moved:
            slot.run = moves[slot.run]
            slot.adapter = slot.adapter.over(self._device_memory.buffer(slot.run.first, slot.adapter.num_bytes))
            self._lora.place(slot.adapter)

    # ---- giving way to pages ----------------------------------------------------------------------------------

    def next_rank(self) -> EvictionRank | None:
        return self._idle_for_pages().next_rank()

    def evict_next(self) -> None:
        self._idle_for_pages().evict_next()

    @property
    def evictable_pages(self) -> int:
        left = self.num_frames
        for digest, slot in self._slots.items():
            if self._is_unwanted(digest) and left - slot.run.num_frames >= self._page_store.sizes.lora_floor_pages:
                left -= slot.run.num_frames
        return self.num_frames - left

    def _idle_for_pages(self) -> "_Idle":
        most = self.num_frames - self._page_store.sizes.lora_floor_pages
        return _Idle(self, lambda digest: self._is_unwanted(digest) and self._slots[digest].run.num_frames <= most)

    def _is_unwanted(self, digest: str) -> bool:
        return not self.is_pinned(digest) and digest not in self.wanted

    def first_idle(self, may_go: Callable[[str], bool]) -> str | None:
        """Returns the digest of the least recently used adapter that is idle and for which `may_go` returns True.

        An adapter is idle if no request uses it. Returns None if there is no such adapter.
        """
        return next((digest for digest in self._slots if not self.is_pinned(digest) and may_go(digest)), None)

    def last_used(self, digest: str) -> int:
        """Returns when an adapter was last used, in ticks of the KV cache's prefix tree.

        KV pages record their last use in the same ticks, so the two can be compared.
        """
        return self._slots[digest].last_used

    def check_integrity(self) -> None:
        """Checks that the recorded sizes are right, and that each adapter's tensors are in the memory of that adapter.

        Checks the LoRA backend too. Raises AssertionError if something is wrong.
        """
        self.frame_allocator.check_integrity()
        self._lora.check_integrity()
        assert self.num_bytes == sum(slot.adapter.num_bytes for slot in self._slots.values())
        assert self.num_frames == sum(slot.run.num_frames for slot in self._slots.values())
        assert self.num_frames <= self._page_store.sizes.max_lora_pages
        for slot in self._slots.values():
            assert slot.adapter.buffer.data_ptr() == self._device_memory.buffer(slot.run.first, 1).data_ptr()


class _Idle:
    """Offers idle adapters for which `may_go` is true for eviction, the least recently used first."""

    def __init__(self, adapters: DeviceAdapterPool, may_go: Callable[[str], bool]) -> None:
        self._adapters = adapters
        self._may_go = may_go

    def next_rank(self) -> EvictionRank | None:
        digest = self._adapters.first_idle(self._may_go)
        return None if digest is None else (EvictionClass.LAPSED, 0.0, self._adapters.last_used(digest))

    def evict_next(self) -> None:
        digest = self._adapters.first_idle(self._may_go)
        assert digest is not None, "an adapter was promised that nobody has"
        self._adapters.evict(digest)
