"""Adapter weights on the host and on the device.

LoraPool alone places adapters. A digest is absent, being loaded, on the host, or resident on the device; a batch pins
what it uses. Loads run on threads of their own, one for each digest however many requests wait for it, and come back
to the loop as events; a load that fails is the failure of the requests that wait for it, never of the loop.

Room on the device goes to whoever has waited longest for it; what one request needs is placed at once, or two that
each hold a part of what they need would wait for each other. Idle adapters and idle KV make way, in one order (see
DeviceAdapterPool). Where all is in use, a flood of requests could keep a cold adapter out for ever. So after `patience_s`
the adapter that was pinned longest ago is drained, which means that it takes no new requests until those that run have
ended, if it is adapters that are in the way; and if it is KV, nobody is let in at the cost of the frames that are
waited for.

Such a wait always ends. Who waits holds nothing that others wait for: no page, and no pin. What runs never waits for an
adapter, and gets to its end (see Scheduler), after which its pages and adapters are idle. Whenever somebody new is let
in, idle KV that may go is enough for what is waited for; else nobody is, and when nothing runs, idle KV and idle
adapters give way until all that adapters may have is free, which `absorb` and `refusal` see to being enough. Copies
that stand in the way end by themselves.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.device_pool import DeviceAdapterPool, PlacementResult
from graftwork.engine.lora.loader import AdapterLoaded, AdapterLoader
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InvalidRequest, ValidationFailed

_log = logging.getLogger(__name__)


Group = tuple[str, ...]
"""The digests that one request needs together: one, or those of a mixture."""


@dataclass(frozen=True, slots=True)
class LoraPoolLimits:
    """`patience_s` is how long an adapter waits for room on the device before others are held up for it."""

    host_bytes: int
    patience_s: float = 0.2


class LoraPool:
    """Adapters by digest. All methods are called by the loop's thread."""

    def __init__(self, loader: AdapterLoader, limits: LoraPoolLimits, device: DeviceAdapterPool, clock: Clock) -> None:
        self._loader = loader
        self._limits = limits
        self._device = device
        self._clock = clock
        self._host: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._claims: dict[Group, float] = {}
        """Since when each group that has been loaded waits for room, the oldest first."""
        self._kept: dict[str, None] = {}
        """What must stay on the host."""
        self._typical_bytes = 0
        self._draining: set[str] = set()
        """Take no new requests; some may have given way to KV since."""
        self._to_forget: set[str] = set()
        self.host_bytes = 0
        self.num_loads = 0

    @property
    def resident_digests(self) -> tuple[str, ...]:
        return self._device.digests

    @property
    def num_bytes(self) -> int:
        """Of the adapters on the device."""
        return self._device.num_bytes

    # ---- asking -----------------------------------------------------------------------------------------------

    def want(self, groups: Sequence[Group]) -> None:
        """What each waiting request needs, in their order: begin loads, and place what there is room for."""
        distinct = dict.fromkeys(groups)
        self._device.wanted = {digest for group in distinct for digest in group}
        self._claims = {group: since for group, since in self._claims.items() if group in distinct}
        self._kept = self._first_on_host(distinct)
        for digest in self._kept:
            if digest not in self._host:
                self._loader.start(digest)
        for group in distinct:
            if self._is_claimed(group):
                self._claims.setdefault(group, self._clock.monotonic())
        self._serve_claims()

    def _is_claimed(self, group: Group) -> bool:
        """Whether nothing but room on the device is missing."""
        away = [digest for digest in group if digest not in self._device]
        return bool(away) and all(digest in self._host for digest in away)

    def is_ready(self, digest: str) -> bool:
        """Whether a request may start with this adapter now."""
        return digest in self._device and digest not in self._draining and digest not in self._to_forget

    def refusal(self, uses: Sequence[AdapterUse]) -> GraftworkError | None:
        """Why adapters cannot serve one request together, as far as they are known by now.

        Only low-rank factors have a weighted sum; and what does not fit the device at once would be waited for in vain.
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
        """A resident adapter, for a batch that has pinned it; good for this step."""
        assert self._device.is_pinned(digest), f"{digest} is used without a pin"
        adapter = self._device.find(digest)
        assert adapter is not None, f"{digest} is pinned and not on the device"
        return adapter

    def pin(self, digest: str) -> None:
        """Keep a resident adapter on the device, and mark it used."""
        self._device.pin(digest)

    def unpin(self, digest: str) -> None:
        self._device.unpin(digest)
        if digest in self._to_forget and not self._device.is_pinned(digest):
            self._evict(digest)

    def probe(self, digest: str, answer: Callable[[GraftworkError | None], None]) -> None:
        """Prove off the loop that an adapter is applied exactly; nothing that is served is disturbed."""
        self._loader.probe(digest, answer)

    def forget(self, digest: str) -> None:
        """Free an adapter now, or as soon as nobody uses it."""
        self._drop_from_host(digest)
        self._claims = {group: since for group, since in self._claims.items() if digest not in group}
        if self._device.is_pinned(digest):
            self._to_forget.add(digest)
        elif digest in self._device:
            self._evict(digest)

    def absorb(self, loaded: AdapterLoaded) -> GraftworkError | None:
        """Take the end of a load in; returns the error that the waiting requests must be told."""
        self._loader.loading.discard(loaded.digest)
        if isinstance(loaded.outcome, GraftworkError):
            return loaded.outcome
        adapter = loaded.outcome
        too_large = self._device.why_never([adapter])
        if too_large is not None:
            return ValidationFailed(f"The weights of adapter {loaded.digest} {too_large}")
        self.num_loads += 1
        self._keep_on_host(adapter)
        return None

    def close(self) -> None:
        """End the loading threads."""
        self._loader.close()

    def check_integrity(self) -> None:
        self._device.check_integrity()
        assert self.host_bytes == sum(adapter.num_bytes for adapter in self._host.values())
        assert all(self._device.is_pinned(digest) for digest in self._to_forget)

    # ---- the host ---------------------------------------------------------------------------------------------

    def _first_on_host(self, groups: Iterable[Group]) -> dict[str, None]:
        """What the first requests in the queue need there, as much as the host holds, and always the first one's."""
        kept: dict[str, None] = {}
        num_bytes = 0
        for group in groups:
            if kept and num_bytes >= self._limits.host_bytes:
                break
            for digest in group:
                if digest not in self._device and digest not in kept:
                    kept[digest] = None
                    num_bytes += self._host[digest].num_bytes if digest in self._host else self._typical_bytes
        return kept

    def _keep_on_host(self, adapter: ResidentAdapter) -> None:
        """Least recently loaded or placed goes first; what the head of the queue needs does not go."""
        self._drop_from_host(adapter.digest)
        self._typical_bytes = adapter.num_bytes
        idle = [digest for digest in self._host if digest not in self._kept]
        while idle and self.host_bytes + adapter.num_bytes > self._limits.host_bytes:
            self._drop_from_host(idle.pop(0))
        self._host[adapter.digest] = adapter
        self.host_bytes += adapter.num_bytes

    def _drop_from_host(self, digest: str) -> None:
        adapter = self._host.pop(digest, None)
        self.host_bytes -= adapter.num_bytes if adapter is not None else 0

    # ---- the device -------------------------------------------------------------------------------------------

    def _serve_claims(self) -> None:
        """In the order of waiting; the first that finds no room holds the others back, so that it is not overtaken."""
        self._finish_draining()
        self._device.claimed_pages = 0
        now = self._clock.monotonic()
        for group, since in list(self._claims.items()):
            if not self._is_claimed(group):
                continue  # a part of it was pushed out of the host, and is being loaded again
            out_of_patience = now - since >= self._limits.patience_s
            away = [self._host[digest] for digest in group if digest not in self._device]
            placing = self._device.place(away, set(group) if out_of_patience else self._device.wanted)
            if placing is not PlacementResult.DONE:
                if out_of_patience:
                    self._hold_up(placing, away, set(group))
                return
            del self._claims[group]
            for adapter in away:
                self._host.move_to_end(adapter.digest)

    def _hold_up(self, placing: PlacementResult, away: Sequence[ResidentAdapter], spared: set[str]) -> None:
        """Keep new requests from using what a group has waited for too long."""
        self._draining -= spared
        if placing is PlacementResult.SHARE_IN_USE:
            self._draining |= self._device.to_drain(away, self._draining, spared)
        else:
            self._device.claimed_pages = self._device.frames_for(away)

    def _finish_draining(self) -> None:
        """Evict what has run out; when nobody waits for room any more, take the rest back into service."""
        self._draining.intersection_update(self._device.digests)
        if not self._claims:
            self._draining.clear()
        for digest in [digest for digest in self._draining if not self._device.is_pinned(digest)]:
            self._evict(digest)

    def _evict(self, digest: str) -> None:
        self._device.evict(digest)
        self._to_forget.discard(digest)
        self._draining.discard(digest)
