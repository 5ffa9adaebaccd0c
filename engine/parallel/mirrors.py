"""Repeats on all ranks what rank 0 does with memory: moves of frames, adapters, and transfers between tiers.

Each mirror stands where the engine's loop expects the part itself, does the work on rank 0, and tells the workers. It
decides nothing. Numbers of frames, pages and transfers are the same on all ranks.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from threading import Lock

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import KvFileKey
from graftwork.engine.kv.disk.index import DiskCounters, ObjectFigures
from graftwork.engine.kv.disk.keyring import MAX_KEYS
from graftwork.engine.kv.disk.shared import TierStore
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory
from graftwork.engine.kv.transfer.plan import LoadReadable, Report, TransferDone, TransferPlan
from graftwork.engine.lora.backend import LoraBackend, StepLora
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraRows
from graftwork.engine.parallel.adapters import SharedParts
from graftwork.engine.parallel.commands import DiskReport, Envelope, transfer_command
from graftwork.engine.parallel.ranks import Rank
from graftwork.engine.parallel.workers import Workers


def mirror_moves(memory: DeviceMemory, workers: Workers) -> None:
    """Lets all ranks move the same frames as `memory`, the device memory of rank 0."""

    def tell(moves: Sequence[tuple[int, int]]) -> None:
        if moves:
            workers.send(Envelope("move", {"moves": [list(move) for move in moves]}))

    memory.on_moved = tell


class MirroredLora:
    """The LoRA backend of rank 0, which also places and forgets each adapter on the other ranks."""

    def __init__(self, own: LoraBackend, memory: DeviceMemory, workers: Workers) -> None:
        self._own = own
        self._memory = memory
        self._workers = workers

    def place(self, adapter: ResidentAdapter) -> None:
        """Places an adapter on all ranks, in the same frames. An adapter that was only moved has no shares."""
        shares = adapter.shares
        self._own.place(replace(adapter, shares=None))
        frame = adapter.buffer.storage_offset() // self._memory.frame_bytes
        if shares is None:
            self._workers.send(Envelope("renew", {"digest": adapter.digest, "frame": frame}))
            return
        assert isinstance(shares, SharedParts)
        size = self._workers.num_workers + 1
        tickets = [shares.ticket(Rank(number, size)) for number in range(1, size)]
        commands = [Envelope("place", {"frame": frame, "ticket": ticket}) for ticket in tickets]
        self._workers.send_each(commands, keeping=shares)

    def forget(self, digest: str) -> None:
        self._own.forget(digest)
        self._workers.send(Envelope("forget", {"digest": digest}))

    @property
    def copied_bytes(self) -> int:
        return self._own.copied_bytes

    @property
    def rows(self) -> LoraRows:
        return self._own.rows

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        return self._own.step(segments, num_rows)

    def check_integrity(self) -> None:
        self._own.check_integrity()


class MirroredDisk:
    """The disk store of rank 0, as the KV cache sees it. What it forgets, all ranks forget.

    A page counts as stored if rank 0 has its part. If another rank has lost its part, the page cannot be read, and is
    computed again.
    """

    def __init__(self, own: TierStore, workers: Workers) -> None:
        self._own = own
        self._workers = workers
        self._sent: OrderedDict[bytes, KvFileKey] = OrderedDict()
        """The keys that the other ranks have, in the order in which they got them: so they drop them, too."""

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def bytes_used(self) -> int:
        """Bytes of all ranks' parts. Those of other ranks are as of their last transfers."""
        return self._own.bytes_used + sum(one.bytes_used for one in self._others())

    @property
    def counters(self) -> DiskCounters:
        """The troubles of all ranks' disks. The pages are counted as rank 0 has them: they are the same on all ranks."""
        own, others = self._own.counters, self._others()
        return replace(
            own,
            corrupt=own.corrupt + sum(one.corrupt for one in others),
            foreign=own.foreign + sum(one.foreign for one in others),
            failed=own.failed + sum(one.failed for one in others),
        )

    @property
    def objects(self) -> ObjectFigures:
        return self._own.objects

    def holds(self, key: PageKey) -> bool:
        return self._own.holds(key)

    def unlock(self, domain: bytes, key: KvFileKey) -> bool:
        if self._sent.get(domain) != key:  # each request brings it
            self._sent[domain] = key
            self._sent.move_to_end(domain)
            if len(self._sent) > MAX_KEYS:
                self._sent.popitem(last=False)
            self._workers.send(Envelope("unlock_domain", {"domain": domain.hex(), "key": key.secret.hex()}))
        return self._own.unlock(domain, key)

    def forget(self, key: PageKey) -> None:
        self._own.forget(key)
        self._workers.send(Envelope("forget_page", {"key": key.hex()}))

    def forget_domain(self, domain: bytes) -> int:
        self._sent.pop(domain, None)
        self._workers.send(Envelope("forget_domain", {"domain": domain.hex()}))
        return self._own.forget_domain(domain)

    def _others(self) -> list[DiskReport]:
        return list(self._workers.disks.values())


@dataclass(slots=True)
class _Transfer:
    """A transfer that some ranks have not ended yet."""

    plan: TransferPlan
    num_awaited: int
    num_good: int
    """The fewest good pages of the ranks that have ended it."""
    seconds: float = 0.0


class MirroredCopier:
    """The CopyEngine of a tensor-parallel engine. Each rank copies its own part of each page between its own tiers.

    A transfer has ended when all ranks have ended it. A page is good if it is good on all ranks.
    """

    def __init__(self, report: Report, workers: Workers) -> None:
        """`report` gets the ends of transfers, on any thread. `attach` must be called before the first transfer."""
        self._report = report
        self._workers = workers
        self._own: PageCopier | None = None
        self._numbers = count()
        self._lock = Lock()
        self._transfers: dict[int, _Transfer] = {}
        self._number_of: dict[Hashable, int] = {}
        workers.on_transfer = self._ended_elsewhere

    def attach(self, own: PageCopier) -> None:
        """Sets the copier of rank 0, which must report to `own_report`."""
        self._own = own

    def own_report(self, message: TransferDone | LoadReadable) -> None:
        """Takes a report of rank 0's own copier."""
        if isinstance(message, LoadReadable):
            self._report(message)
            return
        with self._lock:
            number = self._number_of[message.plan]
        self._ended(number, message.num_good, message.seconds)

    def running_numbers(self, plans: Sequence[Hashable]) -> list[int]:
        """Returns the numbers of those transfers among `plans` that some rank has not ended."""
        with self._lock:
            return [self._number_of[plan] for plan in plans if plan in self._number_of]

    def begin(self, plan: TransferPlan) -> None:
        assert self._own is not None
        number = next(self._numbers)
        with self._lock:
            self._transfers[number] = _Transfer(plan, self._workers.num_workers + 1, len(plan.moves))
            self._number_of[plan] = number
        self._workers.send(transfer_command(number, plan))
        self._own.begin(plan)

    def sweep(self) -> None:
        assert self._own is not None
        self._workers.send(Envelope("sweep"))
        self._own.sweep()

    def close(self) -> None:
        """Ends all transfers, the copy threads of all ranks, and the workers."""
        assert self._own is not None
        self._own.close()
        self._workers.close()

    def _ended_elsewhere(self, number: int, num_good: int) -> None:
        self._ended(number, num_good, 0.0)

    def _ended(self, number: int, num_good: int, seconds: float) -> None:
        with self._lock:
            transfer = self._transfers[number]
            transfer.num_awaited -= 1
            transfer.num_good = min(transfer.num_good, num_good)
            transfer.seconds = max(transfer.seconds, seconds)
            if transfer.num_awaited:
                return
            del self._transfers[number]
            del self._number_of[transfer.plan]
        self._report(TransferDone(transfer.plan, transfer.num_good, transfer.seconds))
