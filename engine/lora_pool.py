"""Adapter weights on the device, within a budget of bytes.

LoraPool alone places adapters. A digest is absent, being loaded, waiting for room, or resident; a batch pins what it
uses, and only what nobody pins makes room for others, least recently used first.
Loads run on a thread of their own, one for each digest however many requests wait for it, and come back to the loop
as events. A load that fails is the failure of the requests that wait for it, never of the loop.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from graftwork.engine.adapter_weights import AdapterSource, AdapterWeights
from graftwork.engine.lora import ResidentAdapter, prepare
from graftwork.platform.errors import GraftworkError, InternalFailure, ValidationFailed


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The end of a load, on its way to the loop."""

    digest: str
    outcome: AdapterWeights | GraftworkError


class LoraPool:
    """Resident adapters by digest. All methods are called by the loop's thread."""

    def __init__(
        self,
        source: AdapterSource,
        widths: dict[str, int],
        *,
        budget_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
        deliver: Callable[[AdapterLoaded], None],
    ) -> None:
        """`deliver` is called on the loading thread and must hand the event over to the loop."""
        self._source = source
        self._widths = widths
        self._budget_bytes = budget_bytes
        self._device = device
        self._dtype = dtype
        self._deliver = deliver
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-load")
        self._loading: set[str] = set()
        self._without_room: dict[str, ResidentAdapter] = {}
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._pins: dict[str, int] = {}
        self._to_forget: set[str] = set()
        self.num_bytes = 0
        self.num_loads = 0

    @property
    def resident_digests(self) -> tuple[str, ...]:
        return tuple(self._resident)

    def is_ready(self, digest: str) -> bool:
        """Whether the adapter is resident; if not, its load has begun or goes on."""
        if digest in self._resident:
            return True
        if digest in self._without_room:
            return self._place(self._without_room[digest])
        if digest not in self._loading:
            self._loading.add(digest)
            self._loader.submit(self._load, digest)
        return False

    def get(self, digest: str) -> ResidentAdapter:
        """A resident adapter, for a batch that has pinned it."""
        assert self._pins.get(digest), f"{digest} is used without a pin"
        return self._resident[digest]

    def pin(self, digest: str) -> None:
        """Keep a resident adapter where it is, and mark it used."""
        self._resident.move_to_end(digest)
        self._pins[digest] = self._pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self._pins[digest] -= 1
        if self._pins[digest] == 0:
            del self._pins[digest]
            if digest in self._to_forget:
                self._evict(digest)

    def forget(self, digest: str) -> None:
        """Free an adapter now, or as soon as nobody uses it."""
        self._without_room.pop(digest, None)
        if digest in self._pins:
            self._to_forget.add(digest)
        elif digest in self._resident:
            self._evict(digest)

    def absorb(self, loaded: AdapterLoaded) -> GraftworkError | None:
        """Take the end of a load in; returns the error that the waiting requests must be told."""
        self._loading.discard(loaded.digest)
        if isinstance(loaded.outcome, GraftworkError):
            return loaded.outcome
        adapter = prepare(loaded.outcome, self._widths, self._device, self._dtype)
        if adapter.num_bytes > self._budget_bytes:
            return ValidationFailed(
                f"Adapter {loaded.digest} needs {adapter.num_bytes} bytes; the pool has {self._budget_bytes}. "
                "Start the engine with a larger adapter pool."
            )
        self.num_loads += 1
        self._place(adapter)
        return None

    def close(self) -> None:
        """End the loading thread; a load under way is waited for."""
        self._loader.shutdown(wait=True, cancel_futures=True)

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(adapter.num_bytes for adapter in self._resident.values())
        assert self.num_bytes <= self._budget_bytes
        assert set(self._pins) <= set(self._resident)

    def _load(self, digest: str) -> None:
        outcome: AdapterWeights | GraftworkError
        try:
            outcome = self._source.load(digest)
        except GraftworkError as error:
            outcome = error
        except (OSError, ValueError, RuntimeError) as error:
            outcome = InternalFailure(f"Adapter {digest} could not be read: {error}")
        self._deliver(AdapterLoaded(digest, outcome))

    def _place(self, adapter: ResidentAdapter) -> bool:
        idle = [digest for digest in self._resident if digest not in self._pins]
        while self.num_bytes + adapter.num_bytes > self._budget_bytes and idle:
            self._evict(idle.pop(0))
        if self.num_bytes + adapter.num_bytes > self._budget_bytes:
            self._without_room[adapter.digest] = adapter
            return False
        self._without_room.pop(adapter.digest, None)
        self._resident[adapter.digest] = adapter
        self.num_bytes += adapter.num_bytes
        return True

    def _evict(self, digest: str) -> None:
        self.num_bytes -= self._resident.pop(digest).num_bytes
        self._to_forget.discard(digest)
