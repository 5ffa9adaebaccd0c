"""Lets a step read a load before the load has ended: attention waits in each layer for that layer's KV only.

    copier     creates a gate, copies groups of layers from the first on, and opens each group when it is copied
    loop       adds the gate when the pages become readable, and selects it for the steps that read them
    attention  waits in each layer for the selected gates

LayerGates owns the gates of all running loads. On CUDA no thread waits for a copy: the gate gives the compute stream
the event that the copy stream recorded. Invariant: a layer is never read before its KV has arrived.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Condition

StreamWait = Callable[[], None]
"""Makes the calling thread's stream wait for copies. Does nothing where copies are done at once."""


class LoadFailed(Exception):
    """KV that a step should read did not arrive, so the step cannot be computed."""


@dataclass(frozen=True, slots=True)
class _OpenLayers:
    """Layers below `end` may be read after `wait` was called."""

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
        """Makes all waits for closed layers raise LoadFailed."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Returns when this thread's next work may read a layer. Raises LoadFailed."""
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
        """Makes the next step wait for these loads and for no others."""
        self._selected = tuple(self._gates[load] for load in loads if load in self._gates)

    def wait(self, layer: int) -> None:
        """Returns when a layer of every selected load may be read. Raises LoadFailed."""
        for gate in self._selected:
            gate.wait(layer)

    def check_integrity(self) -> None:
        """Checks all gates."""
        for gate in {*self._gates.values(), *self._selected}:
            gate.check_integrity()
