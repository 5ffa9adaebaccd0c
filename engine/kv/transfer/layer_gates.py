"""Lets a step use a load before the load has ended: in each layer, attention waits only for that layer's KV.

    copier     creates a gate, copies groups of layers from the first on, and opens each group after its copy
    loop       adds the gate when the pages become readable, and selects it for the steps that read the pages
    attention  waits in each layer for the selected gates

LayerGates owns the gates of all running loads. On CUDA no thread waits for a copy: the compute stream waits for the
event that the copy stream recorded. Invariant: a layer is never read before its KV has arrived.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Condition

StreamWait = Callable[[], None]
"""Makes the calling thread's stream wait for copies. Does nothing on a device whose copies are synchronous."""


class LoadFailed(Exception):
    """A load failed to copy KV that a step reads, so the step cannot be computed."""


@dataclass(frozen=True, slots=True)
class _OpenLayers:
    """Layers below `end` are open. They may be read after `wait` was called."""

    end: int
    wait: StreamWait


class LayerGate:
    """The layers of one load. The copier's thread opens them in order; the loop's thread waits for them."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._opened: list[_OpenLayers] = []
        self._has_failed = False
        self._changed = Condition()

    def open_layers(self, end: int, wait: StreamWait) -> None:
        """Allows layers below `end` to be read. `wait` makes a stream wait for their copies."""
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
        """Waits until later work of the calling thread may read a layer. Raises LoadFailed."""
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
    """The gates of all running loads, and the gates that the present step waits for. Only the loop's thread uses it."""

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
        """Makes the next step wait for exactly these loads."""
        self._selected = tuple(self._gates[load] for load in loads if load in self._gates)

    def wait(self, layer: int) -> None:
        """Waits until a layer of every selected load may be read. Raises LoadFailed."""
        for gate in self._selected:
            gate.wait(layer)

    def check_integrity(self) -> None:
        """Checks all gates."""
        for gate in {*self._gates.values(), *self._selected}:
            gate.check_integrity()
