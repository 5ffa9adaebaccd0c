"""Exports the figures of each engine of a fleet to Prometheus.

Keeps the figures that were read last. The labels are the ids of engines: at most `MAX_REPLICA_LABELS` of them, and the
figures of all others are added up under the label `other`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric as MetricFamily
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

MAX_REPLICA_LABELS = 100
"""A fleet has fewer engines; more ids are those of engines that came and went."""
OTHER = "other"


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What one gateway knows of one engine."""

    replica_id: str
    is_ready: bool = False
    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    free_pages: int = 0
    slowness: float = 1.0
    first_token_s: float = 0.0
    """The expected time to the first token of a short request that is sent to the engine now."""
    requests: int = 0
    """Requests that this gateway has sent there."""
    hand_overs: int = 0
    """Requests that have left the engine for another, because it was lost, silent or draining."""
    hedges: int = 0
    """First tokens that this engine was asked for because another was late."""


_GAUGES = {
    "is_ready": ("replica_ready", "1 if the engine gets new requests, else 0."),
    "running_requests": ("replica_running_requests", "Requests in the engine's batch."),
    "waiting_requests": ("replica_waiting_requests", "Requests in the engine's queue."),
    "queued_tokens": ("replica_queued_tokens", "Prompt tokens that the engine must still compute."),
    "free_pages": ("replica_free_pages", "Device pages that no running request holds."),
    "slowness": ("replica_slowness", "How many times slower than its peers the engine works."),
    "first_token_s": (
        "replica_first_token_seconds",
        "The expected time to the first token of a short request that is sent to the engine now.",
    ),
}
_COUNTERS = {
    "requests": ("replica_requests", "Requests that this gateway has sent to the engine."),
    "hand_overs": ("replica_hand_overs", "Requests that have left the engine for another one."),
    "hedges": ("replica_hedges", "First tokens that the engine was asked for because another engine was late."),
}


class ReplicaCollector(Collector):
    """Gives Prometheus the figures of all engines. Nothing without a fleet."""

    def __init__(self) -> None:
        self._figures: Sequence[ReplicaFigures] = ()

    def observe(self, figures: Sequence[ReplicaFigures]) -> None:
        """Stores the latest figures. Engines whose ids come first in the alphabet have labels of their own."""
        self._figures = sorted(figures, key=lambda one: one.replica_id)

    def collect(self) -> Iterator[MetricFamily]:
        if not self._figures:
            return
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"graftwork_{name}", text, labels=["replica"])
            for label, value in self._by_label(field).items():
                gauge.add_metric([label], value)
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"graftwork_{name}", text, labels=["replica"])
            for label, value in self._by_label(field).items():
                counter.add_metric([label], value)
            yield counter

    def _by_label(self, field: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for place, figures in enumerate(self._figures):
            label = figures.replica_id if place < MAX_REPLICA_LABELS else OTHER
            values[label] = values.get(label, 0.0) + float(getattr(figures, field))
        return values
