"""Tests that another tenant's id in a body or a query answers like an unknown id: on every field that can hold an id."""

from collections.abc import Callable, Iterator
from typing import Any

from tests.api.deps.test_isolation import owned_ids, seen
from tests.api.in_process_gateway import Gateway, TestTenant, chat

CASES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "model": ("name", lambda found: {"model": found}),
    "adapters.model": ("name", lambda found: {"adapters": [{"model": found, "weight": 0.5}]}),
    "previous_response_id": ("response_id", lambda found: {"previous_response_id": found}),
    "conversation": ("conversation_id", lambda found: {"conversation": found}),
    "conversation.id": ("conversation_id", lambda found: {"conversation": {"id": found}}),
    "input.id": ("item_id", lambda found: {"input": [{"type": "item_reference", "id": found}]}),
    "items.id": ("item_id", lambda found: {"items": [{"type": "item_reference", "id": found}]}),
    "at": ("checkpoint", lambda found: {"at": found}),
    "to": ("checkpoint", lambda found: {"to": found}),
    "if_head": ("checkpoint", lambda found: {"if_head": found}),
    "input_file_id": ("file_id", lambda found: {"input_file_id": found}),
}
"""Fields of bodies that hold an id: what they identify, and a body with an id there."""
NO_IDS = {
    "messages.tool_call_id": "names a call in the same body",
    "messages.tool_calls.id": "names a call in the same body",
    "messages.content.id": "names a call in the same body",
    "messages.content.tool_use_id": "names a call in the same body",
    "input.call_id": "names a call in the same body or in the conversation",
    "items.call_id": "names a call in the same body or in the conversation",
    "outputs.call_id": "names a call of the session in the path",
    "metadata.user_id": "names the client's own end user",
    "requests.custom_id": "is the client's own id of a line",
}
"""Fields of bodies that look like ids of stored objects, and why they are none."""
LINES = "requests.params."
"""Bodies of requests that run later, with the answers of their own routes: `test_ids_in_lines_of_batches`."""
NOT_READ = {("/v1/sessions/{session_id}/turns", "input.id")}
"""Fields that a route takes and does not read."""
BODIES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": chat(),
    "POST /v1/completions": {"model": "tiny", "prompt": "x"},
    "POST /v1/messages": {"model": "tiny", "max_tokens": 1, "messages": chat()["messages"]},
    "POST /v1/messages/count_tokens": {"model": "tiny", "messages": chat()["messages"]},
    "POST /v1/responses": {"model": "tiny", "input": "x"},
    "POST /v1/responses/input_tokens": {"model": "tiny", "input": "x"},
    "POST /v1/conversations": {},
    "POST /v1/conversations/{conversation_id}/items": {},
    "POST /v1/sessions": {"model": "tiny"},
    "PATCH /v1/sessions/{session_id}": {},
    "POST /v1/sessions/{session_id}/turns": {"input": "x"},
    "POST /v1/sessions/{session_id}/fork": {},
    "POST /v1/sessions/{session_id}/rewind": {},
    "POST /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
    "POST /v1/embeddings": {"model": "tiny", "input": "x"},
    "POST /v1/tokenize": {"model": "tiny", "prompt": "x"},
    "POST /v1/detokenize": {"model": "tiny", "tokens": [1]},
}
"""A valid body of each route whose body can hold an id, without the id."""


def operations(gateway: Gateway) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of every route of a tenant."""
    for path, found in gateway.app.openapi()["paths"].items():
        if path.startswith("/v1/") and not path.startswith("/v1/admin"):
            yield from ((method.upper(), path, operation) for method, operation in found.items())


def id_fields(gateway: Gateway, operation: dict[str, Any]) -> set[str]:
    """The fields of a JSON body that can hold ids, at any depth, with dots between names."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    fields = set(_fields(schema, gateway.app.openapi()["components"]["schemas"], ()))
    leaves = {last_name(field) for field in CASES}
    return {
        field
        for field in fields
        if (last_name(field) in leaves or field.endswith(("_id", "_ids")))
        and not field.endswith("token_ids")
        and not field.startswith(LINES)
    }


def last_name(field: str) -> str:
    return field.rsplit(".", 1)[-1]


def _fields(schema: dict[str, Any], schemas: dict[str, Any], seen: tuple[str, ...]) -> Iterator[str]:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from _fields(schemas[name], schemas, (*seen, name))
        return
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _fields(inner, schemas, seen)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _fields(schema[key], schemas, seen)
    for name, inner in schema.get("properties", {}).items():
        yield name
        yield from (f"{name}.{field}" for field in _fields(inner, schemas, seen))


def near(known: str) -> str:
    """An id that nobody has, which differs in its last character, so that it has the same place in every order."""
    return known[:-1] + ("b" if known[-1] != "b" else "c")


async def test_ids_in_bodies(gateway: Gateway, tenant: TestTenant) -> None:
    """A foreign id in a field of a body is refused like an unknown one, and an own one is taken.

    A new field that looks like an id fails, until it has a case here.
    """
    foreign = await owned_ids(gateway, tenant)
    foreign["name"] = (await tenant.push_adapter("pirate_of_a", seed=7))["name"]
    other = await gateway.tenant("Other")
    own = await owned_ids(gateway, other)
    checked = set()
    for method, path, operation in operations(gateway):
        fields = id_fields(gateway, operation) - NO_IDS.keys() - {field for at, field in NOT_READ if at == path}
        assert fields <= CASES.keys(), (path, fields - CASES.keys())
        for field in sorted(fields):
            kind, body_with = CASES[field]
            ids = (foreign[kind], near(foreign[kind]), own[kind])
            bodies = [BODIES[f"{method} {path}"] | body_with(given) for given in ids]
            answers = [await other.client.request(method, path.format(**own), json=body) for body in bodies]

            assert 400 <= answers[0].status_code < 500, (path, field, answers[0].text)
            assert seen(answers[0], [ids[0]]) == seen(answers[1], [ids[1]]), (path, field)
            assert answers[2].status_code in (200, 201), (path, field, answers[2].text)
            checked.add((path, field))
    assert {field for _, field in checked} == CASES.keys()
    assert len(checked) >= 25


async def test_ids_in_queries(gateway: Gateway, tenant: TestTenant) -> None:
    """A list after a foreign id is the list after an unknown one, for every kind of id and every list."""
    foreign = await owned_ids(gateway, tenant)
    foreign["name"] = foreign["model"] = (await tenant.push_adapter("pirate_of_a", seed=7))["name"]
    other = await gateway.tenant("Other")
    own = await owned_ids(gateway, other)
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
