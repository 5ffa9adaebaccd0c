"""Tests of `graftwork bench` against a real gateway, whose engine answers with a fixed text."""

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftwork.api.cli.bench.figures import TenantFigures
from graftwork.api.cli.bench.runs import LIGHT, Fairness, Phase, claims
from graftwork.platform.errors import CapacityContended
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway, listening_gateway
from tests.api.in_process_gateway import write_model_folder


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[LiveGateway]:
    model = write_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    with listening_gateway(tmp_path_factory.mktemp("data"), model, sqlite_template) as gateway:
        yield gateway


def options(live: LiveGateway) -> tuple[str, ...]:
    return "--url", live.url, "--key", live.key, "--model", "tiny", "--seconds", "2", "--json"


def test_throughput_counts_what_the_server_served(live: LiveGateway, graftwork: Graftwork, tmp_path: Path) -> None:
    """Each level is a phase, and the chats that were sent are those that the engine got; the page is written."""
    before = len(live.engine.requests)

    result = graftwork("bench", "throughput", *options(live), "--most", "3", "--html", str(tmp_path / "page.html"))

    assert result.exit_code == 0, result.output
    phases = json.loads(result.stdout)["phases"]
    assert [phase["name"] for phase in phases] == ["1 outstanding", "2 outstanding"]
    assert sum(phase["tenants"][0]["sent"] for phase in phases) >= len(live.engine.requests) - before > 0
    for phase in phases:
        (tenant,) = phase["tenants"]
        assert tenant["answered"] > 0
        assert tenant["refused"] == tenant["failed"] == 0
        assert tenant["ttft_p50"] <= tenant["ttft_p99"]
    assert "1 outstanding" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_refusals_are_counted_and_the_client_waits_as_it_is_told(live: LiveGateway, graftwork: Graftwork) -> None:
    """A client that is refused with a retry-after of an hour sends nothing more in its phase."""
    live.engine.refusals = deque([CapacityContended("The queue is full.", retry_after_s=3600.0)])

    result = graftwork("bench", "throughput", *options(live), "--most", "1")

    (tenant,) = json.loads(result.stdout)["phases"][0]["tenants"]
    assert (tenant["sent"], tenant["refused"], tenant["answered"]) == (1, 1, 0)


def test_fairness_compares_everybody_with_themselves_alone(live: LiveGateway, graftwork: Graftwork) -> None:
    """The flood's phase has all four tenants, the others' phases one each, and the exit status says whether all holds."""
    result = graftwork("bench", "fairness", *options(live), "--outstanding", "2")

    found = json.loads(result.stdout)
    assert {"flood", "agents"} <= {one["tenant"] for one in found["flood"]["tenants"]}
    assert [one["tenant"] for one in found["solo"]["agents"]["tenants"]] == ["agents"]
    assert found["baseline"] is None
    assert found["capacity_per_s"] > 0
    assert result.exit_code == int(any(claim["holds"] is False for claim in found["claims"]))


@pytest.mark.slow
def test_fairness_measures_two_demo_servers_in_turns(graftwork: Graftwork) -> None:
    """Without --url, a second server serves first come first served, and each turn has a ratio of both."""
    result = graftwork("bench", "fairness", "--seconds", "6", "--outstanding", "4", "--json")

    found = json.loads(result.stdout)
    assert len(found["ratios"]) == 3
    assert min(found["ratios"]) > 0
    assert found["baseline"]["seconds"] == pytest.approx(found["flood"]["seconds"]) == pytest.approx(6)


def phase(
    name: str,
    ttft_p99: float | None,
    tokens_per_s: float,
    jain: float | None = None,
    *,
    sent: int = 100,
    refused: int = 0,
) -> Phase:
    tenants = tuple(
        TenantFigures(light, sent, sent - refused, refused, 0, ttft_p99, ttft_p99, 0.1, 5.0) for light in LIGHT
    )
    return Phase(name, 10.0, tenants, tokens_per_s, 3 * tokens_per_s, 1.0, jain)


def test_each_promise_is_judged_at_its_limit() -> None:
    """Twice the solo p99, an index of 0.95 and 0.97 of the throughput in the middle turn hold; a little beyond does not."""
    solo = {light: phase("alone", 0.1, 50.0) for light in LIGHT}

    good = Fairness(1.0, solo, phase("flood", 0.2, 97.0, 0.95), phase("fcfs", 9.0, 100.0), (0.5, 0.97, 1.2))
    bad = Fairness(1.0, solo, phase("flood", 0.21, 96.0, 0.94), phase("fcfs", 9.0, 100.0), (0.5, 0.96, 1.2))
    silent = Fairness(1.0, solo, phase("flood", None, 97.0))
    refused = Fairness(1.0, solo, phase("flood", 0.1, 97.0, refused=1))

    assert [claim.holds for claim in claims(good)] == [True] * 4
    assert [claim.holds for claim in claims(bad)] == [False] * 4
    assert [claim.holds for claim in claims(silent)] == [False, False, None]
    assert [claim.holds for claim in claims(refused)] == [False, False, None]


def test_few_answers_decide_nothing() -> None:
    """With 99 chats the p99 is the largest value, so a promise that would hold is undecided, and one that fails fails."""
    solo = {light: phase("alone", 0.1, 50.0) for light in LIGHT}

    few = Fairness(1.0, solo, phase("flood", 0.2, 97.0, sent=99))
    slow = Fairness(1.0, solo, phase("flood", 0.3, 97.0, sent=99))

    assert [claim.verdict for claim in claims(few)] == ["undecided"] * 3
    assert [claim.verdict for claim in claims(slow)] == ["fails", "fails", "undecided"]


def test_a_setting_without_a_value_is_refused_before_a_server_starts(graftwork: Graftwork) -> None:
    """One line names the setting and the form that is wanted."""
    result = graftwork("bench", "throughput", "--setting", "max_running")

    assert result.exit_code == 1
    assert "--setting max_running has another form than NAME=VALUE" in result.stderr


def test_png_needs_the_extra(graftwork: Graftwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib one line says what to install, and no server is started or asked."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    result = graftwork("bench", "throughput", "--png", "charts.png")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'graftwork[plot]'" in result.stderr
