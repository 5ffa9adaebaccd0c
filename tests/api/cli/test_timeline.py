"""Tests of `graftwork trace`: the drawing, the Chrome trace, and the switches."""

import json
from pathlib import Path

import httpx
import pytest

from graftwork.api.cli.console.chrome_trace import chrome_trace
from graftwork.api.cli.console.timeline_chart import Bar, bars, draw, show_timeline
from graftwork.api.openapi.example_objects import TIMELINE
from graftwork.platform.answers.timelines import Timeline
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway
from tests.api.in_process_gateway import chat

EXAMPLE = Timeline.read(TIMELINE)


@pytest.fixture
def graftwork(graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> Graftwork:
    """With the gateway's address and keys in the environment."""
    for name, value in (("URL", live.url), ("API_KEY", live.key), ("ADMIN_KEY", live.admin_key)):
        monkeypatch.setenv(f"GRAFTWORK_{name}", value)
    return graftwork


def ask(live: LiveGateway, **headers: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {live.key}", **headers}
    return httpx.post(f"{live.url}/v1/chat/completions", json=chat(), headers=headers).raise_for_status()


def test_a_request_is_drawn_and_written(graftwork: Graftwork, live: LiveGateway, tmp_path: Path) -> None:
    """The drawing names all stages, the JSON is the answer of the server, and the file is a Chrome trace."""
    request_id = ask(live).headers["x-request-id"]
    file = tmp_path / "trace.json"
    drawn = graftwork("trace", request_id, "--chrome", str(file))
    as_json = graftwork("trace", request_id, "--json")

    assert drawn.exit_code == 0, drawn.output
    for name in ("authenticate", "encode", "queue", "prefill", "decode", "finish", "x-graftwork-trace: 1"):
        assert name in drawn.stdout
    assert json.loads(as_json.stdout)["id"] == request_id
    assert json.loads(file.read_text())["otherData"] == {"request_id": request_id}


def test_the_operator_sees_a_tenants_request(
    graftwork: Graftwork, live: LiveGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the admin key alone, any tenant's request is drawn."""
    request_id = ask(live).headers["x-request-id"]
    monkeypatch.delenv("GRAFTWORK_API_KEY")

    assert graftwork("trace", request_id).exit_code == 0


def test_an_unknown_request_is_an_error(graftwork: Graftwork) -> None:
    """The error says what is kept."""
    result = graftwork("trace", "req_unknown")

    assert result.exit_code == 1
    assert "no timeline" in result.output


def test_a_session_is_switched_on_and_off(graftwork: Graftwork) -> None:
    """What is on is listed, and after `off` nothing is."""
    on = graftwork("trace", "on", "--session", "ses_1", "--token-ids")
    listed = json.loads(graftwork("trace", "list", "--json").stdout)["data"]
    off = graftwork("trace", "off", "--session", "ses_1")

    assert (on.exit_code, off.exit_code) == (0, 0), on.output + off.output
    assert [(one["id"], one["token_ids"]) for one in listed] == [("ses_1", True)]
    assert "Nothing is switched on" in off.stdout


@pytest.mark.parametrize(
    "arguments",
    [["on"], ["on", "--tenant", "a", "--session", "b"], ["off"], ["req_1", "--token-ids"], ["on", "--chrome", "x"]],
)
def test_wrong_usage(graftwork: Graftwork, arguments: list[str]) -> None:
    """A switch needs one target, and what belongs to a request is refused with a switch."""
    assert graftwork("trace", *arguments).exit_code == 2


# ---- drawing ----------------------------------------------------------------------------------------------------


def test_every_stage_and_span_has_a_bar() -> None:
    """The lines of the chart are the stages, then the engine and its spans by their start."""
    names = [bar.name.strip() for bar in bars(EXAMPLE)]

    assert names[:10] == [stage.name for stage in EXAMPLE.stages]
    assert names[10:] == ["engine", "queue", "adapter_load", "prefill", "decode"]


def test_bars_stand_under_one_another() -> None:
    """Drawn over the whole width, a bar begins in the column where the one before ends, and the last ends the width."""
    halves = [draw(Bar("a", 0.0, 50.0), 100.0, 40), draw(Bar("b", 50.0, 50.0), 100.0, 40)]

    assert halves == ["█" * 20, " " * 20 + "█" * 20]
    assert draw(Bar("c", 0.0, 0.001), 100.0, 40) == "▏"
    assert len(draw(Bar("d", 99.99, 0.01), 100.0, 40)) <= 40
    assert draw(Bar("e", 0.0, 0.0), 0.0, 40) == ""


def test_a_hostile_name_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Markup and control characters in a model's name or a client's id are shown, and not obeyed."""
    show_timeline(Timeline.read({**TIMELINE, "adapter": "[red]x[/red]\x1b[31m", "client_request_id": "[bold]"}))

    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown
    assert "[bold]" in shown
    assert "\x1b" not in shown


# ---- Chrome -----------------------------------------------------------------------------------------------------


def test_the_chrome_trace_has_the_form_that_viewers_load() -> None:
    """Each event has what the Trace Event Format asks for: complete events with times in microseconds, in named lanes."""
    content = json.loads(json.dumps(chrome_trace(EXAMPLE)))

    lanes = {event["tid"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    complete = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {event["ph"] for event in content["traceEvents"]} == {"X", "M"}
    assert {event["tid"] for event in complete} == lanes == {1, 2, 3}
    decode = [event for event in complete if event["name"] == "decode" and event["tid"] == 3]
    assert [(event["ts"], event["dur"], event["args"]["tokens"]) for event in decode] == [(49500, 46000, 5)]


def test_sums_and_the_prompts_tiers_are_in_the_chrome_trace() -> None:
    """Masks, drafts, detokenising and writes have a bar each, one after another, and the engine's has the prompt's tiers."""
    timeline = Timeline.read({**TIMELINE, "writes": 9, "write_ms": 1.5})
    complete = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]

    sums = [
        (event["name"], event["ts"], event["dur"], event["args"]["count"]) for event in complete if event["tid"] == 2
    ]
    (engine,) = [event for event in complete if event["name"] == "engine"]
    assert sums == [
        ("masks of decode", 0, 310, 7),
        ("drafts of decode", 310, 120, 4),
        ("detokenise", 430, 210, 4),
        ("network", 640, 1500, 9),
    ]
    assert engine["args"]["prompt"]["device"] == 16
    assert (engine["ts"], engine["dur"]) == (3500, 92000)


def test_masks_and_drafts_are_drawn_with_their_time() -> None:
    """The line of a span says how many masks were filled and how long masks and drafts took."""
    decode = [bar for bar in bars(EXAMPLE) if bar.name.strip() == "decode"][-1]  # the engine's, after the stage

    assert "drafts 3/4, drafting 0.1 ms, 7 masks 0.3 ms" in decode.figures


def test_events_of_a_lane_nest() -> None:
    """In each lane, two events are apart or one holds the other: others would be drawn wrong."""
    complete = [event for event in chrome_trace(EXAMPLE)["traceEvents"] if event["ph"] == "X"]
    for one in complete:
        for other in complete:
            if one is other or one["tid"] != other["tid"]:
                continue
            (first, last), (begin, end) = sorted((event["ts"], event["ts"] + event["dur"]) for event in (one, other))
            assert begin >= last or end <= last or (first == begin and last <= end)
