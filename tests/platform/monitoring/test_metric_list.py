"""Tests that the list of metrics is what processes export, and that dashboards and alerts use nothing else."""

import json
import re

import pytest
from deploy.make_monitoring import FOLDER, alert_rules, dashboard, files

from graftwork.engine.core.stats import EngineStats
from graftwork.platform.clock import ManualClock
from graftwork.platform.monitoring.metric_list import METRICS, unknown_names
from graftwork.platform.monitoring.panels import ALERTS, ROWS
from graftwork.platform.objectives import ObjectiveMeter, parse_objectives
from graftwork.platform.replica_collector import ReplicaFigures
from graftwork.platform.telemetry import Telemetry


def busy_telemetry() -> Telemetry:
    """A process in which every metric has a value."""
    meter = ObjectiveMeter(parse_objectives("priority.ttft_ms=500"), ManualClock())
    telemetry = Telemetry(meter)
    meter.note_first_token("priority", 0.1)
    telemetry.observe_engine(EngineStats(resident_adapters=("sha256:a",)), 1.0)
    telemetry.replicas.observe([ReplicaFigures("engine-0")])
    telemetry.count_request("ten_1", "completed")  # type: ignore[arg-type]
    telemetry.count_tokens("ten_1", {"device": 1}, 2)  # type: ignore[arg-type]
    telemetry.show_sessions({"idle": 1})
    telemetry.count_batch("completed")
    telemetry.count_batch_line("ten_1", is_error=False)  # type: ignore[arg-type]
    return telemetry


def test_the_list_is_what_is_exported() -> None:
    """Every metric of a process is in the list, and every one in the list is exported, with kind, help and labels."""
    exported = {
        family.name: (
            family.type,
            family.documentation,
            tuple(sorted({label for sample in family.samples for label in sample.labels if label != "le"})),
        )
        for family in busy_telemetry().registry.collect()
    }

    assert {one.name: (one.kind, one.help, one.labels) for one in METRICS} == exported


def test_units_follow_from_the_names() -> None:
    """Seconds and bytes are named so, and a ratio is shown as a part of one."""
    units = {"_seconds": "s", "_bytes": "bytes", "_ratio": "percentunit", "_perc": "percentunit"}
    for one in METRICS:
        wanted = next((unit for end, unit in units.items() if one.name.endswith(end)), one.unit)
        assert one.unit == wanted, one.name


def test_every_metric_that_counts_has_a_place() -> None:
    """Each of the project's own metrics is on the dashboard or in an alert, but for a few that are for looking closer."""
    shown = dashboard() + alert_rules()
    closer = {"graftwork_engine_start_seconds"} | {one.name for one in METRICS if "replica" in one.name}

    missing = [one.name for one in METRICS if one.name.startswith("graftwork_") and one.name not in shown]

    assert set(missing) <= closer


def test_expressions_use_known_names() -> None:
    """Panels and alerts name only series and labels of the list."""
    expressions = [query.expression for row in ROWS for panel in row.panels for query in panel.queries]
    expressions += [alert.expression for alert in ALERTS]

    assert {text: names for text in expressions if (names := unknown_names(text))} == {}


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("sum(rate(graftwork_requests[5m]))", ["graftwork_requests"]),
        ("sum(graftwork_made_up)", ["graftwork_made_up"]),
        ("sum by (model) (graftwork_sessions)", ["model"]),
        ('graftwork_sessions{outcome="x"}', ["graftwork_sessions{outcome}"]),
        ('sum by (le) (rate(graftwork_e2e_seconds_bucket{instance=~"a.*"}[5m]))', []),
    ],
)
def test_unknown_names_are_found(expression: str, unknown: list[str]) -> None:
    """A counter without `_total`, a name that nobody exports and a label of another metric are unknown."""
    assert unknown_names(expression) == unknown


def test_the_files_are_fresh() -> None:
    """The committed files are what the script writes now."""
    for path, content in files().items():
        assert path.read_text(encoding="utf-8") == content, f"run python deploy/make_monitoring.py: {path} is stale"


def test_the_dashboard_loads_nothing_from_outside_and_has_no_overlap() -> None:
    """The dashboard is JSON without addresses; no two panels lie on one another, and ids are unique."""
    panels = json.loads(dashboard())["panels"]

    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert not re.search(r"https?://", dashboard())


def test_the_folder_holds_only_what_the_script_writes() -> None:
    """No file of a removed dashboard is left."""
    found = {path for folder in ("grafana", "prometheus") for path in (FOLDER / folder).iterdir()}

    assert found == set(files())
