"""Writes the Grafana dashboard and the Prometheus alert rules from platform/monitoring.

Run `python deploy/make_monitoring.py` after a change there. A test fails if the files are stale.
"""

import json
from pathlib import Path
from typing import Any

from graftwork.platform.monitoring.panels import ALERTS, ROWS, Alert, Panel, Row

FOLDER = Path(__file__).parent
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_NOTE = "# Made by deploy/make_monitoring.py from platform/monitoring/panels.py: change it there."


def dashboard() -> str:
    """Returns the JSON of the dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_row(row, top, len(panels) + 1))
        for place, panel in enumerate(row.panels):
            at = {"x": place * _WIDTH % _COLUMNS, "y": top + 1 + place * _WIDTH // _COLUMNS * _HEIGHT}
            panels.append(_panel(panel, at, len(panels) + 1))
        top += 1 + -(-len(row.panels) * _WIDTH // _COLUMNS) * _HEIGHT
    body = {
        "title": "Graftwork",
        "uid": "graftwork",
        "tags": ["graftwork"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(body, indent=2) + "\n"


def alert_rules() -> str:
    """Returns the YAML of the alert rules."""
    lines = [_NOTE, "groups:", "  - name: graftwork", "    rules:"]
    for alert in ALERTS:
        lines += _rule(alert)
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """Returns all files with their content."""
    return {
        FOLDER / "grafana" / "graftwork.json": dashboard(),
        FOLDER / "prometheus" / "graftwork.yml": alert_rules(),
    }


def _row(row: Row, top: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}


def _panel(panel: Panel, at: dict[str, int], number: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query.expression, "legendFormat": query.legend}
        for place, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": at | {"w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _rule(alert: Alert) -> list[str]:
    text = json.dumps  # a JSON string is a YAML string
    return [
        f"      - alert: {alert.name}",
        f"        expr: {text(alert.expression)}",
        f"        for: {alert.for_}",
        "        labels:",
        f"          severity: {alert.severity}",
        "        annotations:",
        f"          summary: {text(alert.summary, ensure_ascii=False)}",
        f"          description: {text(alert.action, ensure_ascii=False)}",
    ]


if __name__ == "__main__":
    for path, content in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
