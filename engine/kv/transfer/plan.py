"""Describes copies of pages between tiers, and lets a step use a load before the load has ended.

    SAVE   device → host      STORE  host → disk
    LOAD   host → device      FETCH  disk → device

A TransferPlan is immutable and names all pages that it uses. The planner marks them as in flight before the copy
begins, and evicts nothing while it makes a plan. A CopyEngine runs plans on other threads. A TransferDone message
reports the end of a plan to the loop.

While a page is loaded, a step may already use it: in each layer, attention waits only for that layer's KV. A gate is
the record of which layers of one load may be read.

    copier     creates a gate, copies groups of layers from the first on, and opens each group after its copy
    loop       adds the gate when the pages become readable, and selects it for the steps that read the pages
    attention  waits in each layer for the selected gates

LayerGates owns the gates of all running loads. On CUDA no thread waits for a copy: the compute stream waits for the
event that the copy stream recorded. Invariant: a layer is never read before its KV has arrived.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Condition
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.radix_tree import Domain, Node

StreamWait = Callable[[], None]
"""Makes the calling thread's stream wait for copies. Does nothing on a device whose copies are synchronous."""


class LoadFailed(Exception):
    """A load failed to copy KV that a step reads, so the step cannot be computed."""


@dataclass(frozen=True, slots=True)
class _OpenLayers:
    """Records that the layers below `end` may be read after `wait` was called."""

    end: int
    wait: StreamWait


class LayerGate:
    """Records which layers of one load may be read (are open).

    The copier's thread opens the layers in order. The loop's thread waits for them.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._opened: list[_OpenLayers] = []
        self._has_failed = False
        self._changed = Condition()

    def open_layers(self, end: int, wait: StreamWait) -> None:
        """Allows the layers below `end` to be read.

        `wait` makes the caller's stream wait until these layers are copied.
        """
        with self._changed:
            assert self._end < end <= self._num_layers, "layers come in order"
            self._opened.append(_OpenLayers(end, wait))
            self._changed.notify_all()

    def fail(self) -> None:
        """Makes every wait for a layer that is not open raise LoadFailed."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Waits until the layer may be read by work that the calling thread starts after this call.

        Raises LoadFailed if the load failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end > layer or self._has_failed)
            opened = next((one for one in self._opened if one.end > layer), None)
        if opened is None:
            raise LoadFailed(f"layer {layer} of a load from the host did not arrive")
        opened.wait()

    def check_integrity(self) -> None:
        """Checks that layers were opened in order."""
        ends = [opened.end for opened in self._opened]
        assert ends == sorted(set(ends)), "layers were opened out of order"
        assert self._end <= self._num_layers, "a layer was opened that does not exist"

    @property
    def _end(self) -> int:
        return self._opened[-1].end if self._opened else 0


class LayerGates:
    """Owns the gates of all running loads, and selects those that the present step waits for. Used only on the loop's
    thread.
    """

    def __init__(self) -> None:
        self._gates: dict[Hashable, LayerGate] = {}
        self._selected: tuple[LayerGate, ...] = ()

    def add(self, load: Hashable, gate: LayerGate) -> None:
        """Adds the gate of a load that has begun."""
        self._gates[load] = gate

    def remove(self, load: Hashable) -> None:
        """Removes the gate of a load that has ended. A load without a gate is not an error."""
        self._gates.pop(load, None)

    def select(self, loads: Iterable[Hashable]) -> None:
        """Chooses the loads that the next step waits for: those of `loads` that have a gate."""
        self._selected = tuple(self._gates[load] for load in loads if load in self._gates)

    def wait(self, layer: int) -> None:
        """Waits until a layer of every selected load may be read. Raises LoadFailed if one of these loads failed."""
        for gate in self._selected:
            gate.wait(layer)

    def check_integrity(self) -> None:
        """Checks all gates."""
        for gate in {*self._gates.values(), *self._selected}:
            gate.check_integrity()


class TransferKind(StrEnum):
    SAVE = "save"
    LOAD = "load"
    STORE = "store"
    FETCH = "fetch"

    @property
    def source(self) -> Tier:
        """The tier that is read."""
        return {
            TransferKind.SAVE: Tier.DEVICE,
            TransferKind.LOAD: Tier.HOST,
            TransferKind.STORE: Tier.HOST,
            TransferKind.FETCH: Tier.DISK,
        }[self]


@dataclass(frozen=True, slots=True)
class PageMove:
    """The copy of one page. A page on disk is named by its key, and its number is None."""

    key: PageKey
    source: PageId | None
    target: PageId | None


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Pages of one path that are copied together, first page first."""

    kind: TransferKind
    domain: Domain
    moves: tuple[PageMove, ...]
    nodes: tuple[Node, ...] = field(repr=False)
    """The node of each page, in the order of `moves`."""


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Reports that a plan has ended: no copy uses its pages any more."""

    plan: TransferPlan
    num_good: int
    """The number of moves that succeeded, counted from the first. The pages of later moves were not copied."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReadable:
    """Reports that a load has begun and steps may use its pages. The gate makes each layer wait for its KV."""

    plan: TransferPlan
    gate: LayerGate


Report = Callable[[TransferDone | LoadReadable], None]
"""A callback that receives messages about transfers. It is called on the thread that runs the transfer."""


class CopyEngine(Protocol):
    """Copies pages. Plans of the same kind run in the order in which they begin."""

    def begin(self, plan: TransferPlan) -> None:
        """Starts a plan and returns at once. The end of the plan is reported exactly once, even after a failure.

        Before that, a load may be reported once as readable.
        """
        ...

    def sweep(self) -> None:
        """Removes forgotten pages from the disk after all queued writes. Returns at once."""
        ...

    def close(self) -> None:
        """Finishes all plans that have begun, and stops the threads."""
        ...


def domain_digest(domain: Domain) -> bytes:
    """Returns the 32 bytes that stand for a domain in files. These bytes do not reveal the domain's name."""
    return hashlib.sha256(domain).digest()
