"""Tests that another tenant's id in a body or a query answers like an unknown id: on every field that can hold an id."""

from collections.abc import Iterator
from typing import Any

from tests.api.deps.test_isolation import owned_ids, seen
from tests.api.in_process_gateway import Gateway, TestTenant, chat

KINDS = {
    "model": "name",
    "previous_response_id": "response_id",
    "conversation": "conversation_id",
    "at": "checkpoint",
    "to": "checkpoint",
    "if_head": "checkpoint",
    "input_file_id": "file_id",
}
"""Fields of bodies that hold an id, by what they identify."""
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": chat(),
    "POST /v1/completions": {"model": "tiny", "prompt": "x"},
    "POST /v1/messages": {"model": "tiny", "max_tokens": 1, "messages": chat()["messages"]},
    "POST /v1/messages/count_tokens": {"model": "tiny", "messages": chat()["messages"]},
    "POST /v1/responses": {"model": "tiny", "input": "x"},
    "POST /v1/responses/input_tokens": {"model": "tiny", "input": "x"},
    "POST /v1/sessions": {"model": "tiny"},
    "PATCH /v1/sessions/{session_id}": {},
    "POST /v1/sessions/{session_id}/turns": {"input": "x"},
    "POST /v1/sessions/{session_id}/fork": {},
    "POST /v1/sessions/{session_id}/rewind": {},
    "POST /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
    "POST /v1/embeddings": {"input": "x"},
    "POST /v1/tokenize": {"text": "x"},
    "POST /v1/detokenize": {"tokens": [1]},
}
"""A valid body of each route whose body can hold an id, without the id."""


def operations(gateway: Gateway) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of every route of a tenant."""
    for path, found in gateway.app.openapi()["paths"].items():
        if path.startswith("/v1/") and not path.startswith("/v1/admin"):
            yield from ((method.upper(), path, operation) for method, operation in found.items())


def body_fields(gateway: Gateway, operation: dict[str, Any]) -> set[str]:
    """The names of a body's fields."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    while "$ref" in schema:
        schema = gateway.app.openapi()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return set(schema.get("properties", {}))


def near(known: str) -> str:
    """An id that nobody has, which differs in its last character, so that it has the same place in every order."""
    return known[:-1] + ("b" if known[-1] != "b" else "c")


async def test_ids_in_bodies(gateway: Gateway, tenant: TestTenant) -> None:
    """A foreign id in a field of a body is refused like an unknown one. A new field `…_id` without a case fails."""
    foreign = await owned_ids(tenant)
    other = await gateway.tenant("Other")
    own = await owned_ids(other)
    checked = set()
    for method, path, operation in operations(gateway):
        fields = body_fields(gateway, operation)
        assert {field for field in fields if field.endswith("_id")} <= KINDS.keys(), (path, fields)
        for field in fields & KINDS.keys():
            body = BODIES[f"{method} {path}"]
            given = foreign[KINDS[field]] if field != "model" else "pirate_of_a"
            answers = []
            if field == "model":
                await tenant.push_adapter(given, seed=7)
            for value in (given, near(given)):
                filled = path.format(**own)
                answers.append((await other.client.request(method, filled, json=body | {field: value}), value))

            (first, value), (second, unknown) = answers
            assert 400 <= first.status_code < 500, (path, field, first.text)
            assert seen(first, [value]) == seen(second, [unknown]), (path, field)
            checked.add((path, field))
    assert {field for _, field in checked} == KINDS.keys()
    assert len(checked) >= 12


async def test_ids_in_queries(gateway: Gateway, tenant: TestTenant) -> None:
    """A list after a foreign id is the list after an unknown one, for every kind of id and every list."""
    foreign = await owned_ids(tenant)
    foreign["name"] = foreign["model"] = (await tenant.push_adapter("pirate_of_a", seed=7))["name"]
    other = await gateway.tenant("Other")
    own = await owned_ids(other)
    lists = [
        (path, parameter["name"])
        for method, path, operation in operations(gateway)
        if method == "GET"
        for parameter in operation.get("parameters", [])
        if parameter["in"] == "query" and parameter["name"] in ("after", "before", "after_id", "before_id")
    ]
    assert len(lists) >= 8
    for path, parameter in lists:
        for known in (foreign[kind] for kind in foreign if kind not in ("version", "alias", "call_id")):
            cursors = (known, near(known))
            answers = [await other.client.get(path.format(**own), params={parameter: cursor}) for cursor in cursors]

            assert seen(answers[0], [known]) == seen(answers[1], [near(known)]), (path, parameter, known)
