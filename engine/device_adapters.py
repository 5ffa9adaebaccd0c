"""Adapters on the device, each in a run of frames of its own, among the pages of KV.

Owns which adapter lies where, who uses it, and when it was last used. An adapter that is pinned stays; one that is idle
gives way to pages in the order of the pages themselves, as one of class LAPSED: what it was read from stands below. KV
cannot push adapters below their floor, nor they KV below its last context and its reserve (KvSizes).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from graftwork.engine.drop_order import Rank
from graftwork.engine.frame_arena import FrameArena
from graftwork.engine.frame_room import FrameRoom, FrameRun
from graftwork.engine.lora_backend import LoraBackend
from graftwork.engine.residency import Residency
from graftwork.engine.resident_adapter import ResidentAdapter
from graftwork.engine.retention import DropClass
from graftwork.engine.tier_names import Tier


class Placing(Enum):
    """What came of bringing adapters to the device."""

    DONE = auto()
    SHARE_IN_USE = auto()
    """All that adapters may have of the device is in use by others of them."""
    FRAMES_IN_USE = auto()
    """There is too little that KV, or a copy that is under way, can leave just now."""


@dataclass(slots=True)
class _Lodging:
    """One adapter's place."""

    adapter: ResidentAdapter
    """Views of the run's memory."""
    run: FrameRun
    last_used: int
    """On the prefix tree's clock, as of the pages that stand in the same order."""
    num_pins: int = 0


class DeviceAdapters:
    """Resident adapters by digest, the least recently used first. A Lodger of the device."""

    def __init__(
        self, arena: FrameArena, residency: Residency, lora: LoraBackend, most_bytes: int | None = None
    ) -> None:
        """`most_bytes` bounds them in addition to what KV is sure of."""
        self._arena = arena
        self._residency = residency
        self._lora = lora
        self._most_bytes = most_bytes
        self._lodgings: OrderedDict[str, _Lodging] = OrderedDict()
        self.room = FrameRoom(residency, arena)
        self.room.on_runs_moved = self._runs_moved
        self.num_bytes = 0
        """Of the adapters themselves."""
        self.wanted: Collection[str] = ()
        """What requests in the queue are going to use: it does not give way to pages."""
        self.claimed_pages = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._lodgings

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self._lodgings)

    @property
    def num_frames(self) -> int:
        return self._residency.device.lent_pages

    def find(self, digest: str) -> ResidentAdapter | None:
        lodging = self._lodgings.get(digest)
        return None if lodging is None else lodging.adapter

    # ---- use --------------------------------------------------------------------------------------------------

    def is_pinned(self, digest: str) -> bool:
        return digest in self._lodgings and self._lodgings[digest].num_pins > 0

    def pin(self, digest: str) -> None:
        """Keep an adapter on the device, and mark it used."""
        self._lodgings[digest].num_pins += 1
        self._touch(digest)

    def unpin(self, digest: str) -> None:
        """One user less; the last leaves it idle from now on."""
        self._lodgings[digest].num_pins -= 1
        if not self.is_pinned(digest):
            self._touch(digest)

    def _touch(self, digest: str) -> None:
        self._lodgings[digest].last_used = self._residency.tree.ticks
        self._lodgings.move_to_end(digest)

    # ---- coming and going -------------------------------------------------------------------------------------

    def why_never(self, adapters: Sequence[ResidentAdapter]) -> str | None:
        """Why adapters could not be here together, however long one waited, and what to change; None if they could."""
        num_bytes = sum(adapter.num_bytes for adapter in adapters)
        if self._most_bytes is not None and num_bytes > self._most_bytes:
            return (
                f"need {num_bytes} bytes on the device at once; lora_pool_bytes leaves them {self._most_bytes}. "
                f"Start the engine with lora_pool_bytes of at least {num_bytes}."
            )
        sizes, frames = self._residency.sizes, self.frames_for(adapters)
        if frames > sizes.most_lora_pages:
            each = self._arena.frame_bytes
            return (
                f"need {frames * each} bytes on the device at once; beside KV there are {sizes.most_lora_pages * each}. "
                f"Start the engine with device_bytes of at least {sizes.device_pages_for(frames) * each}."
            )
        return None

    def place(self, on_host: Sequence[ResidentAdapter], spared: Collection[str]) -> Placing:
        """Bring adapters here, all or none; idle ones that are not spared make room, and so does idle KV."""
        room = self._make_room(on_host, spared)
        if room is not Placing.DONE:
            return room
        for number, adapter in enumerate(on_host):
            run = self.room.take(self._frames_of(adapter))
            if run is None:
                for placed in on_host[:number]:
                    self.evict(placed.digest)
                return Placing.FRAMES_IN_USE
            self._settle(adapter, run)
        return Placing.DONE

    def evict(self, digest: str) -> None:
        """Give an adapter's frames back."""
        lodging = self._lodgings.pop(digest)
        assert not lodging.num_pins, f"{digest} is in use"
        self.num_bytes -= lodging.adapter.num_bytes
        self._lora.forget(digest)
        self.room.give_back(lodging.run)

    def _settle(self, on_host: ResidentAdapter, run: FrameRun) -> None:
        adapter = on_host.moved_to(self._arena.block(run.first, on_host.num_bytes))
        self._lodgings[adapter.digest] = _Lodging(adapter, run, self._residency.tree.ticks)
        self.num_bytes += adapter.num_bytes
        self._lora.place(on_host, adapter)

    def _make_room(self, coming: Sequence[ResidentAdapter], spared: Collection[str]) -> Placing:
        """Evict what must go; nothing goes if that could not be enough."""
        frames, num_bytes = self.frames_for(coming), sum(adapter.num_bytes for adapter in coming)
        idle = [digest for digest in self._lodgings if not self.is_pinned(digest) and digest not in spared]
        pool, idle_frames = self._residency.device, sum(self._lodgings[digest].run.num_frames for digest in idle)
        victims = self._victims(idle, self.num_frames + frames, self.num_bytes + num_bytes)
        if victims is None:
            return Placing.SHARE_IN_USE
        if pool.free_pages + pool.idle_pages + idle_frames < frames:
            return Placing.FRAMES_IN_USE
        for digest in victims:
            self.evict(digest)
        givers = _Idle(self, lambda digest: digest not in spared)
        has_room = self._residency.make_room_for_lodger(Tier.DEVICE, frames, givers)
        return Placing.DONE if has_room else Placing.FRAMES_IN_USE

    def _victims(self, idle: Sequence[str], num_frames: int, num_bytes: int) -> list[str] | None:
        """Of the idle ones, those that must go for so much to be within bounds; None if all of them are too few."""
        victims: list[str] = []
        for digest in (*idle, None):
            is_within = self._most_bytes is None or num_bytes <= self._most_bytes
            if is_within and num_frames <= self._residency.sizes.most_lora_pages:
                return victims
            if digest is not None:
                victims.append(digest)
                num_frames -= self._lodgings[digest].run.num_frames
                num_bytes -= self._lodgings[digest].adapter.num_bytes
        return None

    def to_drain(
        self, coming: Sequence[ResidentAdapter], draining: Collection[str], spared: Collection[str]
    ) -> set[str]:
        """Which adapters in use must run out, besides those that do already, for others to be within bounds; those
        that were taken into use longest ago."""
        chosen = [*draining]
        chosen += [digest for digest in self._lodgings if digest not in draining and digest not in spared]
        frames, num_bytes = self.frames_for(coming), sum(adapter.num_bytes for adapter in coming)
        victims = self._victims(chosen, self.num_frames + frames, self.num_bytes + num_bytes)
        return set(chosen if victims is None else victims)

    def frames_for(self, adapters: Iterable[ResidentAdapter]) -> int:
        """Frames that some adapters take together."""
        return sum(map(self._frames_of, adapters))

    def _frames_of(self, adapter: ResidentAdapter) -> int:
        return max(self._arena.frames_for(adapter.num_bytes), 1)

    def _runs_moved(self, moves: Mapping[FrameRun, FrameRun]) -> None:
        """Adapters have been slid elsewhere: forget every view of where they were, and view them anew."""
        moved = [lodging for lodging in self._lodgings.values() if lodging.run in moves]
        for lodging in moved:
            self._lora.forget(lodging.adapter.digest)
        for lodging in moved:
            lodging.run = moves[lodging.run]
            lodging.adapter = lodging.adapter.over(self._arena.block(lodging.run.first, lodging.adapter.num_bytes))
            readable = lodging.adapter.moved_to(torch.empty_like(lodging.adapter.block, device="cpu"))
            self._lora.place(readable, lodging.adapter)

    # ---- giving way to pages ----------------------------------------------------------------------------------

    def rank(self) -> Rank | None:
        return self._idle_for_pages().rank()

    def give(self) -> None:
        self._idle_for_pages().give()

    @property
    def spare_pages(self) -> int:
        left = self.num_frames
        for digest, lodging in self._lodgings.items():
            if self._is_unwanted(digest) and left - lodging.run.num_frames >= self._residency.sizes.lora_floor_pages:
                left -= lodging.run.num_frames
        return self.num_frames - left

    def _idle_for_pages(self) -> "_Idle":
        most = self.num_frames - self._residency.sizes.lora_floor_pages
        return _Idle(self, lambda digest: self._is_unwanted(digest) and self._lodgings[digest].run.num_frames <= most)

    def _is_unwanted(self, digest: str) -> bool:
        return not self.is_pinned(digest) and digest not in self.wanted

    def first_idle(self, may_go: Callable[[str], bool]) -> str | None:
        """The least recently used of those that nobody has pinned and that may go."""
        return next((digest for digest in self._lodgings if not self.is_pinned(digest) and may_go(digest)), None)

    def last_used(self, digest: str) -> int:
        """When it was last used, on the prefix tree's clock."""
        return self._lodgings[digest].last_used

    def check_integrity(self) -> None:
        """Recount bytes and frames; every adapter views its own run."""
        self.room.check_integrity()
        self._lora.check_integrity()
        assert self.num_bytes == sum(lodging.adapter.num_bytes for lodging in self._lodgings.values())
        assert self.num_frames == sum(lodging.run.num_frames for lodging in self._lodgings.values())
        assert self.num_frames <= self._residency.sizes.most_lora_pages
        for lodging in self._lodgings.values():
            assert lodging.adapter.block.data_ptr() == self._arena.block(lodging.run.first, 1).data_ptr()


class _Idle:
    """Idle adapters of some kind, as a Giver."""

    def __init__(self, adapters: DeviceAdapters, may_go: Callable[[str], bool]) -> None:
        self._adapters = adapters
        self._may_go = may_go

    def rank(self) -> Rank | None:
        digest = self._adapters.first_idle(self._may_go)
        return None if digest is None else (DropClass.LAPSED, 0.0, self._adapters.last_used(digest))

    def give(self) -> None:
        digest = self._adapters.first_idle(self._may_go)
        assert digest is not None, "an adapter was promised that nobody has"
        self._adapters.evict(digest)
