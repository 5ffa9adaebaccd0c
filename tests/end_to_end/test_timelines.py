"""The timeline of real requests, on the demo's engine."""

import json
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import DemoServer

TRACED = {"x-graftwork-trace": "1"}


def ask(server: DemoServer, key: str, *, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    """The timeline of one chat on the tenant's first adapter."""
    authorization = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=authorization, timeout=120) as client:
        model = client.get("/v1/models").json()["data"][-1]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Where is my parcel? " * 20}],
            "max_tokens": 24,
        }
        answer = client.post("/v1/chat/completions", json=body | {"temperature": 0} | more, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = client.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline").json()
        return found


@pytest.mark.parametrize("stream", [False, True])
def test_the_stages_of_a_request_sum_to_the_whole(server: DemoServer, stream: bool) -> None:
    """The gateway's stages and the engine's spans each follow one another without a gap, and the engine's lie within the
    time between sending and end.
    """
    found = ask(server, server.key("Plain"), headers=TRACED, stream=stream, ignore_eos=True)

    assert sum(stage["duration_ms"] for stage in found["stages"]) == pytest.approx(found["total_ms"], abs=0.02)
    assert len(found["stages"]) == 10
    (generation,) = found["generations"]
    (run,) = generation["engines"]
    tiles = [span for span in run["spans"] if "inside" not in span]
    ends = [run["start_ms"], *(span["start_ms"] + span["duration_ms"] for span in tiles)]
    assert [span["start_ms"] for span in tiles] == pytest.approx(ends[:-1], abs=0.01)
    assert generation["sent_ms"] <= run["start_ms"]
    assert ends[-1] <= generation["ended_ms"]
    prefill = [span for span in tiles if span["name"] == "prefill"]
    decode = [span for span in tiles if span["name"] == "decode"]
    assert sum(span["tokens"] for span in prefill) == generation["prompt"]["recomputed"]
    of_prefill = 1 + sum(span.get("accepted", 0) for span in prefill)  # its last step gives the first tokens
    assert of_prefill + sum(span["tokens"] for span in decode) == generation["completion_tokens"] == 24


def test_a_stop_string_leaves_most_of_the_spans(server: DemoServer) -> None:
    """A request that the gateway ends by a stop string still shows its queue and its prefill."""
    found = ask(server, server.key("Plain"), headers=TRACED, stop=["e"])

    names = {span["name"] for span in found["generations"][0]["engines"][0]["spans"]}
    assert {"queue", "prefill"} <= names


def test_a_request_that_asks_for_no_trace_has_the_stages_alone(server: DemoServer) -> None:
    """Without the header, the engine reports nothing, and the stages are there."""
    found = ask(server, server.key("Plain"), headers={})

    assert (found["traced"], found["generations"][0]["engines"]) == (False, [])
    assert len(found["stages"]) == 10


def test_the_log_has_no_text(server: DemoServer) -> None:
    """The lines of these requests are JSON with the milliseconds of each stage, and have no word of the prompt."""
    ask(server, server.key("Plain"), headers=TRACED)
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]

    assert any("stages_ms" in line for line in lines)
    assert "parcel" not in server.log.replace("Where is my parcel?", "", 1)  # the hint for newcomers at the start
