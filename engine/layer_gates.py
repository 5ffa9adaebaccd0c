"""Loads that are read while they are still under way: attention in a layer waits for that layer's KV alone.

    copier    opens a gate, copies the layers from the first on, lets each group of them through
    loop      adds the gate when its pages may be planned with
    attend    waits, in each layer, for all gates

On CUDA nothing waits but the stream: the gate hands the compute stream the event that the copy stream recorded.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition

OnStream = Callable[[], None]
"""Makes the calling thread's stream wait for copies that were begun; does nothing where copies are made at once."""


class LoadFailed(Exception):
    """KV that a step was planned with did not arrive: the step cannot be computed."""


@dataclass(frozen=True, slots=True)
class _Passage:
    """Layers below `end` may be read, once the stream has waited."""

    end: int
    wait: OnStream


class LayerGate:
    """One load's layers. The copier's thread lets them through, in order; the loop's thread waits for them."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._passages: list[_Passage] = []
        self._has_failed = False
        self._changed = Condition()

    def let_through(self, end: int, wait: OnStream) -> None:
        """Layers below `end` have been copied, or will have been once `wait` has returned."""
        with self._changed:
            assert self._end < end <= self._num_layers, "layers come in order"
            self._passages.append(_Passage(end, wait))
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
            passage = next((one for one in self._passages if one.end > layer), None)
        if passage is None:
            raise LoadFailed(f"layer {layer} of a load from the host did not arrive")
        passage.wait()

    @property
    def _end(self) -> int:
        return self._passages[-1].end if self._passages else 0


class LayerGates:
    """All gates that steps have to heed, by whose they are. Used by the loop's thread alone."""

    def __init__(self) -> None:
        self._gates: dict[Hashable, LayerGate] = {}

    def __len__(self) -> int:
        return len(self._gates)

    def add(self, load: Hashable, gate: LayerGate) -> None:
        """From the next step on, layers wait for this load."""
        self._gates[load] = gate

    def remove(self, load: Hashable) -> None:
        """A load has ended: everything has arrived, or its pages are nobody's any more. No error if it had no gate."""
        self._gates.pop(load, None)

    def wait(self, layer: int) -> None:
        """Return once a layer of every load may be read. Raises LoadFailed."""
        for gate in self._gates.values():
            gate.wait(layer)
