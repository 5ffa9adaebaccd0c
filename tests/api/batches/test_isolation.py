"""Tests that the lines of a batch reach what belongs to their own tenant, and nothing else."""

import json
from typing import Any

import pytest

from graftwork.api.batches.endpoints import OPENAI_ENDPOINTS, RESPONSES
from tests.api.batches.conftest import Batching, create, get, lines_of
from tests.api.deps.test_isolation_fields import BODIES, CASES, near
from tests.api.in_process_gateway import TestTenant

FIELDS = [
    *((url, field) for url in OPENAI_ENDPOINTS if url != RESPONSES for field in ("model", "adapters.model")),
    *((RESPONSES, field) for field in ("model", "previous_response_id", "input.id")),
]


async def owned_ids(tenant: TestTenant, adapter: str) -> dict[str, str]:
    """Creates what a line can name. Returns the ids by kind."""
    await tenant.push_adapter(adapter)
    answer = (await tenant.client.post("/v1/responses", json={"model": "tiny", "input": "x"})).json()
    first = {"items": [{"role": "user", "content": "x"}]}
    conversation = (await tenant.client.post("/v1/conversations", json=first)).json()["id"]
    items = (await tenant.client.get(f"/v1/conversations/{conversation}/items")).json()
    return {
        "name": adapter,
        "response_id": answer["id"],
        "conversation_id": conversation,
        "item_id": items["first_id"],
    }


def without(line: dict[str, Any], given: str) -> str:
    """An output line without the ids of the line itself, and without the id that its request has named."""
    own = (line["id"], line["response"]["request_id"], line["custom_id"], given)
    text = json.dumps(line)
    for each in own:
        text = text.replace(each, "<id>")
    return text


@pytest.mark.parametrize(("endpoint", "field"), FIELDS)
async def test_ids_in_lines_of_batches(batching: Batching, tenant: TestTenant, endpoint: str, field: str) -> None:
    """A line that names another tenant's object gets the error of one that nobody has; one's own object is used."""
    other = await batching.gateway.tenant("Other")
    foreign, own = await owned_ids(tenant, "pirate_of_a"), await owned_ids(other, "pirate")
    kind, body_with = CASES[field]
    ids = (foreign[kind], near(foreign[kind]), own[kind])
    bodies = [BODIES[f"POST {endpoint}"] | body_with(each) for each in ids]
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]
    batch = await create(other, lines, endpoint)

    await batching.run()

    ended = await get(other, batch)
    first, second = await lines_of(other, ended["error_file_id"])
    (answered,) = await lines_of(other, ended["output_file_id"])
    alone = await other.client.post(endpoint, json=bodies[0])
    assert first["response"]["status_code"] == alone.status_code == (400 if field == "previous_response_id" else 404)
    assert without(first, ids[0]) == without(second, ids[1])
    assert answered["custom_id"] == "line-2"


@pytest.mark.parametrize("endpoint", OPENAI_ENDPOINTS)
async def test_lines_name_what_the_key_allows(batching: Batching, tenant: TestTenant, endpoint: str) -> None:
    """The lines of a batch may name the models that the key of the batch may name, and get the route's error for others."""
    await tenant.push_adapter("pirate")
    tenancy = batching.gateway.resources.account.tenancy
    _, text = await tenancy.create_key(tenant.id, "narrow", adapters=["pirate"])
    narrow = TestTenant(tenant.id, text, batching.gateway.client(text))
    bodies = [BODIES[f"POST {endpoint}"] | {"model": model} for model in ("pirate", "tiny")]
    lines = [{"custom_id": body["model"], "method": "POST", "url": endpoint, "body": body} for body in bodies]
    alone = await narrow.client.post(endpoint, json=bodies[1])
    batch = await create(narrow, lines, endpoint)

    await batching.run()

    ended = await get(narrow, batch)
    (answered,) = await lines_of(narrow, ended["output_file_id"])
    (refused,) = await lines_of(narrow, ended["error_file_id"])
    assert (answered["custom_id"], refused["custom_id"]) == ("pirate", "tiny")
    assert refused["response"]["status_code"] == alone.status_code == 403
    assert refused["response"]["body"]["error"]["code"] == alone.json()["error"]["code"] == "adapter_not_allowed"
