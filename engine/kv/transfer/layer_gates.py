"""Loads that are read while they are still under way: attention in a layer waits for that layer's KV alone.

    copier    opens a gate, copies the layers from the first on, lets each group of them through
    loop      adds the gate when its pages may be planned with, and heeds it in the steps that read them
    attend    waits, in each layer, for the gates that are selected

On CUDA nothing waits but the stream: the gate hands the compute stream the event that the copy stream recorded.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from threading import Condition

StreamWait = Callable[[], None]
"""Makes the calling thread's stream wait for copies that were begun; does nothing where copies are made at once."""


class LoadFailed(Exception):
    """KV that a step was planned with did not arrive: the step cannot be computed."""


@dataclass(frozen=True, slots=True)
class _OpenLayers:
    """Layers below `end` may be read, once the stream has waited."""

    end: int
    wait: StreamWait


class LayerGate:
    """One load's layers. The copier's thread lets them through, in order; the loop's thread waits for them."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._opened: list[_OpenLayers] = []
        self._has_failed = False
        self._changed = Condition()

    def open_layers(self, end: int, wait: StreamWait) -> None:
        """Layers below `end` have been copied, or will have been once `wait` has returned."""
        with self._changed:
            assert self._end < end <= self._num_layers, "layers come in order"
            self._opened.append(_OpenLayers(end, wait))
            self._changed.notify_all()

    def fail(self) -> None:
        """What has not been let through never will be."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return once a layer may be read by what this thread does next. Raises LoadFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._end > layer or self._has_failed)
            opened = next((one for one in self._opened if one.end > layer), None)
        if opened is None:
            raise LoadFailed(f"layer {layer} of a load from the host did not arrive")
        opened.wait()

    @property
    def _end(self) -> int:
        return self._opened[-1].end if self._opened else 0


class LayerGates:
    """The gates of all loads under way, and which of them the step that runs has to heed. Used by the loop's thread."""

    def __init__(self) -> None:
        self._gates: dict[Hashable, LayerGate] = {}
        self._selected: tuple[LayerGate, ...] = ()

    def add(self, load: Hashable, gate: LayerGate) -> None:
        """A load is under way."""
        self._gates[load] = gate

    def remove(self, load: Hashable) -> None:
        """A load has ended: everything has arrived, or its pages are nobody's any more. No error if it had no gate."""
        self._gates.pop(load, None)

    def select(self, loads: Iterable[Hashable]) -> None:
        """The next step reads what these loads bring; what others bring is not waited for."""
        self._selected = tuple(self._gates[load] for load in loads if load in self._gates)

    def wait(self, layer: int) -> None:
        """Return once a layer of every load that is selected may be read. Raises LoadFailed."""
        for gate in self._selected:
            gate.wait(layer)
