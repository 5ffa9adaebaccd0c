"""Describes copies of pages between tiers, and lets a step use a load before the load has ended.

    SAVE   device → host      STORE  host → disk
    LOAD   host → device      FETCH  disk → device

A TransferPlan is immutable and names all pages that it uses. The planner marks these pages as in flight before the copy
begins, so that they are not evicted during the copy. A CopyEngine runs plans on other threads. A TransferDone message
reports the end of a plan to the engine's loop.

While a page is loaded, a step may already use it: in each layer, attention waits only for that layer's KV. A gate
records which layers of one load may be read.

    copier     creates a gate, copies groups of layers from the first on, and opens each group after its copy
    loop       adds the gate when the pages become readable, and selects it for the steps that read the pages
    attention  waits in each layer for the selected gates; a CUDA graph waits for all their layers before it begins

LayerGates owns the gates of all running loads. On CUDA no thread waits for a copy: the compute stream waits for the
event that the copy stream recorded. Invariant: a layer is never read before its KV has arrived.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
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
    """A step cannot be computed, because it reads KV that a load could not copy to the device."""


@dataclass(frozen=True, slots=True)
class _OpenLayers:
    """Records that the layers below `end` may be read after `wait` was called."""

    end: int
    wait: StreamWait


class LayerGate:
    """Records which layers of one load of KV a step may read already. These layers are called open.

    The copier's thread opens the layers in order. The thread of the engine's loop waits for them.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._opened: list[_OpenLayers] = []
        self._has_failed = False
        self._changed = Condition()

    def open_layers(self, end: int, wait: StreamWait) -> None:
        """Opens all layers with an index below `end`: steps may read their KV from now on.

        A step calls `wait` before it reads such a layer. `wait` makes the step's stream wait until these layers are
        copied.
        """
        with self._changed:
            assert self._end < end <= self._num_layers, "layers come in order"
            self._opened.append(_OpenLayers(end, wait))
            self._changed.notify_all()

    def fail(self) -> None:
        """Records that the load has failed. Waiting for a layer that is not open now raises LoadFailed."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Waits until work that the calling thread starts after this call may read the KV of `layer`.

        On CUDA, the thread's stream waits for the end of the copy, not the thread. Raises LoadFailed if the load failed
        before it copied this layer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end > layer or self._has_failed)
            opened = next((one for one in self._opened if one.end > layer), None)
        if opened is None:
            raise LoadFailed(f"layer {layer} of a load from the host did not arrive")
        opened.wait()

    def wait_for_all(self) -> None:
        """Waits, as `wait` does, until the KV of all layers may be read."""
        self.wait(self._num_layers - 1)

    def check_integrity(self) -> None:
        """Checks that the layers were opened in order, and that no more layers were opened than exist."""
        ends = [opened.end for opened in self._opened]
        assert ends == sorted(set(ends)), "layers were opened out of order"
        assert self._end <= self._num_layers, "a layer was opened that does not exist"

    @property
    def _end(self) -> int:
        return self._opened[-1].end if self._opened else 0


class LayerGates:
    """Owns one gate for each running load. A gate records which layers of the load a step may read already.

    Selects the gates that the next step waits for. Only the thread of the engine's loop may use this class.
    """

    def __init__(self, places: Mapping[int, int] | None = None) -> None:
        """`places` has the part of a page that each of the model's layers reads; without it, part n is layer n's."""
        self._places = places or {}
        self._gates: dict[Hashable, LayerGate] = {}
        self._selected: tuple[LayerGate, ...] = ()
        self.selected_loads: tuple[Hashable, ...] = ()
        """The running loads that the next step waits for."""

    def add(self, load: Hashable, gate: LayerGate) -> None:
        """Adds the gate of a running load. A gate records which layers of the load a step may read already."""
        self._gates[load] = gate

    def remove(self, load: Hashable) -> None:
        """Removes the gate of a load that has ended. Does nothing if the load has no gate.

        A gate records which layers of a load a step may read already.
        """
        self._gates.pop(load, None)

    def select(self, loads: Iterable[Hashable]) -> None:
        """Chooses the loads that the next step waits for in each layer: those of `loads` that have a gate.

        A gate records which layers of a load a step may read already.
        """
        self.selected_loads = tuple(load for load in loads if load in self._gates)
        self._selected = tuple(self._gates[load] for load in self.selected_loads)

    def wait(self, layer: int) -> None:
        """Waits until the KV of `layer` may be read in all loads that `select` has chosen.

        Raises LoadFailed if one of these loads failed before it copied this layer.
        """
        for gate in self._selected:
            gate.wait(self._places.get(layer, layer))

    def wait_for_all(self) -> None:
        """Waits, as `wait` does, for all layers of the chosen loads."""
        for gate in self._selected:
            gate.wait_for_all()

    def check_integrity(self) -> None:
        """Checks the gate of every running load. A gate records which layers of the load a step may read already."""
        for gate in {*self._gates.values(), *self._selected}:
            gate.check_integrity()


class TransferKind(StrEnum):
    SAVE = "save"
    LOAD = "load"
    STORE = "store"
    FETCH = "fetch"

    @property
    def source(self) -> Tier:
        """The tier from which a transfer of this kind reads pages."""
        return {
            TransferKind.SAVE: Tier.DEVICE,
            TransferKind.LOAD: Tier.HOST,
            TransferKind.STORE: Tier.HOST,
            TransferKind.FETCH: Tier.DISK,
        }[self]


@dataclass(frozen=True, slots=True)
class PageMove:
    """The copy of one page from one tier to another, with its page numbers on both tiers.

    A page on disk has no number: `source` or `target` is then None, and `key` identifies the page.
    """

    key: PageKey
    source: PageId | None
    target: PageId | None


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Describes one transfer: consecutive pages of one prompt that are copied from one tier to another, first page
    first.
    """

    kind: TransferKind
    domain: Domain
    moves: tuple[PageMove, ...]
    nodes: tuple[Node, ...] = field(repr=False)
    """The node of each page, in the order of `moves`."""


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Reports to the engine's loop that a transfer has ended. From now on this transfer does not use its pages."""

    plan: TransferPlan
    num_good: int
    """The number of moves that succeeded, counted from the first. The pages of later moves were not copied."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReadable:
    """Reports to the engine's loop that a load has begun and that steps may already use its pages.

    `gate` makes a step wait, in each layer, until the KV of that layer is copied.
    """

    plan: TransferPlan
    gate: LayerGate


Report = Callable[[TransferDone | LoadReadable], None]
"""A callback that receives messages about transfers. It is called on the thread that runs the transfer."""


class CopyEngine(Protocol):
    """Copies pages between tiers. Plans of the same kind run in the order in which `begin` was called."""

    def begin(self, plan: TransferPlan) -> None:
        """Starts the transfer that `plan` describes and returns at once.

        Its end is reported exactly once with TransferDone, even if it fails. Before that, LoadReadable may be reported
        once.
        """
        ...

    def sweep(self) -> None:
        """Starts a cleanup of the disk, and returns at once.

        The cleanup removes each file if the disk store has forgotten all pages in this file. It happens after all
        writes to disk that are queued already.
        """
        ...

    def close(self) -> None:
        """Finishes all transfers that have begun, and stops the copy threads."""
        ...


def domain_digest(domain: Domain) -> bytes:
    """Returns 32 bytes that identify a domain (usually one tenant) in files. They do not reveal the domain's name."""
    return hashlib.sha256(domain).digest()
