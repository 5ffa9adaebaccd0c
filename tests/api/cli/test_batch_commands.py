"""Tests of `graftwork batches` against a listening gateway."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """With the gateway's address and key in the environment."""
    for name, value in (("URL", live.url), ("API_KEY", live.key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


def shown(graftwork: Graftwork, *arguments: str) -> Any:
    result = graftwork("batches", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_file_becomes_answers(graftwork: Graftwork, tmp_path: Path) -> None:
    """A file is submitted to the endpoint that it names, and its answers are written to a file."""
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
    requests.write_text(json.dumps(line) + "\n")

    submitted = shown(graftwork, "submit", str(requests))
    batch_id = submitted["id"]
    while (found := shown(graftwork, "show", batch_id))["status"] != "completed":
        continue
    written = graftwork("batches", "results", batch_id, "--output", str(answers))
    without = graftwork("batches", "results", batch_id, "--errors")
    again = graftwork("batches", "cancel", batch_id, "--yes")

    assert (submitted["endpoint"], found["request_counts"]["completed"]) == ("/v1/completions", 1)
    assert written.exit_code == 0
    assert json.loads(answers.read_text())["custom_id"] == "a"
    assert graftwork("batches", "results", batch_id).stdout == answers.read_text()
    assert (without.exit_code, "has no errors" in without.stderr) == (1, True)
    assert (again.exit_code, "completed" in again.stderr) == (1, True)
    assert batch_id in graftwork("batches", "list").stdout
    assert "1 of 1" in graftwork("batches", "show", batch_id).stdout


def test_a_wrong_file_is_shown_by_its_lines(graftwork: Graftwork, tmp_path: Path) -> None:
    """What is wrong with a file is shown line by line."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{\n")

    batch_id = shown(graftwork, "submit", str(requests))["id"]
    while shown(graftwork, "show", batch_id)["status"] != "failed":
        continue

    assert "not parseable" in graftwork("batches", "show", batch_id).stdout
    assert graftwork("batches", "submit", str(tmp_path / "missing")).exit_code == 1
