"""Shows an engine's own figures to Prometheus, under Graftwork's names and those that inference gateways read.

Keeps the last reading, and turns it into metrics when Prometheus asks for them. Counts nothing. The fields of the
reading define which figures are shown and how (see platform/metrics.py). Only the metric of the adapters in use is
defined here.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import Metric as MetricFamily
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from graftwork.platform.metrics import HasFields, Metric, MetricKind, samples


class EngineReading(HasFields, Protocol):
    """An engine's figures: a dataclass whose metadata says how each field is shown, and the digests of the adapters in
    use.
    """

    @property
    def resident_adapters(self) -> tuple[str, ...]: ...
    @property
    def running_adapters(self) -> tuple[str, ...]: ...
    @property
    def waiting_adapters(self) -> tuple[str, ...]: ...


class EngineCollector(Collector):
    """Gives Prometheus the metrics of the engine's last reading; no metrics before the first reading."""

    def __init__(self) -> None:
        self._reading: EngineReading | None = None
        self._read_at = 0.0

    def observe(self, reading: EngineReading, at: float) -> None:
        """Replaces the reading. `at` is the time of the reading, in unix seconds."""
        self._reading = reading
        self._read_at = at

    def collect(self) -> Iterator[MetricFamily]:
        if self._reading is not None:
            yield from _families(self._reading)
            yield _adapters(self._reading, self._read_at)


def _families(reading: EngineReading) -> list[MetricFamily]:
    """Returns the metrics of a reading by name. Values with equal labels are added up."""
    values: dict[Metric, float] = {}
    for metric, value in samples(reading):
        values[metric] = values.get(metric, 0.0) + value
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric, value in values.items():
        family = families.setdefault(metric.name, _family(metric))
        family.add_metric([text for _, text in metric.labels], value)
    return list(families.values())


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=[name for name, _ in metric.labels])


def _adapters(reading: EngineReading, read_at: float) -> MetricFamily:
    """Returns the metric whose labels list the running and waiting adapters.

    Its value is the time of the reading, so that gateways can tell an old reading from a new one.
    """
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and waiting requests.", labels=labels)
    resident = str(len(reading.resident_adapters))
    adapters.add_metric([resident, _joined(reading.running_adapters), _joined(reading.waiting_adapters)], read_at)
    return adapters


def _joined(names: Sequence[str]) -> str:
    return ",".join(sorted(names))
