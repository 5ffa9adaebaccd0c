"""Decides which adapters are in host memory and which are in device memory. No other part decides this.

An adapter is absent, loading, on the host, or resident (on the device). A request pins its adapters while it runs: a
pinned adapter is not evicted. Each load runs on a loading thread and tells the engine loop its result by a message. If
a load fails, only the requests that wait for this adapter fail.

The adapters of one request are a group. They are copied to the device together. Otherwise two requests could each have
one of their adapters on the device and wait for each other for ever. Free device memory goes to the group that has
waited longest.

If a group has waited for `patience_s` seconds, the pool makes room for it. It drains the adapter that was used least
recently: no new request may use this adapter, so it becomes idle and can be evicted. If KV pages fill the memory, no
new request may take the pages that the group needs.

Invariant: every wait ends. A waiting request holds no page and no pin. A running request never waits for an adapter and
always ends. So when nothing runs, all KV and all adapters can be evicted until the group fits. `absorb` and `refusal`
return errors for groups that could never fit.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.adapter_copies import AdapterCopied
from graftwork.engine.lora.device_pool import DeviceAdapterPool, PlacementResult
from graftwork.engine.lora.loader import AdapterLoaded, AdapterLoader, adapter_too_large
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.torch_backend import LoraRows
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InvalidRequest

_log = logging.getLogger(__name__)


Group = tuple[str, ...]
"""The digests of the adapters that one request needs together: one digest, or those of a mixture."""

_KEPT = 0.8
"""The part of the former estimate of a load's seconds that a new load leaves."""


@dataclass(frozen=True, slots=True)
class LoraPoolLimits:
    """The limits of a LoraPool. `host_bytes` is the host memory for adapters, in bytes.

    `patience_s` is a time in seconds. If the adapters of a request have waited longer for device memory, the pool makes
    room for them: no new request may use certain other adapters, so that they can be evicted.
    """

    host_bytes: int
    patience_s: float = 0.2


class ResidentAdapters(Protocol):
    """Gives the adapters that are on the device. LoraPool implements it."""

    def get(self, digest: str) -> ResidentAdapter:
        """Returns an adapter that is on the device and pinned. The result must be used only in this step."""
        ...


class LoraPool:
    """Decides which adapters are in host and device memory. Only the engine loop's thread calls it."""

    def __init__(self, loader: AdapterLoader, limits: LoraPoolLimits, device: DeviceAdapterPool, clock: Clock) -> None:
        self._loader = loader
        self._limits = limits
        self._device = device
        self._clock = clock
        self._host: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._claims: dict[Group, float] = {}
        """The groups that wait for device memory, with the time at which each began to wait, the oldest first."""
        self._kept: dict[str, None] = {}
        """Digests that must stay on the host, because the first requests in the queue need them."""
        self._typical_bytes = 0
        self._draining: set[str] = set()
        """Digests of adapters that take no new requests, so that they can be evicted. Some may be evicted already."""
        self._to_forget: set[str] = set()
        self._arrived: list[str] = []
        """Digests of adapters that were copied to the device, and become usable when no step uses the device."""
        self._placed: list[tuple[str, int]] = []
        """What `take_placed` returns next."""
        self.host_bytes = 0
        self.num_loads = 0
        self._wanted_at: dict[str, float] = {}
        """By digest of an adapter that is read from its file: when a request first needed it."""
        self.load_s: float | None = None
        """The usual seconds from the need for an adapter until it is on the host; None before the first load."""

    @property
    def resident_digests(self) -> tuple[str, ...]:
        return self._device.digests

    @property
    def host_digests(self) -> tuple[str, ...]:
        return tuple(self._host)

    @property
    def num_bytes(self) -> int:
        """The total size of the adapters on the device, in bytes."""
        return self._device.num_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies on the device that serve several adapters at a time."""
        return self._device.copied_bytes

    @property
    def rows(self) -> LoraRows:
        """The rows of all steps that had an adapter, by what applied it."""
        return self._device.rows

    # ---- asking -----------------------------------------------------------------------------------------------

    def want(self, groups: Sequence[Group], *, may_place: bool = True) -> bool:
        """Tells the pool which adapters the waiting requests need, in the order of the queue.

        Each group has the digests of the adapters of one request. The pool starts to load adapters that are missing. It
        copies to the device those adapters that are on the host and fit. Adapters whose copy has ended become usable.

        `may_place` is False while a step uses the device: then nothing is copied there, because a copy may move the
        pages and adapters that the step uses. In this case, returns whether there seems to be room for a copy, or a copy
        has ended. Else returns False.
        """
        if may_place:
            self._finish_copies()
        distinct = dict.fromkeys(groups)
        self._device.wanted = {digest for group in distinct for digest in group}
        self._claims = {group: since for group, since in self._claims.items() if group in distinct}
        self._kept = self._first_on_host(distinct)
        for digest in [one for one in self._wanted_at if one not in self._kept and one not in self._loader.loading]:
            del self._wanted_at[digest]  # its requests are gone
        for digest in self._kept:
            if digest not in self._host:
                self._loader.start(digest)
                self._wanted_at.setdefault(digest, self._clock.monotonic())
        for group in distinct:
            if self._is_claimed(group):
                self._claims.setdefault(group, self._clock.monotonic())
        return self._serve_claims(may_place=may_place) or bool(self._arrived)

    def take_placed(self) -> list[tuple[str, int]]:
        """Returns the digest and the bytes of each adapter that was placed on the device since the last call."""
        placed, self._placed = self._placed, []
        return placed

    def _finish_copies(self) -> None:
        for digest in self._arrived:
            self._device.finish_copy(digest)
            self._evict_if_forgotten(digest)
        self._arrived.clear()

    def _is_claimed(self, group: Group) -> bool:
        """Returns whether the group waits only for device memory: some of its adapters are on the host, the others on
        the device.
        """
        away = [digest for digest in group if digest not in self._device]
        return bool(away) and all(digest in self._host for digest in away)

    def is_ready(self, digest: str) -> bool:
        """Returns whether a new request may use this adapter now.

        It may if the whole adapter is on the device and is not about to be evicted.
        """
        return self._device.is_usable(digest) and digest not in self._draining and digest not in self._to_forget

    def refusal(self, uses: Sequence[AdapterUse]) -> GraftworkError | None:
        """Returns the error if a request can never use these adapters together. Else returns None.

        The adapters of a mixture (several adapters in one request) must fit on the device together. They must consist
        of low-rank factors only, because other changes have no weighted sum. Adapters that are not loaded yet are not
        checked.
        """
        if len(uses) == 1 and uses[0].weight == 1.0:
            return None
        known = [adapter for use in uses if (adapter := self._device.find(use.digest) or self._host.get(use.digest))]
        too_large = self._device.why_never(known)
        if too_large is not None:
            return InvalidRequest(
                f"The adapters of this mixture {too_large} Or mix fewer.", param="adapters", code="mixture_too_large"
            )
        whole = [adapter.digest for adapter in known if not adapter.is_low_rank]
        if not whole:
            return None
        return InvalidRequest(
            f"Adapter {whole[0]} cannot be mixed: it has DoRA, biases or embeddings, which have no weighted sum. "
            "Use it alone, with weight 1.",
            param="adapters",
            code="adapter_not_mixable",
        )

    def get(self, digest: str) -> ResidentAdapter:
        """Returns an adapter that is on the device. The caller must have pinned it.

        The result must be used only in this step.
        """
        assert self._device.is_pinned(digest), f"{digest} is used without a pin"
        adapter = self._device.find(digest)
        assert adapter is not None, f"{digest} is pinned and not on the device"
        return adapter

    def pin(self, digest: str) -> None:
        """Adds one pin to an adapter on the device, so that it is not evicted, and marks it as just used."""
        self._device.pin(digest)

    def unpin(self, digest: str) -> None:
        self._device.unpin(digest)
        self._evict_if_forgotten(digest)

    def take_loaded_bytes(self, digest: str) -> int:
        """Returns the adapter's bytes if it was loaded to the device since the last call for it, else 0."""
        return self._device.take_loaded_bytes(digest)

    def _evict_if_forgotten(self, digest: str) -> None:
        if digest in self._to_forget and not self._device.is_pinned(digest):
            self._evict(digest)

    def probe(self, digest: str, answer: Callable[[GraftworkError | None], None]) -> None:
        """Tests that the engine computes an adapter's deltas correctly, and that the adapter fits on the device.

        The test runs on a loading thread and does not disturb running requests. It calls `answer` with the error, or
        with None if all is well.
        """
        self._loader.probe(digest, self._device.why_never, answer)

    def forget(self, digest: str) -> None:
        """Drops an adapter from host and device memory.

        If running requests use the adapter, it stays on the device until the last of them ends.
        """
        self._drop_from_host(digest)
        self._claims = {group: since for group, since in self._claims.items() if digest not in group}
        if self._device.is_pinned(digest):
            self._to_forget.add(digest)
        elif digest in self._device:
            self._evict(digest)

    def absorb(self, loaded: AdapterLoaded) -> GraftworkError | None:
        """Stores a loaded adapter on the host.

        Returns an error if the load failed, or if the adapter can never fit on the device. The caller must then fail
        all requests that wait for this adapter. Else returns None.
        """
        self._loader.loading.discard(loaded.digest)
        wanted_at = self._wanted_at.pop(loaded.digest, None)
        if isinstance(loaded.outcome, GraftworkError):
            return loaded.outcome
        adapter = loaded.outcome
        too_large = self._device.why_never([adapter])
        if too_large is not None:
            return adapter_too_large(f"The weights of adapter {loaded.digest} {too_large}")
        self.num_loads += 1
        if wanted_at is not None:
            self._note_load(self._clock.monotonic() - wanted_at)
        self._keep_on_host(adapter)
        return None

    def _note_load(self, seconds: float) -> None:
        self.load_s = seconds if self.load_s is None else _KEPT * self.load_s + (1 - _KEPT) * seconds

    def absorb_copy(self, copied: AdapterCopied) -> GraftworkError | None:
        """Processes the end of a copy to the device. The adapter becomes usable with the next call of `want`.

        Returns an error if the copy failed. The caller must then fail all requests that wait for this adapter.
        """
        if copied.failure is None:
            self._arrived.append(copied.digest)
        else:
            self._device.fail_copy(copied.digest)
            self._to_forget.discard(copied.digest)
        return copied.failure

    def close(self) -> None:
        """Waits until the running loads and copies have ended, and ends their threads."""
        self._loader.close()
        self._device.close()

    def check_integrity(self) -> None:
        self._device.check_integrity()
        assert self.host_bytes == sum(adapter.host_bytes for adapter in self._host.values())
        assert all(self._device.is_pinned(digest) for digest in self._to_forget)

    # ---- the host ---------------------------------------------------------------------------------------------

    def _first_on_host(self, groups: Iterable[Group]) -> dict[str, None]:
        """Returns the digests that the first requests in the queue need on the host, as many as fit.

        The adapters of the first request are always among them.
        """
        kept: dict[str, None] = {}
        num_bytes = 0
        for group in groups:
            if kept and num_bytes >= self._limits.host_bytes:
                break
            for digest in group:
                if digest not in self._device and digest not in kept:
                    kept[digest] = None
                    num_bytes += self._host[digest].host_bytes if digest in self._host else self._typical_bytes
        return kept

    def _keep_on_host(self, adapter: ResidentAdapter) -> None:
        """Keeps an adapter on the host. To make room, drops others, the least recently loaded or placed first.

        Never drops the adapters that the first requests in the queue need.
        """
        self._drop_from_host(adapter.digest)
        self._typical_bytes = adapter.host_bytes
        idle = [digest for digest in self._host if digest not in self._kept]
        while idle and self.host_bytes + adapter.host_bytes > self._limits.host_bytes:
            self._drop_from_host(idle.pop(0))
        self._host[adapter.digest] = adapter
        self.host_bytes += adapter.host_bytes

    def _drop_from_host(self, digest: str) -> None:
        adapter = self._host.pop(digest, None)
        self.host_bytes -= adapter.host_bytes if adapter is not None else 0

    # ---- the device -------------------------------------------------------------------------------------------

    def _serve_claims(self, *, may_place: bool) -> bool:
        """Places waiting groups in order. Stops at the first group that does not fit, so that no group overtakes it.

        If `may_place` is False, stops at the first group that seems to fit, and returns True.
        """
        self._finish_draining()
        self._device.claimed_pages = 0
        now = self._clock.monotonic()
        for group, since in list(self._claims.items()):
            if not self._is_claimed(group):
                continue  # one of its adapters left the host and is loading again
            out_of_patience = now - since >= self._limits.patience_s
            away = [self._host[digest] for digest in group if digest not in self._device]
            spared = set(group) if out_of_patience else self._device.wanted
            placing = self._device.place(away, spared) if may_place else self._device.room_for(away, spared)
            if placing is not PlacementResult.DONE:
                if out_of_patience:
                    self._hold_up(placing, away, set(group))
                return False
            if not may_place:
                return True
            del self._claims[group]
            for adapter in away:
                self._placed.append((adapter.digest, adapter.num_bytes))
                self._host.move_to_end(adapter.digest)
        return False

    def _hold_up(self, placing: PlacementResult, away: Sequence[ResidentAdapter], spared: set[str]) -> None:
        """Holds new requests back, because a group of adapters waited longer than `patience_s` for device memory."""
        self._draining -= spared
        if placing is PlacementResult.SHARE_IN_USE:
            self._draining |= self._device.to_drain(away, self._draining, spared)
        else:
            self._device.claimed_pages = self._device.frames_for(away)

    def _finish_draining(self) -> None:
        """Evicts drained adapters that are idle.

        When no group waits, the other drained adapters take requests again.
        """
        self._draining.intersection_update(self._device.digests)
        if not self._claims:
            self._draining.clear()
        for digest in [digest for digest in self._draining if not self._device.is_pinned(digest)]:
            self._evict(digest)

    def _evict(self, digest: str) -> None:
        self._device.evict(digest)
        self._to_forget.discard(digest)
        self._draining.discard(digest)
