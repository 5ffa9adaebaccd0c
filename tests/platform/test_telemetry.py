"""Tests of the metrics of `/metrics` and of the format of log lines."""

import re
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from graftwork.platform.engine_collector import MAX_LOADED_LABELS
from graftwork.platform.ids import TenantId
from graftwork.platform.metrics import counter, gauge
from graftwork.platform.telemetry import MAX_TENANT_LABELS, LocalHistogram, Telemetry


@dataclass(frozen=True)
class Reading:
    running: int = field(default=3, metadata=gauge("running_requests", "Running.", also="vllm:num_requests_running"))
    free: int = field(default=50, metadata=gauge("kv_pages", "Pages.", tier="device", state="free"))
    cached: int = field(default=30, metadata=gauge("kv_pages", "Pages.", tier="device", state="owned"))
    active: int = field(default=25, metadata=gauge("kv_pages", "Pages.", tier="device", state="owned"))
    loads: int = field(default=7, metadata=counter("adapter_loads", "Loads."))
    steps: int = 9
    resident_adapters: tuple[str, ...] = ("sha256:a", "sha256:b")
    host_adapters: tuple[str, ...] = ("sha256:b", "sha256:c", "sha256:d")
    running_adapters: tuple[str, ...] = ("b", "a")
    waiting_adapters: tuple[str, ...] = ()


def shown(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Returns every sample by name and labels."""
    text, content_type = telemetry.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_telemetry_has_its_own_figures() -> None:
    """Two Telemetry objects in one process count independently."""
    first, second = Telemetry(), Telemetry()

    first.count_request(TenantId("ten_1"), "completed")

    key = ("graftwork_requests_total", (("outcome", "completed"), ("tenant", "ten_1")))
    assert shown(first)[key] == 1
    assert key not in shown(second)


def test_tokens_are_counted_by_where_they_came_from() -> None:
    """Prompt tokens are counted by tier, and generated tokens by tenant."""
    telemetry = Telemetry()
    for _ in range(2):
        telemetry.count_tokens(TenantId("ten_1"), {"device": 64, "recomputed": 6}, 10)

    samples = shown(telemetry)

    assert samples[("graftwork_prompt_tokens_total", (("tenant", "ten_1"), ("tier", "device")))] == 128
    assert samples[("graftwork_prompt_tokens_total", (("tenant", "ten_1"), ("tier", "recomputed")))] == 12
    assert samples[("graftwork_generated_tokens_total", (("tenant", "ten_1"),))] == 20


def test_the_tenant_label_is_capped() -> None:
    """A scrape has at most 1,000 tenants and one `other`."""
    telemetry = Telemetry()

    for number in range(MAX_TENANT_LABELS + 50):
        telemetry.count_request(TenantId(f"ten_{number}"), "completed")
    telemetry.count_request(TenantId("ten_0"), "completed")

    samples = {dict(key[1])["tenant"]: value for key, value in shown(telemetry).items() if "requests_total" in key[0]}
    assert len(samples) == MAX_TENANT_LABELS + 1
    assert (samples["other"], samples["ten_0"]) == (50, 2)


def test_an_engines_figures_are_shown_as_its_fields_say() -> None:
    """A figure is shown under each of its names, figures of equal labels are added, and one without metadata is not
    shown."""
    telemetry = Telemetry()
    assert not any(name.startswith("vllm:") for name, _ in shown(telemetry))

    telemetry.observe_engine(Reading(), at=1234.0)

    samples = shown(telemetry)
    assert samples["graftwork_running_requests", ()] == samples["vllm:num_requests_running", ()] == 3
    assert samples["graftwork_kv_pages", (("state", "free"), ("tier", "device"))] == 50
    assert samples["graftwork_kv_pages", (("state", "owned"), ("tier", "device"))] == 55
    assert samples["graftwork_adapter_loads_total", ()] == 7
    assert 9 not in samples.values()
    labels = (("max_lora", "2"), ("running_lora_adapters", "a,b"), ("waiting_lora_adapters", ""))
    assert samples["vllm:lora_requests_info", labels] == 1234.0


def test_routers_see_which_adapters_are_loaded_and_where() -> None:
    """Each loaded adapter has a series by level, idle ones too; one that is evicted has none after the next reading."""
    telemetry = Telemetry()

    telemetry.observe_engine(Reading(), at=1.0)
    before = shown(telemetry)
    telemetry.observe_engine(Reading(resident_adapters=("sha256:a",), host_adapters=()), at=2.0)
    after = shown(telemetry)

    assert loaded(before) == {
        *((digest, "gpu") for digest in ("sha256:a", "sha256:b")),
        *((digest, "cpu") for digest in ("sha256:b", "sha256:c", "sha256:d")),
    }
    assert (before["vllm:num_gpu_loaded_lora_adapters", ()], before["vllm:num_cpu_loaded_lora_adapters", ()]) == (2, 3)
    assert loaded(after) == {("sha256:a", "gpu")}
    assert after["vllm:num_cpu_loaded_lora_adapters", ()] == 0


def test_series_of_loaded_adapters_are_capped() -> None:
    """A level has at most 1,000 series, and its count has all adapters."""
    telemetry = Telemetry()
    many = tuple(f"sha256:{number}" for number in range(MAX_LOADED_LABELS + 50))

    telemetry.observe_engine(Reading(host_adapters=many), at=1.0)

    samples = shown(telemetry)
    assert sum(level == "cpu" for _, level in loaded(samples)) == MAX_LOADED_LABELS
    assert samples["vllm:num_cpu_loaded_lora_adapters", ()] == len(many)


def loaded(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> set[tuple[str, str]]:
    """Returns the digest and the level of each adapter that is shown as loaded."""
    found = {labels: value for (name, labels), value in samples.items() if name == "vllm:lora_adapter_loaded"}
    assert set(found.values()) <= {1.0}
    return {(dict(labels)["adapter_name"], dict(labels)["level"]) for labels in found}


def test_histograms_carry_the_promised_names() -> None:
    """The four histograms of a request exist from the start."""
    telemetry = Telemetry()
    telemetry.time_to_first_token.observe(0.2)

    samples = shown(telemetry)

    assert samples[("graftwork_time_to_first_token_seconds_count", ())] == 1
    for name in ("inter_token_seconds", "queue_seconds", "e2e_seconds"):
        assert samples[(f"graftwork_{name}_count", ())] == 0


BOUNDS = (0.001, 0.25, 1.0, 2.5)


def without_creation_time(registry: CollectorRegistry) -> str:
    """Returns the exposition without the time at which the histogram was made."""
    return re.sub(r"(_created) \S+", r"\1", generate_latest(registry).decode())


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 10.0))))
def test_it_shows_what_the_librarys_own_shows(values: list[float]) -> None:
    """LocalHistogram shows the same bytes as prometheus_client's Histogram for any values."""
    own, theirs = CollectorRegistry(), CollectorRegistry()
    local = LocalHistogram("some_seconds", "Some text.", BOUNDS, own)
    histogram = Histogram("some_seconds", "Some text.", buckets=BOUNDS, registry=theirs)

    for value in values:
        local.observe(value)
        histogram.observe(value)

    assert without_creation_time(own) == without_creation_time(theirs)
