"""Tests of an adapter's defaults in the requests that reach the engine, and of its tags over HTTP."""

from typing import Any

import pytest

from graftwork.engine.core.requests import EngineRequest
from tests.api.in_process_gateway import Gateway, TestTenant, adapter_upload, chat
from tests.sessions.tokenizer_and_templates import text_tokenizer

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
DEFAULTS = {
    "system": "You are a pirate.",
    "sampling": {"temperature": 0.25, "max_tokens": 5},
    "response_format": {"type": "json_object"},
    "tools": [TOOL],
}


@pytest.fixture
async def kind(tenant: TestTenant) -> TestTenant:
    """A tenant whose adapter `pirate` has defaults."""
    await tenant.push_adapter()
    answer = await tenant.client.patch("/v1/adapters/pirate", json={"defaults": DEFAULTS})
    assert answer.status_code == 200, answer.text
    return tenant


def prompt_of(request: EngineRequest) -> str:
    return text_tokenizer().decode(list(request.prompt_token_ids))


async def asked(gateway: Gateway, tenant: TestTenant, path: str, body: dict[str, Any]) -> EngineRequest:
    """What the engine is asked by one request."""
    gateway.engine.requests.clear()
    answer = await tenant.client.post(path, json=body)
    assert answer.status_code in (200, 202), answer.text
    (request,) = gateway.engine.requests
    return request


async def test_a_chat_has_the_defaults(gateway: Gateway, kind: TestTenant) -> None:
    """A chat that says nothing has the system prompt, the sampling, the format and the tools of its adapter."""
    request = await asked(gateway, kind, "/v1/chat/completions", chat(model="pirate"))

    assert "You are a pirate." in prompt_of(request)
    assert "look_up" in prompt_of(request)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.25, 5)
    assert request.grammar is not None


async def test_a_chat_overrides_each_default(gateway: Gateway, kind: TestTenant) -> None:
    """A system message, sampling fields, a format and an empty list of tools replace the defaults, each alone."""
    body = chat(model="pirate", temperature=0.75, max_completion_tokens=7, tools=[], response_format={"type": "text"})
    body["messages"].insert(0, {"role": "system", "content": "You are a judge."})

    request = await asked(gateway, kind, "/v1/chat/completions", body)
    hot = await asked(gateway, kind, "/v1/chat/completions", chat(model="pirate", temperature=0.75))

    assert "pirate" not in prompt_of(request)
    assert "You are a judge." in prompt_of(request)
    assert "look_up" not in prompt_of(request)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.75, 7)
    assert request.grammar is None
    assert "You are a pirate." in prompt_of(hot)
    assert (hot.sampling.temperature, hot.sampling.max_tokens) == (0.75, 5)


async def test_other_models_have_no_defaults(gateway: Gateway, kind: TestTenant) -> None:
    """The base model, another adapter and a mixture have none."""
    await kind.push_adapter("plain", 1)
    for body in (
        chat(),
        chat(model="plain"),
        chat(adapters=[{"model": "pirate", "weight": 1.0}]),
    ):
        request = await asked(gateway, kind, "/v1/chat/completions", body)

        assert "pirate" not in prompt_of(request)
        assert request.grammar is None


async def test_completions_have_sampling_and_format(gateway: Gateway, kind: TestTenant) -> None:
    """A completion has the sampling and the format, and its prompt as it was sent."""
    request = await asked(gateway, kind, "/v1/completions", {"model": "pirate", "prompt": "Hello"})

    assert prompt_of(request).endswith("Hello")
    assert "pirate" not in prompt_of(request)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.25, 5)
    assert request.grammar is not None


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_other_forms_have_the_defaults(gateway: Gateway, kind: TestTenant, path: str) -> None:
    """Messages in Anthropic's form and responses have the system prompt and the sampling, and override them."""
    messages = [{"role": "user", "content": "Hello"}]
    plain: dict[str, Any] = {"model": "pirate", "max_tokens": 9, "messages": messages}
    own = plain | {"system": "You are a judge."}
    if path == "/v1/responses":
        plain = {"model": "pirate", "input": "Hello", "max_output_tokens": 9}
        own = plain | {"instructions": "You are a judge."}

    request = await asked(gateway, kind, path, plain)
    other = await asked(gateway, kind, path, own)

    assert "You are a pirate." in prompt_of(request)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.25, 9)
    assert "You are a pirate." not in prompt_of(other)
    assert "You are a judge." in prompt_of(other)


async def test_a_session_takes_the_defaults_when_it_is_created(gateway: Gateway, kind: TestTenant) -> None:
    """A session keeps the defaults that were there at its creation; what it says itself goes first."""
    made = (await kind.client.post("/v1/sessions", json={"model": "pirate"})).json()["id"]
    own_body = {"model": "pirate", "instructions": "You are a judge.", "tools": [], "sampling": {"max_tokens": 3}}
    own = (await kind.client.post("/v1/sessions", json=own_body)).json()["id"]
    await kind.client.patch("/v1/adapters/pirate", json={"defaults": {}})

    request = await asked(gateway, kind, f"/v1/sessions/{made}/turns", {"input": "Hello"})
    other = await asked(gateway, kind, f"/v1/sessions/{own}/turns", {"input": "Hello"})

    assert "You are a pirate." in prompt_of(request)
    assert "look_up" in prompt_of(request)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.25, 5)
    assert "You are a judge." in prompt_of(other)
    assert "look_up" not in prompt_of(other)
    assert (other.sampling.temperature, other.sampling.max_tokens) == (0.25, 3)


async def test_wrong_messages_keep_their_places(kind: TestTenant) -> None:
    """An error in a message names the message's place in the request, although the system prompt comes before it."""
    body = {"model": "pirate", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}

    answer = await kind.client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages[0]")


async def test_wrong_defaults_are_refused(kind: TestTenant) -> None:
    """Defaults that no request could use are a 422 that names the field, and change nothing."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no type"}}}
    bad: list[dict[str, Any]] = [
        {"defaults": {"colour": "red"}},
        {"defaults": {"system": 7}},
        {"defaults": {"sampling": {"temperature": -1}}},
        {"defaults": {"sampling": {"colour": 1}}},
        {"defaults": {"response_format": {"type": "poem"}}},
        {"defaults": {"response_format": schema}},
        {"defaults": {"tools": [{"type": "function"}]}},
        {"tags": ["No Tag"]},
    ]
    for body in bad:
        answer = await kind.client.patch("/v1/adapters/pirate", json=body)

        assert answer.status_code == 422, (body, answer.text)
    assert (await kind.client.get("/v1/adapters/pirate")).json()["defaults"] == DEFAULTS


async def test_tags_state_and_provenance(tenant: TestTenant) -> None:
    """Adapters are found by tag and state, and a version shows what was said at its push, and by which key."""
    await tenant.push_adapter()
    form = {"name": "pirate", "run": "run-42", "parent": "pirate@1", "data_digest": "sha256:" + "d" * 64}
    pushed = (await tenant.client.post("/v1/adapters", data=form, files=adapter_upload(1))).json()["versions"][1]
    await tenant.push_adapter("other", 2)
    await tenant.client.patch("/v1/adapters/pirate", json={"tags": ["sea", "lang:en"]})
    await tenant.client.delete("/v1/adapters/other")

    async def listed(query: str) -> list[str]:
        return [each["name"] for each in (await tenant.client.get(f"/v1/adapters?{query}")).json()["data"]]

    assert await listed("tag=sea&tag=lang:en") == ["pirate"]
    assert await listed("tag=sea&tag=none") == []
    assert await listed("state=deleted") == ["other"]
    assert await listed("name=pir&base=" + pushed["base"]) == ["pirate"]
    assert (await tenant.client.get("/v1/adapters?state=lost")).status_code == 422
    origin = pushed["provenance"]
    assert origin.pop("pushed_by").startswith("key_")
    assert origin.pop("source") is None
    assert origin == {"run": "run-42", "parent": "pirate@1", "data_digest": "sha256:" + "d" * 64}
    for wrong in ({"data_digest": "md5:1"}, {"parent": "pirate@9"}, {"run": "x" * 201}):
        answer = await tenant.client.post("/v1/adapters", data={"name": "pirate"} | wrong, files=adapter_upload(3))
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, next(iter(wrong)))
