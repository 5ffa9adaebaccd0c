"""Tests of the list of a session's turns."""

from graftwork.platform.errors import Unavailable
from tests.api.in_process_gateway import Gateway, TestTenant


async def turns_of(tenant: TestTenant, session: str, query: str = "") -> dict[str, object]:
    answer = await tenant.client.get(f"/v1/sessions/{session}/turns{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


async def test_turns_are_listed_page_by_page(gateway: Gateway, tenant: TestTenant) -> None:
    """The list has each turn as its own answer had it, the newest first, page by page."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    path = f"/v1/sessions/{session}/turns"
    answers = [(await tenant.client.post(path, json={"input": text})).json() for text in ("a", "b", "c")]
    newest = await turns_of(tenant, session, "?limit=2")
    rest = await turns_of(tenant, session, f"?limit=2&after={newest['last_id']}")
    ascending = await turns_of(tenant, session, "?order=asc")

    assert (newest["data"], newest["has_more"]) == ([answers[2], answers[1]], True)
    assert (rest["data"], rest["has_more"]) == ([answers[0]], False)
    assert ascending["data"] == answers


async def test_a_fork_lists_its_own_turns(gateway: Gateway, tenant: TestTenant) -> None:
    """A fork has the history of its parent, and only its own turns."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "a"})
    fork = (await tenant.client.post(f"/v1/sessions/{session}/fork", json={})).json()["data"][0]["id"]
    assert (await turns_of(tenant, fork))["data"] == []
    own = (await tenant.client.post(f"/v1/sessions/{fork}/turns", json={"input": "b"})).json()

    assert (await turns_of(tenant, fork))["data"] == [own]


async def test_failed_turns_are_listed(gateway: Gateway, tenant: TestTenant) -> None:
    """A turn without an output is in the list, with its error."""
    session = (await tenant.client.post("/v1/sessions", json={"model": "tiny"})).json()["id"]
    gateway.engine.breaks_after, gateway.engine.breakage = 2, Unavailable("The engine died.")
    await tenant.client.post(f"/v1/sessions/{session}/turns", json={"input": "a"})
    data = (await turns_of(tenant, session))["data"]

    assert isinstance(data, list)
    assert [(turn["status"], turn["output"], turn["error"] is None) for turn in data] == [("failed", [], False)]
