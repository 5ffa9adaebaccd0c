"""Tests of the figures that an engine reports."""

from graftwork.engine.core.stats import EngineStats
from graftwork.platform.metrics import MetricKind, samples


def test_the_metrics_keep_their_names() -> None:
    """Each metric keeps the name and labels that dashboards and gateways read."""
    shown: dict[str, set[tuple[str, ...]]] = {}
    for metric, _ in samples(EngineStats()):
        name = metric.name + ("_total" if metric.kind is MetricKind.COUNTER else "")
        shown.setdefault(name, set()).add(tuple(text for _, text in metric.labels))

    unlabelled = {name for name, labels in shown.items() if labels == {()}}
    assert unlabelled >= {
        "graftwork_running_requests",
        "graftwork_waiting_requests",
        "graftwork_kv_usage_ratio",
        "graftwork_lora_pool_bytes",
        "graftwork_adapter_loads_total",
        "graftwork_lora_vocabulary_rows_total",
        "graftwork_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    }
    assert (
        shown.items()
        >= {
            "graftwork_kv_pages": {
                *((tier, state) for tier in ("device", "host") for state in ("free", "owned", "in_flight")),
                ("disk", "owned"),
                ("object", "owned"),
            },
            "graftwork_kv_disk_troubles_total": {
                *((kind,) for kind in ("corrupt_file", "foreign_file", "failed_operation")),
                *((kind,) for kind in ("failed_object", "dropped_upload")),
            },
            "graftwork_kv_object_pages_total": {("written",), ("read",)},
            "graftwork_lora_rows_total": {("kernels",), ("torch",)},
            "graftwork_expert_rows_total": {("kernels",), ("torch",)},
            "graftwork_engine_steps_total": {
                *(("graph", rows) for rows in ("decoding", "prompt")),
                *(("eager", why) for why in ("prompt", "scores", "windows", "adapters", "rows", "no_graphs")),
            },
            "graftwork_kernel_fallbacks": {
                (one,) for one in ("rows", "attention", "lora", "sampler", "graphs", "experts", "weights")
            },
            "graftwork_draft_tokens_total": {
                ("grammar", "forced"),
                *((drafter, result) for drafter in ("lookup", "model") for result in ("accepted", "rejected")),
            },
            "graftwork_engine_memory_bytes": {
                *(("host", owner) for owner in ("weights", "device_kv", "host_kv", "adapters")),
                *(("host", owner) for owner in ("grammars", "drafts", "workspace", "other")),
                *(("gpu", owner) for owner in ("weights", "device_kv", "adapters", "drafts", "workspace")),
            },
        }.items()
    )


def test_the_results_of_drafts_are_disjoint() -> None:
    """Each verified draft token is shown under one result, so that their sum is what was drafted."""
    stats = EngineStats(
        forced_drafts=2, accepted_drafts=4, rejected_drafts=4, model_accepted_drafts=16, model_rejected_drafts=32
    )

    found = [(dict(metric.labels), value) for metric, value in samples(stats)]
    shown = {(labels["drafter"], labels["result"]): value for labels, value in found if "drafter" in labels}

    assert shown == {
        ("grammar", "forced"): 2,
        ("lookup", "accepted"): 4,
        ("lookup", "rejected"): 4,
        ("model", "accepted"): 16,
        ("model", "rejected"): 32,
    }
    assert (stats.accepted_tokens, stats.drafted_tokens) == (22, 58)
