"""Completes FastAPI's OpenAPI document with errors, streams, headers, API keys, examples and descriptions.

Owns all parts of the document that FastAPI cannot derive from the types of a route. Never changes how a route behaves.
Invariant: each operation lists every status that it can return.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from graftwork.api.deps.admission import MAX_DEADLINE_MS
from graftwork.api.deps.route_classes import AdminRoute, AuthenticatedRoute, OpenAiRoute
from graftwork.api.http.response_headers import (
    ANTHROPIC_REQUEST_ID,
    DEGRADED,
    ID_HEADERS,
    IGNORED,
    LIMIT_HEADERS,
    MODEL,
    REPLAYED,
    SERVICE_TIER,
    UNENFORCED,
)
from graftwork.api.openapi import examples
from graftwork.api.openapi.declare import EVENT_CLASSES
from graftwork.api.openapi.errors import (
    error_components,
    error_reference,
    header_components,
    header_references,
)
from graftwork.api.openapi.fields import describe_fields
from graftwork.platform.answers.errors import AnthropicErrorAnswer, ErrorAnswer

DESCRIPTION = """Graftwork serves one base model, many tenants' LoRA adapters, and agent sessions that last.

Tenants use a key `gw_…`, operators a key `gwa_…`, sent as `Authorization: Bearer` or as `x-api-key`. People who have
signed in send a token `gwc_…` in the same way.
Every answer has the header `x-request-id`, and every error has the same shape."""

TAGS = {
    "inference": "OpenAI's and Anthropic's routes that generate text, and tokenization.",
    "responses": "OpenAI's Responses API and its conversations.",
    "sessions": "Agent sessions: turns, tool outputs, forks, and the events of each.",
    "batches": "OpenAI's files and batches, and Anthropic's batches of messages.",
    "models": "The names that requests may give as `model`.",
    "adapters": "A tenant's LoRA adapters, their versions and aliases.",
    "usage": "A tenant's own usage and limits.",
    "data": "A tenant's rights over its data: exports of everything, and how long it is kept.",
    "people": "People who sign in with an identity provider, their roles and tokens.",
    "admin": "Tenants, keys, quotas and replicas, with the operator's key.",
    "operations": "Health, readiness and the version need no key. Metrics need the admin key.",
}
"""The description of each tag."""

_RENAMED_SCHEMAS = {
    "Body_create_adapter": "AdapterUpload",
    "Body_create_version": "VersionUpload",
    "Body_create_file": "FileUpload",
    "Embedding": "InputEmbedding",  # a generated class cannot have a field of its own name
}
_LIMIT_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_METERED = ("inference", "responses", "sessions")
"""Tags whose POST routes use up the tenant's limits. The answers of these routes have the headers of the limits."""

_TURNS = ("create_turn", "send_tool_outputs")


def complete(document: dict[str, Any], routes: Iterable[APIRoute]) -> dict[str, Any]:
    """Adds to FastAPI's OpenAPI document what FastAPI cannot derive, such as errors, streams and examples.

    `routes` are the routes that the document describes. Changes `document` itself, and returns it.
    """
    by_operation = {route.operation_id or route.name: route for route in routes if route.include_in_schema}
    document["info"] |= {
        "description": DESCRIPTION,
        "contact": {"name": "Graftwork", "url": "https://github.com/graftwork/graftwork"},
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    }
    document["servers"] = [{"url": "/", "description": "This server."}]
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    for operation in _operations(document):
        _complete_operation(operation, by_operation[operation["operationId"]])
    _complete_components(document)
    _drop_unused(document)
    return _renamed(_with_whole_numbers(document))


def _operations(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for operations in document["paths"].values():
        yield from operations.values()


def _complete_operation(operation: dict[str, Any], route: APIRoute) -> None:
    name = operation["operationId"]
    operation["description"] = operation.get("description", operation["summary"])
    is_guarded = isinstance(route, AuthenticatedRoute)
    is_anthropic = "/v1/messages" in route.path
    if is_guarded:
        key = "admin_key" if isinstance(route, AdminRoute) else "tenant_key"
        operation["security"] = [{key: []}, {"x_api_key": []}]
    for parameter in operation.get("parameters", ()):
        _drop_null(parameter["schema"])
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)
    for status in sorted(statuses_of(route, operation)):
        if str(status) != "503" or "503" not in responses or "content" not in responses["503"]:
            responses[str(status)] = error_reference(status, is_anthropic=is_anthropic)
    success = next(code for code in responses if code.startswith("2"))
    responses[success] = _completed_success(responses[success], route, operation, is_anthropic=is_anthropic)
    operation["responses"] = dict(sorted(responses.items()))
    if name in examples.REQUESTS:
        body = operation["requestBody"]["content"]["application/json"]
        body["examples"] = {"typical": {"summary": "A typical request.", "value": examples.REQUESTS[name]}}
    if is_guarded and _keeps_answers(route, operation):
        operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/IdempotencyKey"})
    if 504 in route.responses:  # it generates
        operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/Deadline"})


def _drop_null(schema: dict[str, Any]) -> None:
    """Removes null from a parameter's type. A client leaves the parameter out instead."""
    alternatives = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(alternatives) == 1:
        del schema["anyOf"]
        schema |= alternatives[0]


def statuses_of(route: APIRoute, operation: Mapping[str, Any]) -> set[int]:
    """Returns every error status that a route can answer. The route declares some, and its class implies the others."""
    declared = {int(status) for status in route.responses if int(status) >= 400}
    if not isinstance(route, AuthenticatedRoute):
        return declared | {500}
    implied = {401, 403, 500, 503, 400 if isinstance(route, OpenAiRoute) else 422}
    if "{" in route.path:
        implied.add(404)
    if "requestBody" in operation:
        implied.add(413)
    if _keeps_answers(route, operation):
        implied.add(409)
    return declared | implied


def _keeps_answers(route: APIRoute, operation: Mapping[str, Any]) -> bool:
    """Returns whether the route supports `Idempotency-Key`. Only POSTs of some route classes do."""
    return "POST" in (route.methods or ()) and getattr(route, "is_idempotent", False)


def _completed_success(
    response: dict[str, Any], route: APIRoute, operation: Mapping[str, Any], *, is_anthropic: bool
) -> dict[str, Any]:
    names = [*ID_HEADERS]
    if is_anthropic:
        names.append(ANTHROPIC_REQUEST_ID)
    if "POST" in (route.methods or ()) and route.tags[0] in _METERED:
        names += [*LIMIT_HEADERS, UNENFORCED, IGNORED, DEGRADED]
        names += [MODEL] if route.tags[0] == "inference" else []
        names += [SERVICE_TIER] if operation["operationId"] in _TURNS else []
    if _keeps_answers(route, operation):
        names.append(REPLAYED)
    content = response.get("content", {})
    example = examples.ANSWERS.get(operation["operationId"])
    if example is not None:
        content["application/json"]["examples"] = {"typical": {"summary": "A typical answer.", "value": example}}
    meaning = "The answer, whole or as server-sent events." if "text/event-stream" in content else "The answer."
    return {"description": meaning, "headers": header_references(*names), "content": content}


def _complete_components(document: dict[str, Any]) -> None:
    components = document["components"]
    schemas: dict[str, Any] = components["schemas"]
    classes = [(each, "serialization") for each in (*EVENT_CLASSES, ErrorAnswer, AnthropicErrorAnswer)]
    _, found = models_json_schema(classes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    for name, schema in found["$defs"].items():
        schemas.setdefault(name, schema)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    describe_fields(schemas)
    components["headers"] = header_components()
    components["responses"] = error_components()
    components["parameters"] = {
        "IdempotencyKey": {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "A second request with the same key and body gets the first one's answer.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        },
        "Deadline": {
            "name": "x-deadline-ms",
            "in": "header",
            "description": "Milliseconds in which the first token must come. A request for which the server expects a "
            "later one is refused at once, with the code `deadline_unreachable`: 429 if waiting helps, with the time to "
            "retry, or else 503. A request that waits too long after all ends with 504 `deadline_exceeded`.",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_MS},
        },
    }
    components["securitySchemes"] = {
        "tenant_key": {"type": "http", "scheme": "bearer", "description": "A tenant's key, `gw_…`."},
        "admin_key": {"type": "http", "scheme": "bearer", "description": "The operator's key, `gwa_…`."},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "Either key."},
    }


def _drop_unused(document: dict[str, Any]) -> None:
    """Removes errors that no operation returns, and headers and schemas that nothing uses."""
    components = document["components"]
    used_schemas = _reachable_schemas(document)
    components["schemas"] = {name: each for name, each in components["schemas"].items() if name in used_schemas}
    for kind in ("responses", "headers"):
        used = set(_references(document["paths"])) | set(_references(components["responses"]))
        names = {reference.rpartition("/")[2] for reference in used if f"/{kind}/" in reference}
        components[kind] = {name: each for name, each in components[kind].items() if name in names}


def _with_whole_numbers(value: Any) -> Any:
    """Converts limits back to integers. FastAPI has converted them to floats."""
    if isinstance(value, dict):
        return {
            key: int(each)
            if key in _LIMIT_KEYS and isinstance(each, float) and each.is_integer()
            else _with_whole_numbers(each)
            for key, each in value.items()
        }
    return [_with_whole_numbers(each) for each in value] if isinstance(value, list) else value


def _references(value: Any) -> Iterator[str]:
    """Yields every `$ref` inside a value."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _reachable_schemas(document: Mapping[str, Any]) -> set[str]:
    """Return the names of the schemas that operations and errors refer to, also through other schemas."""
    components = document["components"]
    reached: set[str] = set()
    waiting = [*_references(document["paths"]), *_references(components["responses"])]
    while waiting:
        kind, _, name = waiting.pop().removeprefix("#/components/").partition("/")
        if kind == "schemas" and name not in reached:
            reached.add(name)
            waiting += _references(components["schemas"][name])
    return reached


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """Gives schemas better names: `XList` for a page of `X`, and the names in _RENAMED_SCHEMAS for upload forms."""
    names = {name: _RENAMED_SCHEMAS.get(name, name) for name in document["components"]["schemas"]}
    for name in names:
        if name.startswith("Page_"):
            names[name] = name.removeprefix("Page_").removesuffix("_") + "List"
    document["components"]["schemas"] = {
        names[name]: schema | {"title": names[name]} for name, schema in document["components"]["schemas"].items()
    }
    renamed: dict[str, Any] = _with_references(document, names)
    return renamed


def _with_references(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_with_references(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_references(each, names) for key, each in value.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/components/schemas/"):
        found["$ref"] = "#/components/schemas/" + names[reference.rpartition("/")[2]]
    return found
