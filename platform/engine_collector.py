"""Exports an engine's figures to Prometheus as metrics.

Some metrics have a second name that inference gateways read, such as `vllm:…`. Keeps the figures that were read last
(the reading), and makes metrics from them when Prometheus asks. Counts nothing itself. The metadata of the reading's
fields defines the metrics (see platform/metrics.py), except for those of adapters, which this module defines: which are
loaded and where, and which are in use.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import Metric as MetricFamily
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from graftwork.platform.metrics import HasFields, Metric, MetricKind, samples

MAX_LOADED_LABELS = 1000
"""The most adapters of one level that have time series of their own. The counts have all."""
_COUNTED = {"gpu": "Adapters on the device.", "cpu": "Adapters in host memory."}


class EngineReading(HasFields, Protocol):
    """The figures of an engine at one moment: a dataclass.

    The metadata of each field defines its metric. Four properties have the digests of the adapters: those on the device
    (resident), those in host memory, and those of running and of waiting requests.
    """

    @property
    def resident_adapters(self) -> tuple[str, ...]: ...
    @property
    def host_adapters(self) -> tuple[str, ...]: ...
    @property
    def running_adapters(self) -> tuple[str, ...]: ...
    @property
    def waiting_adapters(self) -> tuple[str, ...]: ...


class EngineCollector(Collector):
    """Gives Prometheus the metrics of the engine's latest reading. There are no metrics before the first reading."""

    def __init__(self) -> None:
        self._reading: EngineReading | None = None
        self._read_at = 0.0

    def observe(self, reading: EngineReading, at: float) -> None:
        """Stores `reading` as the engine's latest figures. `at` is the time at which they were read, in unix seconds."""
        self._reading = reading
        self._read_at = at

    def collect(self) -> Iterator[MetricFamily]:
        if self._reading is not None:
            yield from _families(self._reading)
            yield _adapters(self._reading, self._read_at)
            yield from _loaded(self._reading)


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


def _loaded(reading: EngineReading) -> Iterator[MetricFamily]:
    """Yields the metrics that say which adapters are loaded, by the names that llm-d's router reads.

    `gpu` is the device, whatever it is, and `cpu` is host memory. An adapter may be at both.
    Source: vllm-project/vllm#54830.
    """
    levels = (("gpu", reading.resident_adapters), ("cpu", reading.host_adapters))
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded", "1 for each loaded adapter.", labels=["adapter_name", "level"]
    )
    for level, digests in levels:
        for digest in sorted(digests)[:MAX_LOADED_LABELS]:
            loaded.add_metric([digest, level], 1.0)
    yield loaded
    for level, digests in levels:
        name = f"vllm:num_{level}_loaded_lora_adapters"
        yield GaugeMetricFamily(name, _COUNTED[level], value=len(digests))


def _joined(names: Sequence[str]) -> str:
    return ",".join(sorted(names))
