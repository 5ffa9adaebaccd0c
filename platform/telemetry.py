"""Counts what an operator sees of a process: its metrics.

Owns the names, labels and buckets of the gateway's metrics, and a fast histogram for values that come thousands of times a
second. Never sees a prompt. The log is in `tracing/logs.py`.
Invariant: metrics show at most `MAX_TENANT_LABELS` tenants by their ids. All other tenants are counted together under
the label `other`.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from graftwork.platform.clock import SystemClock
from graftwork.platform.engine_collector import EngineCollector, EngineReading
from graftwork.platform.ids import TenantId
from graftwork.platform.objectives import ObjectiveMeter
from graftwork.platform.replica_collector import ReplicaCollector

__all__ = ["EngineReading", "Telemetry"]


class LocalHistogram(Collector):
    """A histogram without labels, which records a value in a quarter of the time of prometheus_client's `Histogram`.

    It shows the same metrics as that class. It has no lock, so only one thread may record values. Another thread may
    read the metrics at the same time.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """`bounds` are the upper ends of the buckets, ascending. A last bucket without an upper end is added."""
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created_at = time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[Metric]:
        ends = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created_at)
        yield family


class ObjectiveCollector(Collector):
    """Gives Prometheus the burn rates and the error budgets of all objectives. Nothing without objectives."""

    def __init__(self, meter: ObjectiveMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        burn = GaugeMetricFamily(
            "graftwork_objective_burn_rate",
            "Share of requests outside an objective, divided by the share that may be.",
            labels=["tier", "objective", "window"],
        )
        budget = GaugeMetricFamily(
            "graftwork_objective_budget_left",
            "Part of the last day's error budget that is left.",
            labels=["tier", "objective"],
        )
        for tier, kind, burn_rates, budget_left in self._meter.readings():
            budget.add_metric([tier, kind], budget_left)
            for window, rate in burn_rates.items():
                burn.add_metric([tier, kind, window], rate)
        yield from (family for family in (burn, budget) if family.samples)


MAX_TENANT_LABELS = 1000


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class Telemetry:
    """All metrics of one process."""

    def __init__(self, objectives: ObjectiveMeter | None = None) -> None:
        """`objectives` are the service tiers' objectives; None promises nothing."""
        self.registry = CollectorRegistry()
        self.objectives = objectives or ObjectiveMeter({}, SystemClock())
        self.registry.register(ObjectiveCollector(self.objectives))
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.queue = self._histogram("queue_seconds", "From arrival to admission by the engine.")
        self.e2e = self._histogram("e2e_seconds", "From arrival to the last token.")
        self.inter_token = LocalHistogram(
            "graftwork_inter_token_seconds", "Between two tokens of a stream.", _STEP_SECONDS, self.registry
        )
        self._requests = self._counter("requests", "Requests by how they ended.", "tenant", "outcome")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens by where they came from.", "tenant", "tier")
        self._generated_tokens = self._counter("generated_tokens", "Tokens made.", "tenant")
        self._sessions = Gauge("graftwork_sessions", "Sessions by status.", ["status"], registry=self.registry)
        self._batches = self._counter("batches", "Batches by how they ended.", "status")
        self._batch_requests = self._counter(
            "batch_requests", "Requests of batches by how they were answered.", "tenant", "outcome"
        )
        self._running_batches = Gauge(
            "graftwork_running_batches", "Batches that this gateway runs.", registry=self.registry
        )
        self._engine = EngineCollector()
        self.registry.register(self._engine)
        self.replicas = ReplicaCollector()
        """The engines of the fleet; without a fleet it is empty."""
        self.registry.register(self.replicas)
        self._labelled_tenants: set[TenantId] = set()

    def count_request(self, tenant_id: TenantId, outcome: str) -> None:
        """Counts a request that ended. `outcome` is `refused`, or a `UsageOutcome`."""
        self._requests.labels(self.tenant_label(tenant_id), outcome).inc()

    def count_tokens(self, tenant_id: TenantId, prompt_tokens_by_tier: dict[str, int], completion_tokens: int) -> None:
        """Counts the prompt and completion tokens of one request.

        The keys of `prompt_tokens_by_tier` tell where the KV of the prompt came from: `device`, `host` or `disk` for
        cached tokens, and `recomputed` for the others.
        """
        tenant = self.tenant_label(tenant_id)
        for tier, num_tokens in prompt_tokens_by_tier.items():
            self._prompt_tokens.labels(tenant, tier).inc(num_tokens)
        self._generated_tokens.labels(tenant).inc(completion_tokens)

    def count_batch(self, status: str) -> None:
        """Counts a batch that ended with a status, such as `completed`."""
        self._batches.labels(status).inc()

    def count_batch_line(self, tenant_id: TenantId, *, is_error: bool) -> None:
        """Counts a request of a batch that was answered."""
        self._batch_requests.labels(self.tenant_label(tenant_id), "errored" if is_error else "succeeded").inc()

    def show_batches(self, num_running: int) -> None:
        self._running_batches.set(num_running)

    def show_sessions(self, count_by_status: Mapping[str, int]) -> None:
        """Sets the metric `graftwork_sessions`. `count_by_status` maps each session status to the number of sessions."""
        for status, count in count_by_status.items():
            self._sessions.labels(status).set(count)

    def observe_engine(self, reading: EngineReading, at: float) -> None:
        """Stores the engine's latest figures, which the metrics then show. `at` is the time of the figures in unix
        seconds.
        """
        self._engine.observe(reading, at)

    def tenant_label(self, tenant_id: TenantId) -> str:
        """Returns the label for a tenant in the metrics: its id, or `other` if `MAX_TENANT_LABELS` other tenants have a
        label.
        """
        if tenant_id not in self._labelled_tenants:
            if len(self._labelled_tenants) >= MAX_TENANT_LABELS:
                return "other"
            self._labelled_tenants.add(tenant_id)
        return tenant_id

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics as text in bytes, and the content type of this text.

        `accept` is the client's `Accept` header. The format is OpenMetrics if the header asks for it, else Prometheus
        text.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"graftwork_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"graftwork_{name}", text, labels, registry=self.registry)
