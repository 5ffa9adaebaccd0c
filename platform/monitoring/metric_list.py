"""Lists all metrics that `/metrics` shows: name, kind, labels, unit and help.

Owns nothing that counts. A test compares the list with what a gateway exports, and dashboards and alert rules are made
from it: a name that is not in here is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
SCRAPE_LABELS = frozenset({"job", "instance"})
"""Labels that Prometheus adds to everything."""
_NAME = re.compile(r"\b(?:graftwork_|vllm:)[a-z0-9_]+")
_USED_LABELS = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_MATCHERS = re.compile(r"((?:graftwork_|vllm:)[a-z0-9_]+)\{([^}]*)\}")
_MATCHED_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    """Without `_total` at the end of a counter."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """In the order of the alphabet."""
    unit: str = "short"
    """As Grafana names it: `s`, `bytes`, `percentunit`, or `short` for a number."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its time series in Prometheus."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


METRICS = (
    MetricSpec("graftwork_time_to_first_token_seconds", "histogram", "From arrival to the first token.", (), "s"),
    MetricSpec("graftwork_queue_seconds", "histogram", "From arrival to admission by the engine.", (), "s"),
    MetricSpec("graftwork_e2e_seconds", "histogram", "From arrival to the last token.", (), "s"),
    MetricSpec("graftwork_inter_token_seconds", "histogram", "Between two tokens of a stream.", (), "s"),
    MetricSpec("graftwork_requests", "counter", "Requests by how they ended.", ("outcome", "tenant")),
    MetricSpec("graftwork_prompt_tokens", "counter", "Prompt tokens by where they came from.", ("tenant", "tier")),
    MetricSpec("graftwork_generated_tokens", "counter", "Tokens made.", ("tenant",)),
    MetricSpec("graftwork_sessions", "gauge", "Sessions by status.", ("status",)),
    MetricSpec("graftwork_batches", "counter", "Batches by how they ended.", ("status",)),
    MetricSpec(
        "graftwork_batch_requests",
        "counter",
        "Requests of batches by how they were answered.",
        ("outcome", "tenant"),
    ),
    MetricSpec("graftwork_running_batches", "gauge", "Batches that this gateway runs."),
    MetricSpec(
        "graftwork_objective_burn_rate",
        "gauge",
        "Share of requests outside an objective, divided by the share that may be.",
        ("objective", "tier", "window"),
    ),
    MetricSpec(
        "graftwork_objective_budget_left",
        "gauge",
        "Part of the last day's error budget that is left.",
        ("objective", "tier"),
        "percentunit",
    ),
    MetricSpec("graftwork_running_requests", "gauge", "Requests in the running batch."),
    MetricSpec("vllm:num_requests_running", "gauge", "Requests in the running batch."),
    MetricSpec("graftwork_waiting_requests", "gauge", "Requests in the engine's queue."),
    MetricSpec("vllm:num_requests_waiting", "gauge", "Requests in the engine's queue."),
    MetricSpec(
        "graftwork_queued_tokens", "gauge", "Prompt tokens, of requests that wait or run, that must still be computed."
    ),
    MetricSpec("graftwork_engine_step_seconds", "counter", "Seconds that the device has worked on steps.", (), "s"),
    MetricSpec("graftwork_preemptions", "counter", "Requests offloaded to make room."),
    MetricSpec("graftwork_kv_usage_ratio", "gauge", "Share of KV pages in use, 0 to 1.", (), "percentunit"),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1.", (), "percentunit"),
    MetricSpec("graftwork_kv_pages", "gauge", "KV pages by tier and state.", ("state", "tier")),
    MetricSpec("graftwork_kv_disk_troubles", "counter", "Troubles with KV files, by kind.", ("kind",)),
    MetricSpec("graftwork_kv_object_bytes", "gauge", "Bytes in the bucket of KV that engines share.", (), "bytes"),
    MetricSpec(
        "graftwork_kv_object_pages", "counter", "KV pages written to the bucket and read from it.", ("direction",)
    ),
    MetricSpec(
        "graftwork_engine_memory_bytes", "gauge", "Memory of the engine by owner.", ("memory", "owner"), "bytes"
    ),
    MetricSpec("graftwork_engine_start_seconds", "gauge", "Seconds of the engine's start, by phase.", ("phase",), "s"),
    MetricSpec(
        "graftwork_engine_steps", "counter", "Forward passes by how they were computed, and why.", ("path", "reason")
    ),
    MetricSpec(
        "graftwork_expert_rows",
        "counter",
        "Tokens of steps of a model with experts, by what computed those.",
        ("path",),
    ),
    MetricSpec(
        "graftwork_kernel_fallbacks", "gauge", "1 if torch stands in for kernels that do not work.", ("kernels",)
    ),
    MetricSpec("graftwork_lora_pool_bytes", "gauge", "Adapter weights on the device.", (), "bytes"),
    MetricSpec("graftwork_adapter_loads", "counter", "Adapters loaded to the device."),
    MetricSpec("graftwork_lora_rows", "counter", "Tokens of steps that had an adapter, by what applied it.", ("path",)),
    MetricSpec(
        "graftwork_lora_vocabulary_rows", "counter", "Tokens whose adapter changes the embedding or the output head."
    ),
    MetricSpec(
        "vllm:lora_requests_info",
        "gauge",
        "Adapters of running and waiting requests.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    MetricSpec("vllm:lora_adapter_loaded", "gauge", "1 for each loaded adapter.", ("adapter_name", "level")),
    MetricSpec("vllm:num_gpu_loaded_lora_adapters", "gauge", "Adapters on the device."),
    MetricSpec("vllm:num_cpu_loaded_lora_adapters", "gauge", "Adapters in host memory."),
    MetricSpec(
        "graftwork_draft_tokens",
        "counter",
        "Guessed tokens by who guessed them and what came of them.",
        ("drafter", "result"),
    ),
    MetricSpec("graftwork_replica_ready", "gauge", "1 if the engine gets new requests, else 0.", ("replica",)),
    MetricSpec("graftwork_replica_running_requests", "gauge", "Requests in the engine's batch.", ("replica",)),
    MetricSpec("graftwork_replica_waiting_requests", "gauge", "Requests in the engine's queue.", ("replica",)),
    MetricSpec(
        "graftwork_replica_queued_tokens", "gauge", "Prompt tokens that the engine must still compute.", ("replica",)
    ),
    MetricSpec("graftwork_replica_free_pages", "gauge", "Device pages that no running request holds.", ("replica",)),
    MetricSpec(
        "graftwork_replica_slowness", "gauge", "How many times slower than its peers the engine works.", ("replica",)
    ),
    MetricSpec(
        "graftwork_replica_first_token_seconds",
        "gauge",
        "The expected time to the first token of a short request that is sent to the engine now.",
        ("replica",),
        unit="s",
    ),
    MetricSpec(
        "graftwork_replica_requests", "counter", "Requests that this gateway has sent to the engine.", ("replica",)
    ),
    MetricSpec(
        "graftwork_replica_hand_overs",
        "counter",
        "Requests that have left the engine for another one.",
        ("replica",),
    ),
    MetricSpec(
        "graftwork_replica_hedges",
        "counter",
        "First tokens that the engine was asked for because another engine was late.",
        ("replica",),
    ),
)
_BY_SERIES = {series: one for one in METRICS for series in one.series}


def unknown_names(expression: str) -> list[str]:
    """Returns the names of series and labels in a PromQL expression that no metric has."""
    found = _NAME.findall(expression)
    problems = [name for name in found if name not in _BY_SERIES]
    known = [_BY_SERIES[name] for name in found if name in _BY_SERIES]
    labels = {label for one in known for label in one.labels} | SCRAPE_LABELS | {"le"}
    problems += [label for label in _labels_of(expression) if label not in labels]
    for name, matchers in _MATCHERS.findall(expression):
        own = _BY_SERIES[name].labels if name in _BY_SERIES else ()
        wanted = _MATCHED_LABEL.findall(matchers)
        problems += [f"{name}{{{label}}}" for label in wanted if label not in (*own, *SCRAPE_LABELS, "le")]
    return problems


def _labels_of(expression: str) -> Iterator[str]:
    for group in _USED_LABELS.findall(expression):
        yield from (label.strip() for label in group.split(",") if label.strip())
