"""Says what the dashboard and the alerts show: the panels and rules, as PromQL over the list of metrics.

Owns their titles, expressions and limits. Never writes a file: `deploy/make_monitoring.py` does.
"""

from dataclasses import dataclass

from graftwork.platform.monitoring.metric_list import METRICS

_UNITS = {one.name: one.unit for one in METRICS}


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or group of lines, of a panel."""

    expression: str
    legend: str = ""
    """With labels as `{{tenant}}`."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    description: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str
    for_: str
    """For how long the expression must hold: a duration of Prometheus."""
    severity: str
    """`page` wakes somebody, `ticket` waits for the day."""
    summary: str
    action: str
    """What to do about it."""


def _quantiles(metric: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({metric}_bucket[5m]))"
    return tuple(Query(f"histogram_quantile({share}, {rate})", f"p{round(100 * share)}") for share in (0.5, 0.95, 0.99))


def _latency(title: str, metric: str, description: str = "") -> Panel:
    return Panel(title, _quantiles(metric), _UNITS[metric], description)


_USERS = Row(
    "What users feel",
    (
        _latency("Time to the first token", "graftwork_time_to_first_token_seconds"),
        _latency("Between two tokens", "graftwork_inter_token_seconds"),
        _latency(
            "In the queue", "graftwork_queue_seconds", "Above a second: more engine is needed, or a tenant floods."
        ),
        _latency("Whole answers", "graftwork_e2e_seconds"),
        Panel(
            "Requests a second by outcome",
            (Query("sum by (outcome) (rate(graftwork_requests_total[5m]))", "{{outcome}}"),),
            "reqps",
        ),
        Panel(
            "Tokens a second",
            (
                Query("sum(rate(graftwork_generated_tokens_total[5m]))", "generated"),
                Query("sum by (tier) (rate(graftwork_prompt_tokens_total[5m]))", "prompt, {{tier}}"),
            ),
        ),
        Panel("Sessions", (Query("sum by (status) (graftwork_sessions)", "{{status}}"),)),
        Panel(
            "Batches",
            (
                Query("sum(graftwork_running_batches)", "running"),
                Query("sum by (outcome) (rate(graftwork_batch_requests_total[5m]))", "requests a second, {{outcome}}"),
                Query("sum by (status) (increase(graftwork_batches_total[1h]))", "{{status}} in an hour"),
            ),
        ),
    ),
)
_MEMORY = Row(
    "Memory",
    (
        Panel("KV in use", (Query("graftwork_kv_usage_ratio", "{{instance}}"),), "percentunit"),
        Panel("KV pages", (Query("sum by (tier, state) (graftwork_kv_pages)", "{{tier}} {{state}}"),)),
        Panel(
            "Engine's memory",
            (Query("sum by (memory, owner) (graftwork_engine_memory_bytes)", "{{memory}} {{owner}}"),),
            "bytes",
        ),
        Panel(
            "Prompt tokens from the cache",
            (
                Query(
                    'sum(rate(graftwork_prompt_tokens_total{tier!="recomputed"}[5m]))'
                    " / sum(rate(graftwork_prompt_tokens_total[5m]))",
                    "cached",
                ),
            ),
            "percentunit",
        ),
        Panel("Preemptions a second", (Query("sum(rate(graftwork_preemptions_total[5m]))", "preemptions"),)),
        Panel("KV in the bucket", (Query("max(graftwork_kv_object_bytes)", "bytes"),), "bytes"),
        Panel(
            "KV pages to and from the bucket a second",
            (Query("sum by (direction) (rate(graftwork_kv_object_pages_total[5m]))", "{{direction}}"),),
        ),
        Panel(
            "Troubles of KV files a second",
            (Query("sum by (kind) (rate(graftwork_kv_disk_troubles_total[5m]))", "{{kind}}"),),
        ),
    ),
)
_ADAPTERS = Row(
    "Adapters",
    (
        Panel(
            "Loads a second",
            (Query("sum(rate(graftwork_adapter_loads_total[5m]))", "loads"),),
            description="Steadily high: adapters thrash. Give them more memory (lora_pool_bytes), or more engines.",
        ),
        Panel("Weights on the device", (Query("graftwork_lora_pool_bytes", "{{instance}}"),), "bytes"),
        Panel(
            "Tokens with an adapter a second",
            (
                Query("sum by (path) (rate(graftwork_lora_rows_total[5m]))", "{{path}}"),
                Query("sum(rate(graftwork_lora_vocabulary_rows_total[5m]))", "embedding or output head"),
            ),
        ),
        Panel(
            "Tokens through experts a second",
            (Query("sum by (path) (rate(graftwork_expert_rows_total[5m]))", "{{path}}"),),
        ),
        Panel("Kernels that torch replaces", (Query("max by (kernels) (graftwork_kernel_fallbacks)", "{{kernels}}"),)),
    ),
)
_FAIRNESS = Row(
    "Fairness",
    (
        Panel(
            "Generated tokens a second, the ten largest tenants",
            (Query("topk(10, sum by (tenant) (rate(graftwork_generated_tokens_total[5m])))", "{{tenant}}"),),
        ),
        Panel(
            "Share of the largest tenant",
            (
                Query(
                    "max(sum by (tenant) (rate(graftwork_generated_tokens_total[5m])))"
                    " / sum(rate(graftwork_generated_tokens_total[5m]))",
                    "share",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Refused requests a second, the ten largest tenants",
            (Query('topk(10, sum by (tenant) (rate(graftwork_requests_total{outcome="refused"}[5m])))', "{{tenant}}"),),
            "reqps",
        ),
        Panel(
            "Running and waiting requests",
            (
                Query("sum(graftwork_running_requests)", "running"),
                Query("sum(graftwork_waiting_requests)", "waiting"),
            ),
        ),
        Panel("Prompt tokens that wait", (Query("sum by (instance) (graftwork_queued_tokens)", "{{instance}}"),)),
    ),
)
_BUDGETS = Row(
    "Error budgets and engines",
    (
        Panel(
            "Error budget left",
            (Query("min by (tier, objective) (graftwork_objective_budget_left)", "{{tier}} {{objective}}"),),
            "percentunit",
            "Empty without objectives (docs/overload.md).",
        ),
        Panel(
            "Burn rate",
            (
                Query(
                    "max by (tier, objective, window) (graftwork_objective_burn_rate)",
                    "{{tier}} {{objective}} {{window}}",
                ),
            ),
        ),
        Panel("Engines that get requests", (Query("min by (replica) (graftwork_replica_ready)", "{{replica}}"),)),
        Panel(
            "Queued prompt tokens by engine",
            (Query("max by (replica) (graftwork_replica_queued_tokens)", "{{replica}}"),),
        ),
        Panel(
            "Drafts by who guessed and what came of them a second",
            (Query("sum by (drafter, result) (rate(graftwork_draft_tokens_total[5m]))", "{{drafter}} {{result}}"),),
        ),
        Panel(
            "Part of the time that the device works",
            (Query("sum by (instance) (rate(graftwork_engine_step_seconds_total[5m]))", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Steps a second by how they were computed",
            (Query("sum by (path, reason) (rate(graftwork_engine_steps_total[5m]))", "{{path}} {{reason}}"),),
        ),
    ),
)
ROWS = (_USERS, _MEMORY, _ADAPTERS, _FAIRNESS, _BUDGETS)

ALERTS = (
    Alert(
        "GraftworkGatewayDown",
        'up{job="graftwork"} == 0',
        "1m",
        "page",
        "A gateway does not answer its scrapes.",
        "Look at its log and at GET /healthz. Without the admin key or metrics_port, scrapes get a 401.",
    ),
    Alert(
        "GraftworkServerErrors",
        'sum(rate(graftwork_requests_total{outcome="server_error"}[5m]))'
        " > 0.01 * sum(rate(graftwork_requests_total[5m]))",
        "5m",
        "page",
        "More than 1 % of the requests end by the server's fault.",
        "The gateway's log has each error; GET /readyz says whether engine and database answer.",
    ),
    Alert(
        "GraftworkFirstTokensLate",
        "histogram_quantile(0.95, sum by (le) (rate(graftwork_time_to_first_token_seconds_bucket[5m]))) > 5",
        "10m",
        "ticket",
        "5 % of the first tokens come after more than five seconds.",
        "See the queue and the KV in use: more engines, degraded modes, or deadlines (docs/overload.md).",
    ),
    Alert(
        "GraftworkQueueLong",
        "sum(graftwork_waiting_requests) > 2 * sum(graftwork_running_requests) and sum(graftwork_waiting_requests) > 16",
        "10m",
        "ticket",
        "Twice as many requests wait as run.",
        "Start more engines (docs/fleet.md), or set degraded modes.",
    ),
    Alert(
        "GraftworkErrorBudgetBurns",
        'max by (tier, objective) (graftwork_objective_burn_rate{window="5m"}) > 14.4'
        ' and max by (tier, objective) (graftwork_objective_burn_rate{window="1h"}) > 14.4',
        "2m",
        "page",
        "An objective burns its error budget 14 times too fast.",
        "The labels name tier and objective. Within two days a month's budget is gone.",
    ),
    Alert(
        "GraftworkErrorBudgetSpent",
        "min by (tier, objective) (graftwork_objective_budget_left) < 0",
        "5m",
        "ticket",
        "The last day's error budget of an objective is spent.",
        "Put off risky changes until it recovers.",
    ),
    Alert(
        "GraftworkKvFull",
        "graftwork_kv_usage_ratio > 0.95 and on (instance) rate(graftwork_preemptions_total[5m]) > 0.1",
        "10m",
        "ticket",
        "Running requests push each other out of device memory.",
        "Give KV more memory, lower max_running, or start more engines.",
    ),
    Alert(
        "GraftworkAdaptersThrash",
        "sum(rate(graftwork_adapter_loads_total[10m])) > 1",
        "15m",
        "ticket",
        "An adapter is loaded more than once a second.",
        "Give adapters more memory (lora_pool_bytes), or start more engines: placement keeps adapters apart.",
    ),
    Alert(
        "GraftworkKernelsFellBack",
        "max by (instance, kernels) (graftwork_kernel_fallbacks) == 1",
        "1m",
        "ticket",
        "torch stands in for kernels of the engine's device, which is slow.",
        "The engine's log says why the kernels failed their self-test.",
    ),
    Alert(
        "GraftworkKvFilesFail",
        'sum by (kind) (increase(graftwork_kv_disk_troubles_total{kind!="foreign_file"}[15m])) > 0',
        "0m",
        "ticket",
        "KV files are damaged, or the disk refuses them.",
        "Look at the disk. Each trouble costs a recomputation and nothing else.",
    ),
    Alert(
        "GraftworkEngineGone",
        "min by (replica) (graftwork_replica_ready) == 0",
        "5m",
        "ticket",
        "An engine of the fleet gets no requests.",
        "GET /v1/admin/replicas says why: it drains, or its lease or connection is gone.",
    ),
    Alert(
        "GraftworkOneTenantRefused",
        'max by (tenant) (rate(graftwork_requests_total{outcome="refused"}[10m])) > 1',
        "15m",
        "ticket",
        "A tenant is refused more than once a second.",
        "Its limits are too low, or its client does not wait for Retry-After.",
    ),
)
