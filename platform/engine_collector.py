"""An engine's own figures, shown as metrics: under Graftwork's names and under those of inference gateways.

Keeps the last reading and turns it into samples when they are scraped; counts nothing itself.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class EngineReading(Protocol):
    """What is shown of an engine; `engine.request.EngineStats` is one."""

    @property
    def running_requests(self) -> int: ...
    @property
    def waiting_requests(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def cached_pages(self) -> int: ...
    @property
    def active_pages(self) -> int: ...
    @property
    def in_flight_pages(self) -> int: ...
    @property
    def host_free_pages(self) -> int: ...
    @property
    def host_cached_pages(self) -> int: ...
    @property
    def host_in_flight_pages(self) -> int: ...
    @property
    def disk_pages(self) -> int: ...
    @property
    def disk_corrupt_files(self) -> int: ...
    @property
    def disk_foreign_files(self) -> int: ...
    @property
    def disk_failures(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def resident_adapters(self) -> tuple[str, ...]: ...
    @property
    def lora_pool_bytes(self) -> int: ...
    @property
    def running_adapters(self) -> tuple[str, ...]: ...
    @property
    def waiting_adapters(self) -> tuple[str, ...]: ...
    @property
    def adapter_loads(self) -> int: ...
    @property
    def drafted_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def forced_tokens(self) -> int: ...


class EngineCollector(Collector):
    """The last reading of the engine, as metrics; none before the first."""

    def __init__(self) -> None:
        self._reading: EngineReading | None = None
        self._read_at = 0.0

    def observe(self, reading: EngineReading, at: float) -> None:
        """Replace what is shown. `at` is in unix seconds."""
        self._reading = reading
        self._read_at = at

    def collect(self) -> Iterator[Metric]:
        reading = self._reading
        if reading is None:
            return
        device = (reading.free_pages, reading.cached_pages, reading.active_pages, reading.in_flight_pages)
        used_ratio = _ratio(reading.active_pages, sum(device))
        for prefix, waiting, running, usage in (
            ("graftwork_", "waiting_requests", "running_requests", "kv_usage_ratio"),
            ("vllm:", "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"),
        ):
            yield GaugeMetricFamily(prefix + waiting, "Requests in the engine's queue.", reading.waiting_requests)
            yield GaugeMetricFamily(prefix + running, "Requests in the running batch.", reading.running_requests)
            yield GaugeMetricFamily(prefix + usage, "Share of KV pages in use, 0 to 1.", used_ratio)
        yield _pages(reading)
        yield GaugeMetricFamily("graftwork_lora_pool_bytes", "Adapter weights on the device.", reading.lora_pool_bytes)
        yield _disk_troubles(reading)
        yield CounterMetricFamily("graftwork_preemptions", "Requests offloaded to make room.", reading.preemptions)
        yield CounterMetricFamily("graftwork_adapter_loads", "Adapters loaded to the device.", reading.adapter_loads)
        yield _drafts(reading)
        yield _adapters(reading, self._read_at)


def _pages(reading: EngineReading) -> Metric:
    """KV pages by tier and state: what only the prefix tree holds is owned too."""
    pages = GaugeMetricFamily("graftwork_kv_pages", "KV pages by tier and state.", labels=["tier", "state"])
    pages.add_metric(["device", "free"], reading.free_pages)
    pages.add_metric(["device", "owned"], reading.cached_pages + reading.active_pages)
    pages.add_metric(["device", "in_flight"], reading.in_flight_pages)
    pages.add_metric(["host", "free"], reading.host_free_pages)
    pages.add_metric(["host", "owned"], reading.host_cached_pages)
    pages.add_metric(["host", "in_flight"], reading.host_in_flight_pages)
    pages.add_metric(["disk", "owned"], reading.disk_pages)
    return pages


def _drafts(reading: EngineReading) -> Metric:
    """What came of guessed tokens; each counts under one result, so that their sum is what was verified."""
    drafts = CounterMetricFamily("graftwork_draft_tokens", "Guessed tokens by what came of them.", labels=["result"])
    drafts.add_metric(["forced"], reading.forced_tokens)
    drafts.add_metric(["accepted"], reading.accepted_tokens - reading.forced_tokens)
    drafts.add_metric(["rejected"], reading.drafted_tokens - reading.accepted_tokens)
    return drafts


def _disk_troubles(reading: EngineReading) -> Metric:
    """What went wrong with KV on disk: each costs a recomputation and nothing else."""
    troubles = CounterMetricFamily("graftwork_kv_disk_troubles", "Troubles with KV files, by kind.", labels=["kind"])
    troubles.add_metric(["corrupt_file"], reading.disk_corrupt_files)
    troubles.add_metric(["foreign_file"], reading.disk_foreign_files)
    troubles.add_metric(["failed_operation"], reading.disk_failures)
    return troubles


def _adapters(reading: EngineReading, read_at: float) -> Metric:
    """Which adapters run and wait. The value is the time of the reading: that is how gateways tell old from new."""
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and waiting requests.", labels=labels)
    resident = str(len(reading.resident_adapters))
    adapters.add_metric([resident, _joined(reading.running_adapters), _joined(reading.waiting_adapters)], read_at)
    return adapters


def _joined(names: Sequence[str]) -> str:
    return ",".join(sorted(names))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
