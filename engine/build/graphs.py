"""Captures the CUDA graphs of an engine, and measures the device memory that they take.

The warm-up captures a few graphs while the device has little but the weights, so that KV leaves enough memory for all of
them. The engine captures all of them once it has its KV memory.

Invariant: an engine serves with graphs or without them. A capture that fails is a warning, and never ends the engine.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from graftwork.engine.build.devices import DeviceMeter
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kernels.step_inputs import PinnedMemory
from graftwork.engine.kv.index.page_windows import PageWindows
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import InvalidRequest

if TYPE_CHECKING:
    from graftwork.engine.runner.packed_forward import PackedParts
    from graftwork.engine.runner.step_graphs import GraphLimits, GraphRecorder, StepGraphs

_log = logging.getLogger(__name__)

_GRAPH_CHOICES = ("auto", "windows", "off")

_MOST_MIXED_ROWS = 1024
"""The most rows of a mixed step that a graph serves. Larger steps keep the device busy for as long as the host takes to
launch them.
"""

_MEASURED_GRAPHS = 9
"""How many graphs the warm-up captures. The driver gives memory in pieces of 2 MiB, so their mean counts."""


def wants_cuda_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether an engine on this device captures CUDA graphs, if all its kernels work.

    Raises InvalidRequest if `cuda_graphs` is unknown.
    """
    if config.cuda_graphs not in _GRAPH_CHOICES:
        raise InvalidRequest(
            f"cuda_graphs {config.cuda_graphs!r} is not known: choose one of {', '.join(_GRAPH_CHOICES)}.",
            param="cuda_graphs",
        )
    return config.cuda_graphs != "off" and device.type == "cuda" and config.tensor_parallel == 1


def cuda_recorder(device: torch.device) -> "Callable[[], GraphRecorder]":
    """Returns a function that returns a recorder of CUDA graphs on `device`, whose graphs share one pool of memory."""

    def recorder() -> "GraphRecorder":
        from graftwork.engine.runner.step_graphs import CudaGraphs

        return CudaGraphs(device)

    return recorder


@dataclass(frozen=True, slots=True)
class GraphBuild:
    """What the graphs of an engine are captured from. Needs triton."""

    parts: "PackedParts"
    gates: LayerGates
    limits: SchedulerLimits
    windows: PageWindows | None = None
    """What the windowed layer groups keep; None if the model has one group."""
    serves_rolling: bool = False
    """Whether steps with rolling windows have graphs too, where the engine serves such windows."""

    def capture(self, recorder: "Callable[[], GraphRecorder]", meter: DeviceMeter) -> "StepGraphs | None":
        """Captures all graphs. No page of the KV memory may be in use.

        If that fails, also for lack of memory, logs a warning with the reason, gives the memory back and returns None.
        """
        graphs, reason = None, None
        free = meter.free_bytes()
        try:
            with self._on_device():
                graphs = self._graphs()
                graphs.capture(recorder())
        except Exception as error:  # noqa: BLE001 - drivers and libraries each fail in a way of their own
            loss = "each decoding step launches its kernels one by one"
            _log.warning("cuda_graphs_unavailable", exc_info=error, extra={"device": str(meter.device), "loss": loss})
            reason, graphs = type(error).__name__, None
        taken = free - meter.free_bytes()  # outside of the handler, whose traceback keeps the tensors of the capture
        if reason is None:
            num_graphs = sum(1 for _ in self._limits.keys)
            _log.info("cuda_graphs", extra={"device": str(meter.device), "graphs": num_graphs, "bytes": taken})
        return graphs

    def measure(self, recorder: "Callable[[], GraphRecorder]", meter: DeviceMeter) -> int:
        """Captures a few graphs of the largest steps, and returns the bytes of device memory that all graphs will take.

        The first graph has the memory that all share; the others tell what one more takes. Each is captured twice: the
        first time loads its kernels, whose memory stays taken. If a capture fails, logs a warning and returns 0.
        """
        keys = list(self._limits.keys)
        some = list(islice(keys, _MEASURED_GRAPHS))
        try:
            with self._on_device():
                self._graphs().capture(recorder(), some)
                free = [meter.free_bytes()]
                graphs, one = self._graphs(), recorder()
                for captured in (some[:1], some[1:]):
                    graphs.capture(one, captured)
                    free.append(meter.free_bytes())
        except Exception as error:  # noqa: BLE001 - drivers and libraries each fail in a way of their own
            _log.warning("cuda_graphs_unmeasured", exc_info=error, extra={"device": str(meter.device)})
            return 0
        first, others = free[0] - free[1], free[1] - free[2]
        return max(first, 0) + max(-(-others * (len(keys) - 1) // (len(some) - 1)), 0)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the device of the engine the current one. On a CPU nothing changes."""
        return torch.cuda.device_of(self.parts.decoder.weights.embedding)  # type: ignore[no-untyped-call]

    @property
    def _limits(self) -> "GraphLimits":
        from graftwork.engine.runner.graph_keys import GraphKeys
        from graftwork.engine.runner.step_graphs import GraphLimits

        keys = GraphKeys(
            self.limits.max_running,
            self.parts.lora.max_rank,
            self.parts.builder.rules.min_rows,
            max_mixed_rows=min(self.limits.max_batch_tokens, _MOST_MIXED_ROWS),
            serves_rolling=self.serves_rolling and self.limits.why_no_windows is None,
        )
        limits = GraphLimits(keys, self.limits.context_tokens, self.limits.page_tokens)
        if self.windows is None:
            return limits
        pages = self.windows.most_pages(self.limits.context_tokens)
        return replace(limits, num_groups=1 + self.windows.num_groups, window_pages=pages)

    def _graphs(self) -> "StepGraphs":
        from graftwork.engine.runner.step_graphs import StepGraphs

        return StepGraphs(self.parts, self.gates, PinnedMemory(self.parts.builder.device), self._limits)
