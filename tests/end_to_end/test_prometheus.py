"""A real Prometheus scrapes a running server and evaluates every panel and every alert. Needs Debian's `prometheus`."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deploy.make_monitoring import FOLDER

from graftwork import Graftwork
from graftwork.platform.monitoring.panels import ALERTS, ROWS
from tests.end_to_end.conftest import DemoServer, free_port

pytestmark = pytest.mark.slow
RULES = FOLDER / "prometheus" / "graftwork.yml"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: graftwork
    authorization: {{credentials_file: {key}}}
    static_configs: [{{targets: ["{target}"]}}]
"""
MAY_BE_EMPTY = {
    "Error budget left",  # the demo server has no objectives
    "Burn rate",
    "Engines that get requests",  # and no fleet
    "Queued prompt tokens by engine",
    "Refused requests a second, the ten largest tenants",  # nothing is refused
}


@pytest.fixture
def prometheus(server: DemoServer, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the demo server each second, on a port of its own."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    port, config = free_port(), tmp_path / "prometheus.yml"
    key, target = server.data_dir / "admin.key", server.url.removeprefix("http://")
    config.write_text(CONFIG.format(rules=RULES, key=key, target=target))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def result_of(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    answer = client.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def wait_for(client: httpx.Client, expression: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if result_of(client, expression):
                return
        except (httpx.TransportError, ValueError):
            pass  # it starts
        time.sleep(0.5)
    raise AssertionError(f"no data for {expression}")


def empty_panels(prometheus: httpx.Client, within_s: float = 30.0) -> set[str]:
    """The queries of panels that have no data. A rate needs two scrapes, so it asks again until none is empty."""
    wanted = {
        f"{panel.title}: {query.expression}": query.expression
        for row in ROWS
        for panel in row.panels
        if panel.title not in MAY_BE_EMPTY
        for query in panel.queries
    }
    deadline = time.monotonic() + within_s
    while True:
        empty = {name for name, expression in wanted.items() if not result_of(prometheus, expression)}
        if not empty or time.monotonic() > deadline:
            return empty
        time.sleep(1)


def run_batch(client: Graftwork, folder: Path) -> None:
    """Runs a batch of two requests to its end."""
    body = {"model": "pirate", "messages": [{"role": "user", "content": "Ahoy"}], "max_tokens": 4}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body} for number in range(2)
    ]
    path = folder / "in.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    batch = client.batches.create(client.files.create(path).id)
    deadline = time.monotonic() + 60
    while client.batches.get(batch.id).status != "completed":
        assert time.monotonic() < deadline, client.batches.get(batch.id)
        time.sleep(0.5)


def test_every_panel_and_alert_works_on_a_real_server(
    server: DemoServer, prometheus: httpx.Client, tmp_path: Path
) -> None:
    """promtool takes the rules; each expression evaluates; each panel has data once requests were served; no alert fires."""
    checked = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    wait_for(prometheus, 'up{job="graftwork"} == 1')
    with Graftwork(base_url=server.url, api_key=server.key("Blackbeard")) as client:
        for number in range(8):
            session = client.sessions.create(model="pirate")
            session.turn(f"What is the weather in Paris, number {number}?")
            time.sleep(1)
        run_batch(client, tmp_path)
    wait_for(prometheus, "sum(rate(graftwork_generated_tokens_total[5m])) > 0")
    wait_for(prometheus, "sum(increase(graftwork_adapter_loads_total[5m])) >= 0")

    empty = empty_panels(prometheus)
    for alert in ALERTS:
        result_of(prometheus, alert.expression)
    rules = prometheus.get("/rules").json()["data"]["groups"][0]["rules"]

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert empty == set()
    assert {rule["name"] for rule in rules} == {alert.name for alert in ALERTS}
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
