"""Tests of the demo server as users use it: tools, sessions, restarts, disconnects, bad input."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from openai import OpenAI

from graftwork import Graftwork
from graftwork.demo.tasks import TOOLS, Case, held_out_cases
from tests.end_to_end.conftest import DEMO, DemoServer

PAGE = 16


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form, where the arguments of a call are text."""
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for number, call in enumerate(message.get("tool_calls", ()))
    ]
    sent = {key: value for key, value in message.items() if key != "tool_calls"}
    if message["role"] == "tool":
        sent["tool_call_id"] = "call_0"
    return sent | ({"tool_calls": calls} if calls else {})


def ask(client: OpenAI, case: Case) -> tuple[str, str | None]:
    """Streams one answer. Returns its calls in the model's own form, and the finish reason."""
    names: list[str] = []
    arguments: list[str] = []
    finish = None
    model = client.models.list().data[0].id
    messages, tools = cast("Any", [as_sent(message) for message in case.messages]), cast("Any", case.tools)
    for chunk in client.chat.completions.create(
        model=model, messages=messages, tools=tools, stream=True, temperature=0
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(names):
                names.append(call.function.name or "")
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    calls = zip(names, arguments, strict=True)
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls
    ), finish


def test_tool_calls_stream_through_the_openai_package(server: DemoServer) -> None:
    """Of twenty questions with unseen names, at least eighteen stream exactly the expected call."""
    right = 0

    with OpenAI(base_url=f"{server.url}/v1", api_key=server.key("Plain")) as client:
        for case in held_out_cases("base", 20, seed=5, kind="call"):
            called, finish = ask(client, case)
            right += called == case.expected
            assert finish == ("tool_calls" if called else "stop")

    assert right >= 18


def test_a_second_turn_recomputes_only_what_is_new(server: DemoServer) -> None:
    """A session's second turn recomputes only its new items and at most one page."""
    with Graftwork(server.url, api_key=server.key("Blackbeard")) as client:
        session = client.sessions.create(model="pirate", tools=list(TOOLS.values()), sampling={"temperature": 0})
        first = session.turn("Hello!")
        second = session.turn("Thanks!")

    assert first.usage is not None
    assert second.usage is not None
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    new = second.usage.prompt_tokens - history
    details = second.usage.prompt_tokens_details
    assert new > 0
    assert details.cached_tokens + details.recomputed_tokens == second.usage.prompt_tokens
    assert details.recomputed_tokens <= new + PAGE


def test_messages_that_go_on_find_the_prompt_that_they_asked_to_keep(server: DemoServer) -> None:
    """The second request of a conversation on Messages reads all full pages of the first prompt from the cache, and
    neither answer says that `cache_control` was ignored."""
    marked = {"type": "text", "text": "Where is my parcel? " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    first = {"role": "user", "content": [marked]}
    sent: dict[str, Any] = {"model": "graftwork-demo", "max_tokens": 8, "messages": [first]}

    with httpx.Client(base_url=server.url, headers={"x-api-key": server.key("Plain")}, timeout=60) as client:
        begun = client.post("/v1/messages", json=sent)
        answer = {"role": "assistant", "content": begun.json()["content"]}
        messages = [first, answer, {"role": "user", "content": "When will it come?"}]
        gone_on = client.post("/v1/messages", json=sent | {"messages": messages})

    usage, later = begun.json()["usage"], gone_on.json()["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert later["cache_read_input_tokens"] >= num_prompt // PAGE * PAGE > 0
    assert all("x-graftwork-ignored" not in response.headers for response in (begun, gone_on))


def test_metrics_account_for_the_memory_of_the_engine(server: DemoServer) -> None:
    """The owners in `/metrics` add up to the resident memory of the engine's process, and its model is among them."""
    prefix = 'graftwork_engine_memory_bytes{memory="host",owner="'

    metrics = server.metrics()

    owners = {name.removeprefix(prefix)[:-2]: value for name, value in metrics.items() if name.startswith(prefix)}
    assert sum(owners.values()) == pytest.approx(server.engine().memory_info().rss, rel=0.05)
    assert owners["weights"] > (DEMO / "model" / "model.safetensors").stat().st_size * 0.9


def test_a_quota_of_kv_moves_a_session_down_and_refuses_it_nothing(server: DemoServer) -> None:
    """A tenant with a limit of two pages on the device and three on the host keeps no more there, and its next turn
    recomputes only what is new."""
    page_bytes = 2 * 6 * PAGE * 64 * 4
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.admin_key()}"}) as admin:
        tenant = admin.post("/v1/admin/tenants", json={"name": "Small"}).json()["id"]
        quota = {"max_device_kv_bytes": 2 * page_bytes, "max_host_kv_bytes": 3 * page_bytes}
        assert admin.put(f"/v1/admin/tenants/{tenant}/quota", json=quota).status_code == 200
        key = admin.post(f"/v1/admin/tenants/{tenant}/keys", json={"name": "agent"}).json()["key"]

    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "tools": list(TOOLS.values()), "sampling": {"temperature": 0}}
        path = f"/v1/sessions/{client.post('/v1/sessions', json=body).json()['id']}"
        first = client.post(f"{path}/turns", json={"input": "Hello!"}).json()
        tiers = cache_once(
            client,
            path,
            lambda tiers: tiers["device"]["bytes"] <= 2 * page_bytes and tiers["host"]["bytes"] <= 3 * page_bytes,
        )
        second = client.post(f"{path}/turns", json={"input": "Thanks!"}).json()

    whole_pages = (first["usage"]["total_tokens"] - 1) // PAGE
    assert whole_pages > 5
    assert tiers["disk"]["bytes"] == whole_pages * page_bytes
    assert second["cache"]["cached_tokens"] == whole_pages * PAGE


def test_tenants_of_an_organisation_share_its_kv(server: DemoServer) -> None:
    """Two tenants have no more pages together than their organisation may have, and lose none that the disk can keep."""
    page_bytes = 2 * 6 * PAGE * 64 * 4
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.admin_key()}"}) as admin:
        organisation = admin.post("/v1/admin/organisations", json={"name": "Group"}).json()["id"]
        path, keys = f"/v1/admin/organisations/{organisation}", []
        quota = {"max_device_kv_bytes": 4 * page_bytes, "max_host_kv_bytes": 6 * page_bytes}
        assert admin.put(f"{path}/quota", json=quota).status_code == 200
        for name in ("One", "Two"):
            tenant = admin.post("/v1/admin/tenants", json={"name": name}).json()["id"]
            assert admin.put(f"{path}/tenants/{tenant}").status_code == 200
            keys.append(admin.post(f"/v1/admin/tenants/{tenant}/keys", json={"name": "agent"}).json()["key"])

    sessions = []
    for key in keys:
        client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        body = {"model": client.get("/v1/models").json()["data"][0]["id"], "tools": list(TOOLS.values())}
        session = f"/v1/sessions/{client.post('/v1/sessions', json=body).json()['id']}"
        usage = client.post(f"{session}/turns", json={"input": "Hello!"}).json()["usage"]
        sessions.append((client, session, (usage["total_tokens"] - 1) // PAGE * page_bytes))
    (one, first, first_bytes), (two, second, second_bytes) = sessions

    def is_within(of_second: dict[str, Any]) -> bool:
        of_first = one.get(f"{first}/cache").json()["tiers"]
        sums = [of_first[tier]["bytes"] + of_second[tier]["bytes"] for tier in ("device", "host", "disk")]
        return bool(sums[0] <= 4 * page_bytes and sums[1] <= 6 * page_bytes and sums[2] == first_bytes + second_bytes)

    cache_once(two, second, is_within)
    for client in (one, two):
        client.close()

    assert min(first_bytes, second_bytes) > 6 * page_bytes


def cache_once(client: httpx.Client, path: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the tiers of a session's history once they meet a condition."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        tiers: dict[str, Any] = client.get(f"{path}/cache").json()["tiers"]
        if condition(tiers):
            return tiers
    raise AssertionError(f"the session's history is still at {tiers}")


def test_a_client_that_disconnects_frees_its_pages(server: DemoServer) -> None:
    """After a client drops a stream, the page gauges return to their former values."""
    gauges = [f'graftwork_kv_pages{{state="{state}",tier="device"}}' for state in ("free", "owned", "in_flight")]
    headers = {"authorization": f"Bearer {server.key('Plain')}"}
    before = server.metrics_once(lambda metrics: metrics["graftwork_running_requests"] == 0)
    model = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"]
    body = {"model": model, "prompt": "Once ", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    with httpx.stream("POST", f"{server.url}/v1/completions", headers=headers, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        for _ in range(5):
            next(lines)
        assert server.metrics()["graftwork_running_requests"] == 1

    after = server.metrics_once(lambda metrics: metrics["graftwork_running_requests"] == 0)
    assert [after[gauge] for gauge in gauges] == [before[gauge] for gauge in gauges]


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_session_goes_on_after_a_restart_exactly_where_it_was(restartable: DemoServer, ending: str) -> None:
    """A second turn after a stop or a kill of the server equals the second turn without a restart."""
    server = restartable

    def begin() -> str:
        with Graftwork(server.url, api_key=server.key("Corner")) as client:
            session = client.sessions.create(model="helpdesk", sampling={"temperature": 0})
            session.turn("Hello!")
            return session.id

    def go_on(session_id: str) -> tuple[str, list[str], int]:
        with Graftwork(server.url, api_key=server.key("Corner")) as client:
            session = client.sessions.get(session_id)
            turn = session.turn("Who are you?")
            assert turn.usage is not None
            return turn.text, [item.text for item in session.items()], turn.usage.prompt_tokens

    server.start()
    undisturbed = go_on(begin())
    interrupted = begin()
    if ending == "stop":
        assert server.stop() == 0
    else:
        server.kill()
    server.start()
    resumed = go_on(interrupted)
    assert server.stop() == 0

    assert resumed == undisturbed


def test_bad_input_is_told_what_is_wrong(server: DemoServer) -> None:
    """A wrong key is a 401, unknown and foreign ids are equal 404s, and a prompt over the context is a 400 with both
    numbers."""
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key('Plain')}"}) as plain:
        model = plain.get("/v1/models").json()["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        with Graftwork(server.url, api_key=server.key("Corner")) as client:
            foreign_id = client.sessions.create(model=model).id

        wrong_key = plain.post("/v1/chat/completions", headers={"authorization": "Bearer gw_x_y"}, json=chat)
        foreign, unknown = plain.get(f"/v1/sessions/{foreign_id}"), plain.get("/v1/sessions/ses_nobody")
        foreign_adapter = plain.post("/v1/chat/completions", json=chat | {"model": "pirate"})
        too_long = plain.post("/v1/completions", json={"model": model, "prompt": [5] * 5000, "max_tokens": 5})

    assert wrong_key.status_code == 401
    assert (foreign.status_code, unknown.status_code) == (404, 404)
    assert foreign.text.replace(foreign_id, "ID") == unknown.text.replace("ses_nobody", "ID")
    assert foreign_adapter.status_code == 404
    assert too_long.status_code == 400
    assert {"5000", "2048"} <= set(re.findall(r"\d+", too_long.json()["error"]["message"]))
    assert all("x-request-id" in answer.headers for answer in (wrong_key, foreign, unknown, too_long))


def test_a_full_queue_is_refused_with_the_time_to_wait(restartable: DemoServer) -> None:
    """With one place and a queue of one, two requests are served and the others get a 429 with retry-after."""
    restartable.settings = {"GRAFTWORK_MAX_RUNNING": "1", "GRAFTWORK_MAX_WAITING": "1"}
    restartable.start()
    headers = {"authorization": f"Bearer {restartable.key('Plain')}"}
    body = {"model": "graftwork-demo", "prompt": "Once ", "max_tokens": 200, "ignore_eos": True}

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=restartable.url, headers=headers, timeout=60) as client:
            return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8))))

    answers = asyncio.run(crowd())

    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert len(refused) <= 6
    assert all(int(answer.headers["retry-after"]) >= 1 and answer.headers["retry-after-ms"] for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"weights": b"\x80\x04\x95pickled"}, "weights"),
        ({"weights": b"truncated"}, "weights"),
        ({"config": b"{}"}, "config"),
    ],
)
def test_bad_adapters_are_refused_and_leave_nothing(server: DemoServer, files: dict[str, bytes], named: str) -> None:
    """Pickles, truncated files and empty configs are a 422 that names the part, and the list of adapters is
    unchanged."""
    folder = DEMO / "adapters" / "terse"
    good = {
        "config": (folder / "adapter_config.json").read_bytes(),
        "weights": (folder / "adapter_model.safetensors").read_bytes(),
    }
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key('Plain')}"}) as client:
        before = client.get("/v1/adapters").json()
        answer = client.post("/v1/adapters", data={"name": "bad"}, files=good | files)
        after = client.get("/v1/adapters").json()

    assert answer.status_code == 422
    assert answer.json()["error"]["param"].startswith(named)
    assert after == before
