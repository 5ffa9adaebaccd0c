"""Tests of sessions over HTTP: what the routes add to the session service."""

import asyncio
import json
import re
from typing import Any

import pytest

from graftwork.platform.errors import CapacityContended, Unavailable
from graftwork.platform.quotas.quota import Quota
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, session_frames

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


async def new_session(tenant: TestTenant, **fields: Any) -> str:
    answer = await tenant.client.post("/v1/sessions", json={"model": "tiny", **fields})
    assert answer.status_code == 201, answer.text
    session_id: str = answer.json()["id"]
    return session_id


async def say(tenant: TestTenant, session_id: str, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    answer = await tenant.client.post(f"/v1/sessions/{session_id}/turns", json={"input": text, **fields})
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    return turn


async def test_create(tenant: TestTenant) -> None:
    """A session names the adapter version that it is pinned to."""
    pushed = await tenant.push_adapter()

    answer = await tenant.client.post("/v1/sessions", json={"model": "pirate", "metadata": {"a": "b"}})

    body = answer.json()
    assert (answer.status_code, body["object"], body["status"], body["head"]) == (201, "session", "idle", None)
    assert body["model"] == {"name": "pirate", "version": 1, "digest": pushed["versions"][0]["digest"]}
    assert body["metadata"] == {"a": "b"}


async def test_turn(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn answers output, checkpoint, usage and cache, and the next turn continues it."""
    session_id = await new_session(tenant)

    first = await say(tenant, session_id)
    second = await say(tenant, session_id, if_head=first["checkpoint_id"])

    assert (first["object"], first["status"]) == ("turn", "completed")
    assert first["output"][0]["content"][0]["text"] == gateway.engine.text
    assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    history = gateway.engine.requests[0].prompt_token_ids
    assert gateway.engine.requests[1].prompt_token_ids[: len(history)] == history
    assert second["checkpoint_id"] != first["checkpoint_id"]


async def test_streamed_turn(gateway: Gateway, tenant: TestTenant) -> None:
    """A streamed turn is server-sent events with their numbers as ids, and exactly one terminal event."""
    session_id = await new_session(tenant)

    answer = await tenant.client.post(f"/v1/sessions/{session_id}/turns", json={"input": "Hello", "stream": True})

    frames = session_frames(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [frame["id"] for frame in frames] == [str(seq) for seq in range(1, len(frames) + 1)]
    assert (frames[0]["event"], frames[-1]["event"]) == ("turn.created", "turn.completed")
    data = [json.loads(frame["data"]) for frame in frames]
    assert all(frame["event"] == entry["type"] for frame, entry in zip(frames, data, strict=True))
    assert "".join(entry.get("delta", "") for entry in data) == gateway.engine.text


async def test_replay(tenant: TestTenant) -> None:
    """Events are replayed after a number, given in the query or as Last-Event-ID."""
    session_id = await new_session(tenant)
    await say(tenant, session_id)
    path = f"/v1/sessions/{session_id}/events"

    whole = session_frames((await tenant.client.get(path)).text)
    after = session_frames((await tenant.client.get(f"{path}?after=2")).text)
    resumed = session_frames((await tenant.client.get(path, headers={"last-event-id": "2"})).text)

    assert whole[2:] == after == resumed
    assert after
    assert (await tenant.client.get(path, headers={"last-event-id": "two"})).status_code == 422


async def test_tools(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn awaits its calls' outputs; the last of them starts the next turn, and sending it again changes nothing."""
    session_id = await new_session(tenant, tools=[TOOL])
    gateway.engine.text = f"{CALL}\n{CALL}"
    turn = await say(tenant, session_id)
    gateway.engine.text = "It is sunny."
    first, second = [call["call_id"] for call in turn["tool_calls"]]
    path = f"/v1/sessions/{session_id}/tool_outputs"

    partial = await tenant.client.post(path, json={"outputs": [{"call_id": first, "output": "sunny"}]})
    done = await tenant.client.post(path, json={"outputs": [{"call_id": second, "output": {"degrees": 20}}]})
    again = await tenant.client.post(path, json={"outputs": [{"call_id": second, "output": {"degrees": 20}}]})
    other = await tenant.client.post(path, json={"outputs": [{"call_id": second, "output": "rain"}]})

    assert turn["status"] == "awaiting_tool"
    assert (partial.status_code, partial.json()["status"]) == (200, "awaiting_tool")
    assert [call["call_id"] for call in partial.json()["tool_calls"]] == [second]
    assert done.json()["output"][0]["content"][0]["text"] == "It is sunny."
    assert (again.status_code, again.json()["id"]) == (200, done.json()["id"])
    assert other.status_code == 409


async def test_outputs_that_are_stored_can_be_read(gateway: Gateway, tenant: TestTenant) -> None:
    """The stored outputs and the open calls can be read, also after a turn failed."""
    session_id = await new_session(tenant, tools=[TOOL])
    path = f"/v1/sessions/{session_id}/tool_outputs"
    none = (await tenant.client.get(path)).json()
    gateway.engine.text = f"{CALL}\n{CALL}"
    first, second = [call["call_id"] for call in (await say(tenant, session_id))["tool_calls"]]
    given = [{"call_id": first, "output": "sunny"}, {"call_id": second, "output": '{"degrees": 20}'}]

    partial = await tenant.client.post(path, json={"outputs": given[:1]})
    some = (await tenant.client.get(path)).json()
    gateway.engine.refusal = Unavailable("No engine.")
    refused = await tenant.client.post(path, json={"outputs": given[1:]})
    stored = (await tenant.client.get(path)).json()
    gateway.engine.refusal = None
    again = await tenant.client.post(path, json={"outputs": stored["outputs"][:1]})

    assert (none["status"], none["outputs"], none["tool_calls"]) == ("idle", [], [])
    assert some == partial.json()
    assert refused.status_code == 503
    assert (stored["status"], stored["outputs"], stored["tool_calls"]) == ("awaiting_tool", given, [])
    assert again.json()["status"] == "awaiting_tool"
    assert (await tenant.client.get(path)).json()["outputs"] == []


async def test_items(tenant: TestTenant) -> None:
    """The history reads oldest first, page by page."""
    session_id = await new_session(tenant)
    await say(tenant, session_id, "One")
    await say(tenant, session_id, "Two")
    path = f"/v1/sessions/{session_id}/items"

    first = (await tenant.client.get(f"{path}?limit=3")).json()
    rest = (await tenant.client.get(f"{path}?limit=3&after={first['last_id']}")).json()

    items = first["data"] + rest["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant"]
    assert items[2]["content"][0]["text"] == "Two"
    assert (first["has_more"], rest["has_more"]) == (True, False)


async def test_fork_and_rewind(tenant: TestTenant) -> None:
    """Forks share a history and continue separately; a rewound session continues from an earlier checkpoint."""
    session_id = await new_session(tenant)
    first = await say(tenant, session_id, "One")
    await say(tenant, session_id, "Two")

    forks = await tenant.client.post(f"/v1/sessions/{session_id}/fork", json={"at": first["checkpoint_id"], "count": 2})
    rewound = await tenant.client.post(f"/v1/sessions/{session_id}/rewind", json={"to": first["checkpoint_id"]})

    assert forks.status_code == 201
    assert [fork["head"] for fork in forks.json()["data"]] == [first["checkpoint_id"]] * 2
    assert rewound.json()["head"] == first["checkpoint_id"]
    await say(tenant, forks.json()["data"][0]["id"], "Three")


async def test_patch(tenant: TestTenant) -> None:
    """A change of the model answers how many tokens of KV are lost."""
    await tenant.push_adapter()
    session_id = await new_session(tenant)
    await say(tenant, session_id)

    moved = await tenant.client.patch(f"/v1/sessions/{session_id}", json={"model": "pirate"})
    noted = await tenant.client.patch(f"/v1/sessions/{session_id}", json={"metadata": {"k": "v"}})

    assert moved.json()["model"]["name"] == "pirate"
    assert moved.json()["kv_given_up"]["tokens"] > 0
    assert noted.json()["metadata"] == {"k": "v"}


async def test_other_verbs(tenant: TestTenant) -> None:
    """Suspend, prefetch, cancel and cache answer; a closed session is readable and takes no turn."""
    session_id = await new_session(tenant)
    await say(tenant, session_id)
    path = f"/v1/sessions/{session_id}"

    assert (await tenant.client.post(f"{path}/suspend")).json()["status"] == "suspended"
    assert (await tenant.client.post(f"{path}/prefetch")).status_code == 200
    assert (await tenant.client.post(f"{path}/cancel")).status_code == 200
    assert (await tenant.client.get(f"{path}/cache")).json()["tiers"]["device"]["tokens"] == 0
    assert (await tenant.client.delete(path)).json()["status"] == "closed"
    assert (await tenant.client.get(path)).json()["status"] == "closed"
    assert (await tenant.client.post(f"{path}/turns", json={"input": "x"})).status_code == 409
    listed = (await tenant.client.get("/v1/sessions")).json()
    assert [session["id"] for session in listed["data"]] == [session_id]


async def test_conflicts(gateway: Gateway, tenant: TestTenant) -> None:
    """A moved head and a second running turn are conflicts; a cancelled turn has that status."""
    session_id = await new_session(tenant)
    path = f"/v1/sessions/{session_id}/turns"
    gateway.engine.holds_after = 2
    running = asyncio.create_task(tenant.client.post(path, json={"input": "x"}))
    await gateway.engine.held.wait()

    second = await tenant.client.post(path, json={"input": "y"})
    await tenant.client.post(f"/v1/sessions/{session_id}/cancel")
    moved = await tenant.client.post(path, json={"input": "y", "if_head": "ckp_0"})

    assert (await running).json()["status"] == "cancelled"
    assert second.status_code == 409
    assert (moved.status_code, moved.json()["error"]["code"]) == (409, "head_moved")


async def test_disconnected_turn_goes_on(gateway: Gateway, tenant: TestTenant) -> None:
    """A client that leaves a turn finds it done, and its usage in the ledger."""
    session_id = await new_session(tenant)
    gateway.engine.holds_after = 2
    path = f"/v1/sessions/{session_id}/turns"
    leaving = asyncio.create_task(tenant.client.post(path, json={"input": "x", "stream": True}))
    await gateway.engine.held.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gateway.engine.release.set()

    frames = session_frames((await tenant.client.get(f"/v1/sessions/{session_id}/events")).text)

    assert frames[-1]["event"] == "turn.completed"
    assert gateway.engine.cancelled == []
    assert [row["group"] for row in await tenant.usage("session")] == [session_id]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("takes_along", [False, True])
async def test_turn_that_goes_with_its_client(
    gateway: Gateway, tenant: TestTenant, stream: bool, takes_along: bool
) -> None:
    """With `cancel_on_disconnect` a turn is cancelled when its client leaves; without it the turn continues."""
    session_id = await new_session(tenant)
    gateway.engine.holds_after = 2
    body = {"input": "x", "stream": stream, "cancel_on_disconnect": takes_along}
    leaving = asyncio.create_task(tenant.client.post(f"/v1/sessions/{session_id}/turns", json=body))
    await gateway.engine.held.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    if not takes_along:
        gateway.engine.release.set()

    async with asyncio.timeout(60):
        frames = session_frames((await tenant.client.get(f"/v1/sessions/{session_id}/events")).text)
    after = (await tenant.client.get(f"/v1/sessions/{session_id}")).json()

    assert frames[-1]["event"] == ("turn.cancelled" if takes_along else "turn.completed")
    assert len(gateway.engine.cancelled) == takes_along
    assert (after["status"], after["head"] is None) == ("idle", takes_along)


async def test_turn_that_ended_well_is_not_cancelled_by_its_clients_going(tenant: TestTenant) -> None:
    """`cancel_on_disconnect` does not change a turn whose client stays to the end."""
    session_id = await new_session(tenant)

    for stream in (False, True):
        body = {"input": "x", "stream": stream, "cancel_on_disconnect": True}
        await tenant.client.post(f"/v1/sessions/{session_id}/turns", json=body)

    frames = session_frames((await tenant.client.get(f"/v1/sessions/{session_id}/events")).text)
    ends = [frame["event"] for frame in frames if frame["event"] in ("turn.completed", "turn.cancelled")]
    assert ends == ["turn.completed"] * 2


async def test_refused_requests_leave_everything_as_it_was(gateway: Gateway, tenant: TestTenant) -> None:
    """A refused request has its own status and code, and changes neither session nor items."""
    stranger = await gateway.tenant("Stranger")
    idle, closed, waiting, foreign = [await new_session(tenant, tools=[TOOL]) for _ in range(3)] + [
        await new_session(stranger, tools=[TOOL])
    ]
    head = (await say(tenant, idle))["checkpoint_id"]
    await tenant.client.delete(f"/v1/sessions/{closed}")
    gateway.engine.text = CALL
    call_id = (await say(tenant, waiting))["tool_calls"][0]["call_id"]
    foreign_call = (await say(stranger, foreign))["tool_calls"][0]["call_id"]

    def outputs(named: str) -> dict[str, Any]:
        return {"outputs": [{"call_id": named, "output": "sunny"}]}

    async def seen() -> list[Any]:
        paths = [
            f"/v1/sessions/{session_id}{part}" for session_id in (idle, closed, waiting) for part in ("", "/items")
        ]
        return [(await tenant.client.get(path)).json() for path in paths]

    unknown_type = {"input": [{"type": "reasoning", "summary": []}]}
    bad: list[tuple[str, dict[str, Any], int, str | None]] = [
        (f"{idle}/turns", {"input": "y", "if_head": "ckp_0"}, 409, "head_moved"),
        (f"{idle}/turns", {"input": "word " * 9000}, 400, "context_length_exceeded"),
        (f"{idle}/turns", unknown_type, 422, None),
        (f"{idle}/turns", {"input": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, None),
        (f"{idle}/tool_outputs", outputs("call_nobody"), 409, "awaits_no_tool"),
        (f"{idle}/tool_outputs", outputs(call_id), 409, "awaits_no_tool"),
        (f"{waiting}/tool_outputs", outputs("call_nobody"), 404, "call_not_found"),
        (f"{waiting}/tool_outputs", outputs(foreign_call), 404, "call_not_found"),
        (f"{waiting}/turns", {"input": "y"}, 409, "awaiting_tool"),
        (
            f"{waiting}/tool_outputs",
            {"outputs": [*outputs(call_id)["outputs"], {"call_id": call_id, "output": 1}]},
            409,
            "tool_output_differs",
        ),
        (f"{closed}/turns", {"input": "y"}, 409, "session_closed"),
        (f"{closed}/tool_outputs", outputs(call_id), 409, "session_closed"),
        (f"{closed}/fork", {}, 409, "session_closed"),
        (f"{closed}/rewind", {"to": head}, 409, "session_closed"),
        (f"{closed}/prefetch", {}, 409, "session_closed"),
        (f"{waiting}/rewind", {"to": head}, 404, "checkpoint_not_found"),
    ]
    before, engine_saw = await seen(), len(gateway.engine.requests)
    answers = [await tenant.client.post(f"/v1/sessions/{path}", json=body) for path, body, _, _ in bad]
    after = await seen()

    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
        (status, code or answer.json()["error"]["code"])
        for (_, _, status, code), answer in zip(bad, answers, strict=True)
    ]
    assert head in answers[0].json()["error"]["message"]
    too_long = answers[1].json()["error"]["message"]
    assert str(CONTEXT_TOKENS) in too_long
    assert len(re.findall(r"\d+", too_long)) >= 2
    assert "rewind" in too_long
    assert after == before
    assert len(gateway.engine.requests) == engine_saw


async def test_refusals(gateway: Gateway) -> None:
    """Limits and a full queue refuse a turn with their own statuses, streamed or not."""
    tenant = await gateway.tenant(quota=Quota(requests_per_minute=2, max_sessions=1))
    session_id = await new_session(tenant)
    gateway.engine.refusal = CapacityContended("The queue is full.", retry_after_s=1)
    statuses = []
    for stream in (False, True):
        answer = await tenant.client.post(f"/v1/sessions/{session_id}/turns", json={"input": "x", "stream": stream})
        statuses.append((answer.status_code, answer.json()["error"]["type"]))
    too_many = await tenant.client.post("/v1/sessions", json={"model": "tiny"})

    assert statuses == [(429, "overloaded_error")] * 2
    assert (too_many.status_code, too_many.headers["x-should-retry"]) == (429, "false")
    assert too_many.json()["error"]["type"] == "insufficient_quota"


async def test_bad_bodies(gateway: Gateway, tenant: TestTenant) -> None:
    """A bad body is a 422 that names the field; unknown fields are bad."""
    session_id = await new_session(tenant)
    path = f"/v1/sessions/{session_id}"
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/sessions", {}, "model"),
        ("/v1/sessions", {"model": "tiny", "colour": "red"}, "colour"),
        ("/v1/sessions", {"model": "tiny", "metadata": {"a": 1}}, "metadata.a"),
        ("/v1/sessions", {"model": "tiny", "retention": {"ttl_s": -1}}, "retention.ttl_s"),
        ("/v1/sessions", {"model": "tiny", "retention": {"ttl": 1}}, "retention.ttl"),
        ("/v1/sessions", {"model": "tiny", "sampling": {"temperature": 3}}, "sampling.temperature"),
        ("/v1/sessions", {"model": "tiny", "sampling": {"heat": 3}}, "sampling.heat"),
        ("/v1/sessions", {"model": "tiny", "tool_choice": "required"}, "tool_choice"),
        (f"{path}/turns", {"input": []}, "input"),
        (f"{path}/turns", {"input": 7}, "input"),
        (f"{path}/turns", {"input": "x", "tool_hints": {"f": {"expected_ms": -1}}}, "tool_hints.f.expected_ms"),
        (f"{path}/turns", {"input": "x", "stream": "yes"}, "stream"),
        (f"{path}/tool_outputs", {"outputs": []}, "outputs"),
        (f"{path}/tool_outputs", {"outputs": [{"call_id": "c"}]}, "outputs[0].output"),
        (f"{path}/fork", {"count": 0}, "count"),
        (f"{path}/rewind", {}, "to"),
    ]
    for route, body, param in bad:
        answer = await tenant.client.post(route, json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), (route, body, answer.text)
    assert gateway.engine.requests == []
