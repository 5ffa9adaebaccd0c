"""What `/metrics` shows, and what a log line is."""

import io
import json
import logging
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from graftwork.platform.ids import TenantId
from graftwork.platform.telemetry import MAX_TENANT_LABELS, JsonFormatter, Telemetry

DRAFT_RESULTS = ("accepted", "forced", "rejected")


@dataclass(frozen=True)
class Reading:
    running_requests: int = 3
    waiting_requests: int = 2
    free_pages: int = 50
    cached_pages: int = 25
    active_pages: int = 25
    in_flight_pages: int = 0
    host_free_pages: int = 10
    host_cached_pages: int = 5
    host_in_flight_pages: int = 1
    disk_pages: int = 9
    disk_corrupt_files: int = 1
    disk_foreign_files: int = 2
    disk_failures: int = 0
    preemptions: int = 2
    resident_adapters: tuple[str, ...] = ("sha256:a", "sha256:b")
    lora_pool_bytes: int = 4096
    running_adapters: tuple[str, ...] = ("b", "a")
    waiting_adapters: tuple[str, ...] = ()
    adapter_loads: int = 7
    drafted_tokens: int = 10
    accepted_tokens: int = 6
    forced_tokens: int = 2


def shown(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, as a scraper reads them."""
    text, content_type = telemetry.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_telemetry_has_its_own_figures() -> None:
    """Two in one process do not clash and do not share."""
    first, second = Telemetry(), Telemetry()

    first.count_request(TenantId("ten_1"), "completed")

    key = ("graftwork_requests_total", (("outcome", "completed"), ("tenant", "ten_1")))
    assert shown(first)[key] == 1
    assert key not in shown(second)


def test_tokens_are_counted_by_where_they_came_from() -> None:
    """Prompt tokens add up by tier, generated ones by tenant."""
    telemetry = Telemetry()
    for _ in range(2):
        telemetry.count_tokens(TenantId("ten_1"), {"device": 64, "recomputed": 6}, 10)

    samples = shown(telemetry)

    assert samples[("graftwork_prompt_tokens_total", (("tenant", "ten_1"), ("tier", "device")))] == 128
    assert samples[("graftwork_prompt_tokens_total", (("tenant", "ten_1"), ("tier", "recomputed")))] == 12
    assert samples[("graftwork_generated_tokens_total", (("tenant", "ten_1"),))] == 20


def test_the_tenant_label_is_capped() -> None:
    """However many tenants there are, a scrape has at most 1,000 of them and one `other`."""
    telemetry = Telemetry()

    for number in range(MAX_TENANT_LABELS + 50):
        telemetry.count_request(TenantId(f"ten_{number}"), "completed")
    telemetry.count_request(TenantId("ten_0"), "completed")

    samples = {dict(key[1])["tenant"]: value for key, value in shown(telemetry).items() if "requests_total" in key[0]}
    assert len(samples) == MAX_TENANT_LABELS + 1
    assert (samples["other"], samples["ten_0"]) == (50, 2)


def test_engine_figures_have_both_names() -> None:
    """An engine's reading is shown under Graftwork's names and under those inference gateways read."""
    telemetry = Telemetry()
    assert not any(name.startswith("vllm:") for name, _ in shown(telemetry))

    telemetry.observe_engine(Reading(), at=1234.0)

    samples = shown(telemetry)
    for name, value in {
        "graftwork_running_requests": 3,
        "graftwork_waiting_requests": 2,
        "graftwork_kv_usage_ratio": 0.25,
        "graftwork_lora_pool_bytes": 4096,
        "graftwork_adapter_loads_total": 7,
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
    }.items():
        assert samples[(name, ())] == value
    assert samples[("graftwork_kv_pages", (("state", "free"), ("tier", "device")))] == 50
    assert samples[("graftwork_kv_pages", (("state", "owned"), ("tier", "device")))] == 50
    drafts = {result: samples["graftwork_draft_tokens_total", (("result", result),)] for result in DRAFT_RESULTS}
    assert drafts == {"accepted": 4, "forced": 2, "rejected": 4}
    labels = (("max_lora", "2"), ("running_lora_adapters", "a,b"), ("waiting_lora_adapters", ""))
    assert samples[("vllm:lora_requests_info", labels)] == 1234.0


def test_histograms_carry_the_promised_names() -> None:
    """The four times of a request are there from the start."""
    telemetry = Telemetry()
    telemetry.time_to_first_token.observe(0.2)

    samples = shown(telemetry)

    assert samples[("graftwork_time_to_first_token_seconds_count", ())] == 1
    for name in ("inter_token_seconds", "queue_seconds", "e2e_seconds"):
        assert samples[(f"graftwork_{name}_count", ())] == 0


def test_a_log_line_is_one_object() -> None:
    """Fields given as `extra` stand beside the event, and an exception stays on the line."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("graftwork.test")
    logger.addHandler(handler)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("turn %s failed", "trn_1", extra={"request_id": "req_1", "size": 3})
    finally:
        logger.removeHandler(handler)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["level"], line["event"], line["request_id"], line["size"]) == (
        "error",
        "turn trn_1 failed",
        "req_1",
        3,
    )
    assert "ValueError: two\nlines" in line["error"]
