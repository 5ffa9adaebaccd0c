"""Tests of the OpenAPI document: it describes every operation, and it is true."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from graftwork.api.openapi.declare import stream_schema
from graftwork.api.openapi.examples import ANSWERS, REQUESTS
from graftwork.api.overview.views import View
from graftwork.api.server.app import create_app
from graftwork.platform.settings.settings import Settings
from tests.api.in_process_gateway import Gateway, TestTenant, chat, session_frames

DOCUMENT: dict[str, Any] = create_app(Settings()).openapi()


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, each in DOCUMENT["paths"].items():
        for method, operation in each.items():
            yield path, method, operation


def check(schema: dict[str, Any], value: object) -> None:
    """Hold a value against a schema of the document."""
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]})


def success_of(operation: dict[str, Any]) -> dict[str, Any]:
    return next(response for status, response in operation["responses"].items() if status.startswith("2"))


def test_operations_are_named_once() -> None:
    """Each operation has an id of its own, which is its function's name."""
    names = [operation["operationId"] for _, _, operation in operations()]

    assert len(set(names)) == len(names)
    assert {"create_chat_completion", "create_turn", "set_tenant_quota"} <= set(names)


def test_schemas_are_named_as_their_classes() -> None:
    """No two classes of bodies have one name: the document would then name them by the path of their modules."""
    assert [name for name in DOCUMENT["components"]["schemas"] if "__" in name] == []


def test_every_success_is_typed() -> None:
    """Each 2xx in JSON refers to a schema that is not empty, and every stream to its events."""
    for path, method, operation in operations():
        for media, content in success_of(operation)["content"].items():
            if media != "text/plain":
                assert content["schema"], (path, method, media)


def test_every_error_has_one_shape() -> None:
    """Each status of 400 and above has our error, or Anthropic's on its routes; only readiness has its own."""
    for path, method, operation in operations():
        for status, response in operation["responses"].items():
            if int(status) < 400 or (path, status) == ("/readyz", "503"):
                continue
            name = response["$ref"].rpartition("/")[2]
            shape = DOCUMENT["components"]["responses"][name]["content"]["application/json"]
            expected = "AnthropicErrorAnswer" if path.startswith("/v1/messages") else "ErrorAnswer"
            assert shape["schema"]["$ref"].endswith(f"/{expected}"), (path, method, status)
            check(shape["schema"], shape["example"])
    assert "HTTPValidationError" not in DOCUMENT["components"]["schemas"]


def test_guarded_operations_say_so() -> None:
    """Each operation under /v1, and /metrics, names its key and can answer 401 and 403; the others need none."""
    for path, method, operation in operations():
        is_guarded = path.startswith("/v1") or path == "/metrics"
        assert ("security" in operation) == is_guarded, (path, method)
        assert ({"401", "403"} <= set(operation["responses"])) == is_guarded, (path, method)


def test_routes_with_an_id_can_answer_404() -> None:
    """Each operation whose path has a parameter lists the 404 of an unknown id."""
    with_id = [operation for path, _, operation in operations() if "{" in path]

    assert len(with_id) > 60
    assert [one["operationId"] for one in with_id if "404" not in one["responses"]] == []


def test_examples_fit_their_schemas() -> None:
    """Each operation with a JSON answer has an example, and each example fits the schema beside it."""
    for path, method, operation in operations():
        name, content = operation["operationId"], success_of(operation)["content"]
        if "application/json" in content:
            check(content["application/json"]["schema"], ANSWERS[name])
        body = operation.get("requestBody", {}).get("content", {})
        if "application/json" in body:
            check(body["application/json"]["schema"], REQUESTS[name])
        assert operation["description"], (path, method)


TIMES: dict[Any, float | None] = {
    1893456000.5: 1893456000.5,
    "2030-01-01": 1893456000,
    "20300101T12": 1893499200,
    "2030-W01-2": 1893456000,
    "2030-01-01T00:00:00.5+05:30": 1893436200.5,
    -1: None,
    1e13: None,
}
"""Times of a body with their Unix seconds; None for one that is refused."""


@pytest.mark.parametrize("time", TIMES)
async def test_a_time_is_seconds_or_text(time: Any, gateway: Gateway, tenant: TestTenant) -> None:
    """The end of a key is Unix seconds or ISO 8601 text, and the document allows what the server takes, and no more."""
    body = {"name": "ci", "expires_at": time}
    schema = {"$ref": "#/components/schemas/KeyBody", "components": DOCUMENT["components"]}
    answer = await gateway.admin.post(f"/v1/admin/tenants/{tenant.id}/keys", json=body)

    assert answer.status_code == (201 if TIMES[time] is not None else 422)
    assert answer.json().get("expires_at") == TIMES[time]
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is (TIMES[time] is not None)


def test_schemas_have_no_unknown_reference() -> None:
    """Every reference of the document leads to a component."""
    text = str(DOCUMENT)

    for kind, components in DOCUMENT["components"].items():
        for part in text.split(f"#/components/{kind}/")[1:]:
            assert part.partition("'")[0] in components


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=2)),
        ("/v1/completions", {"model": "tiny", "prompt": "The", "logprobs": 1, "return_token_ids": True}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"model": "tiny", "input": "Hi"}),
    ],
)
async def test_answers_and_chunks_fit_their_schemas(path: str, body: dict[str, Any], tenant: TestTenant) -> None:
    """Answers that routes build as plain JSON have no field that the document lacks, whole or streamed."""
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]

    whole = (await tenant.client.post(path, json=body)).json()
    stream = (await tenant.client.post(path, json=body | {"stream": True})).text

    check(closed(content["application/json"]["schema"]), whole)
    assert check_stream(content["text/event-stream"]["schema"], stream) > 3


async def test_events_of_sessions_and_overviews_fit_their_schemas(gateway: Gateway, tenant: TestTenant) -> None:
    """Each server-sent event of a session and of both overviews is one that the document has, by name and by data."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    turn = await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "x", "stream": True})
    overviews: list[bytes] = []

    async def write_once(event: bytes) -> None:
        overviews.append(event)
        gateway.resources.overview.end_streams()

    await gateway.resources.overview.follow(View(), write_once)

    assert check_stream(stream_schema("session"), turn.text) == 3
    assert check_stream(stream_schema("overview"), overviews[0].decode()) == 1
    assert check_stream(stream_schema("overview"), 'event: ping\ndata: {"type":"ping"}\n\n') == 1


def check_stream(schema: dict[str, Any], text: str) -> int:
    """Hold each event of a stream, and the JSON in its data, against a schema. Returns the number of events with JSON."""
    num_checked = 0
    for frame in session_frames(text):
        event = {"event": "message", **frame}  # what a browser calls an event without a name
        check(schema, event)
        (shape,) = (each for each in schema["oneOf"] if jsonschema.Draft202012Validator(each).is_valid(event))
        if event["data"] != "[DONE]":
            check(closed(shape["properties"]["data"]["contentSchema"]), json.loads(event["data"]))
            num_checked += 1
    return num_checked


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with references resolved, that allows no field beyond the known ones."""
    if "$ref" in schema:
        return closed(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: closed(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found[key] = closed(value)
        elif key in ("anyOf", "oneOf"):
            found[key] = [closed(each) for each in value]
        else:
            found[key] = value
    if "properties" in schema:
        found.setdefault("additionalProperties", False)
    return found
