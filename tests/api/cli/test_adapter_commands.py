"""Tests of `graftwork adapters` against a listening gateway."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.adapter_files import config_bytes, tensors, weights_bytes
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """With the gateway's address and keys in the environment."""
    for name, value in (("URL", live.url), ("API_KEY", live.key), ("ADMIN_KEY", live.admin_key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pirate"
    path.mkdir()
    (path / "adapter_config.json").write_bytes(config_bytes())
    (path / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(0)))
    return path


def answer(graftwork: Graftwork, *arguments: str) -> Any:
    """What a command answers with `--json`."""
    result = graftwork(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_adapters_from_folder_to_rollback(graftwork: Graftwork, folder: Path) -> None:
    """An adapter is pushed twice, promoted, rolled back, deleted, restored and erased."""
    first = answer(graftwork, "adapters", "push", str(folder), "--name", "support")
    (folder / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(1)))
    graftwork("adapters", "promote", "support", "1")
    second = graftwork("adapters", "push", str(folder), "--name", "support", "--no-promote")
    promoted = graftwork("adapters", "promote", "support", "2")
    rolled_back = answer(graftwork, "adapters", "rollback", "support")
    shown = graftwork("adapters", "show", "support")
    history = graftwork("adapters", "history", "support")
    deleted = graftwork("adapters", "delete", "support", "--yes")
    restored = graftwork("adapters", "restore", "support")
    graftwork("adapters", "delete", "support", "--yes", "--erase")

    assert len(first["versions"]) == 1
    assert "support@2 is ready" in second.stdout
    assert promoted.stdout == "support@prod → version 2 (before: 1)\n"
    assert rolled_back["target"] == {"version": 1}
    assert "prod → 1" in shown.stdout
    assert "rollback" in history.stdout
    assert deleted.stdout == "Deleted support.\n"
    assert restored.stdout == "Restored support.\n"
    assert "adapters push" in graftwork("adapters", "list").stdout


def test_a_roll_out_from_start_to_cancel(graftwork: Graftwork, folder: Path) -> None:
    """A roll-out is started with steps and limits, listed, shown and cancelled; a step of another form is refused."""
    graftwork("adapters", "push", str(folder), "--name", "support")
    graftwork("adapters", "promote", "support", "1")
    (folder / "adapter_model.safetensors").write_bytes(weights_bytes(tensors(1)))
    graftwork("adapters", "push", str(folder), "--name", "support")
    steps = ("--step", "10:5m", "--step", "50%:90")
    limits = ("--min-requests", "5", "--error-rate", "0.1", "--first-token-ratio", "none")

    wrong = graftwork("adapters", "rollouts", "start", "support", "2", "--step", "ten")
    started = answer(graftwork, "adapters", "rollouts", "start", "support", "2", *steps, *limits)
    listed = graftwork("adapters", "rollouts", "list", "support")
    shown = graftwork("adapters", "rollouts", "show", "support", started["id"])
    cancelled = graftwork("adapters", "rollouts", "cancel", "support", started["id"])
    graftwork("adapters", "delete", "support", "--yes", "--erase")

    assert wrong.exit_code == 2
    assert started["steps"] == [{"weight": 10, "seconds": 300}, {"weight": 50, "seconds": 90}]
    assert started["limits"] == {
        "min_requests": 5,
        "error_rate": 0.1,
        "refusal_rate": 0.05,
        "first_token_ratio": None,
    }
    assert started["id"] in listed.stdout
    assert "1 of 2 (10 %)" in shown.stdout
    assert "cancelled by key_" in cancelled.stdout


def test_a_bad_upload_names_the_tensor(graftwork: Graftwork, folder: Path) -> None:
    """The server's reason for a bad upload is printed in one line, with status 1."""
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])

    result = graftwork("adapters", "push", str(folder))

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: weights")
    assert result.stderr.count("\n") == 1


def test_tags_and_defaults_by_commands(graftwork: Graftwork, folder: Path) -> None:
    """`adapters change` sets tags and defaults from a file, and `list` finds by tag; a file without JSON is refused."""
    defaults = folder / "defaults.json"
    defaults.write_text('{"system": "Be kind."}')
    graftwork("adapters", "push", str(folder), "--name", "tagged", "--run", "run-42")

    changed = answer(graftwork, "adapters", "change", "tagged", "--tag", "sea", "--defaults", str(defaults))
    found = answer(graftwork, "adapters", "list", "--tag", "sea")["data"]
    shown = graftwork("adapters", "show", "tagged")
    defaults.write_text("no JSON")
    wrong = graftwork("adapters", "change", "tagged", "--defaults", str(defaults))
    graftwork("adapters", "delete", "tagged", "--yes", "--erase")

    assert (changed["tags"], changed["defaults"]) == (["sea"], {"system": "Be kind."})
    assert [each["name"] for each in found] == ["tagged"]
    assert found[0]["versions"][0]["provenance"]["run"] == "run-42"
    assert "sea" in shown.stdout
    assert wrong.exit_code == 2


def test_what_the_server_fetches(graftwork: Graftwork) -> None:
    """A fetch is begun under its name, listed, and cancelled; a source that is not allowed is an error with its reason."""
    source, digest = "https://files.test/support", "sha256:" + "0" * 64
    begun = graftwork("adapters", "push", "fetched", source, "--digest", digest, "--no-wait")
    (upload,) = answer(graftwork, "adapters", "uploads", "list", "fetched")["data"]
    listed = graftwork("adapters", "uploads", "list")
    cancelled = graftwork("adapters", "uploads", "cancel", upload["id"])
    refused = graftwork("adapters", "push", "fetched", "s3://models/support")
    unnamed = graftwork("adapters", "push", source)
    twice = graftwork("adapters", "push", "fetched", "./support", "--name", "support")

    assert source in begun.stdout
    assert (upload["name"], upload["source"]) == ("fetched", source)
    assert upload["id"] in listed.stdout
    assert cancelled.stdout == f"Cancelled {upload['id']}.\n"
    assert "does not fetch adapters from" in refused.output
    assert "Name the adapter" in unnamed.output
    assert "once" in twice.output


def test_a_folder_goes_in_parts(graftwork: Graftwork, folder: Path) -> None:
    """A push by the command line sends parts, and the adapter has the bytes that were sent."""
    pushed = answer(graftwork, "adapters", "push", "parted", str(folder))
    (upload,) = answer(graftwork, "adapters", "uploads", "list", "parted")["data"]

    assert upload["status"] == "ready"
    assert upload["received_bytes"] == pushed["versions"][0]["size_bytes"]
