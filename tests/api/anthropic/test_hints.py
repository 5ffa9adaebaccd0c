"""Tests of what Anthropic's clients send beyond the conversation: hints, hosted tools, deferred tools, prefills."""

from typing import Any

import httpx
import pytest

from tests.api.fake_engine import FakeEngine
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.sessions.reference_templates import REFERENCES
from tests.sessions.tokenizer_and_templates import text_tokenizer

IGNORED = "x-graftwork-ignored"
USER = {"role": "user", "content": "Hi"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 50, "messages": list(messages) or [USER], **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **fields}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


def prompt(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return text_tokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def count(tenant: TestTenant, sent: dict[str, Any]) -> httpx.Response:
    without = {name: value for name, value in sent.items() if name != "max_tokens"}
    return await tenant.client.post("/v1/messages/count_tokens", json=without)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking (enabled)"),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking (adaptive)"),
        ({"thinking": {"type": "between_tools"}}, "thinking (between_tools)"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"output_config": {"effort": "high"}}, "output_config.effort (high)"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "context_management"),
        ({"metadata": {"user_id": "u"}}, None),
        ({"metadata": {"session": "s"}}, "metadata"),
        ({"cache_control": {"type": "ephemeral"}}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl (2h)"),
        ({"system": [text("x", cache_control={"type": "ephemeral", "ttl": "1d"})]}, "system[0].cache_control.ttl (1d)"),
        ({"system": [text("x", cache_control={"type": "ephemeral", "ttl": [3]})]}, "system[0].cache_control.ttl ([3])"),
        ({"tools": [tool("f", cache_control={"type": "ephemeral", "ttl": ""})]}, "tools[0].cache_control.ttl ()"),
        ({"speed": "fast"}, "speed"),
        ({"betas": ["a"]}, "betas"),
        ({"diagnostics": {"previous_message_id": None}}, "diagnostics"),
        ({"from_the_future": 1}, "from_the_future"),
        ({"from_the_future": None}, None),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"tools": [SEARCH]}, "tools[0] (web_search_20250305)"),
        ({"tools": [tool("f"), BASH], "tool_choice": {"type": "any"}}, "tools[1] (bash_20250124)"),
    ],
)
async def test_a_hint_is_taken_and_named(
    gateway: Gateway, tenant: TestTenant, fields: dict[str, Any], named: str | None
) -> None:
    """A hint changes nothing of the answer but a header, and `count_tokens` takes it too."""
    sent = body(**fields)
    gateway.engine.text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

    answer = await tenant.client.post("/v1/messages", json=sent)
    counted = await count(tenant, sent)

    assert (answer.status_code, counted.status_code) == (200, 200), (answer.text, counted.text)
    assert answer.headers.get(IGNORED) == counted.headers.get(IGNORED) == named
    assert counted.json()["input_tokens"] == len(gateway.engine.requests[-1].prompt_token_ids)


FOUND = {"type": "search_result", "source": "https://weather.test", "title": "Weather"}


def after_tool(*result: dict[str, Any]) -> dict[str, Any]:
    """A request whose last message has the result of a tool call, in blocks."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(result)}
    return body(USER, assistant(call), user(answer), tools=[tool("f")])


FIVE_MINUTES, HOUR, UNKNOWN = ({"cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in ("5m", "1h", "9h"))


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (body(), None),
        (body(**UNKNOWN), None),
        (body(user(text("Hi", cache_control=None))), None),
        (body(user(text("Hi", cache_control={"type": "ephemeral"}))), 300.0),
        (body(user(text("Hi"), text("there", **HOUR))), 3600.0),
        (body(system=[text("x", **HOUR)], **FIVE_MINUTES), 3600.0),
        (body(user(text("Hi", **FIVE_MINUTES)), tools=[tool("f", **UNKNOWN)]), 300.0),
        (body(tools=[tool("f", **HOUR), SEARCH]), 3600.0),
        (after_tool(text("Sunny", **HOUR)), 3600.0),
        (after_tool(text("Sunny", **UNKNOWN), text("all day", **FIVE_MINUTES)), 300.0),
        (after_tool({**FOUND, "content": [text("Sunny", **HOUR)]}), 3600.0),
    ],
)
async def test_a_prompt_is_kept_for_the_longest_time_that_it_names(
    gateway: Gateway, tenant: TestTenant, sent: dict[str, Any], seconds: float | None
) -> None:
    """The engine is asked to keep the prompt for the longest known time of `cache_control`, five minutes by default."""
    answer = await tenant.client.post("/v1/messages", json=sent)

    assert answer.status_code == 200, answer.text
    assert [request.cache_ttl_s for request in gateway.engine.requests] == [seconds]


async def test_a_beta_is_named(tenant: TestTenant) -> None:
    """The header of beta features is named beside the fields, also for a stream."""
    headers = {"anthropic-beta": "context-management-2025-06-27,effort-2025-11-24"}

    answer = await tenant.client.post("/v1/messages", json=body(metadata={}, stream=True), headers=headers)

    assert answer.headers[IGNORED] == "metadata, anthropic-beta"
    assert "message_stop" in answer.text


async def test_history_of_a_thinking_model(gateway: Gateway, tenant: TestTenant) -> None:
    """Encrypted reasoning and marks of a fallback are left out and named; the rest of the message stays."""
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    fallback = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}
    sent = body(USER, assistant(thinking, redacted, fallback, text("Hello.")), user(text("And?")))

    answer = await tenant.client.post("/v1/messages", json=sent)

    assert answer.headers[IGNORED] == ("messages[1].content[1] (redacted_thinking), messages[1].content[2] (fallback)")
    assert "assistant\nHello.<|im_end|>" in prompt(gateway.engine)
    assert "c2VjcmV0" not in prompt(gateway.engine)
    assert (await count(tenant, sent)).json()["input_tokens"] == len(gateway.engine.requests[-1].prompt_token_ids)


async def test_documents_become_text(gateway: Gateway, tenant: TestTenant) -> None:
    """Text documents and search results are in the prompt with their titles, also in a tool's result."""
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."}}
    titled = {
        "type": "document",
        "title": "Weather",
        "context": "of Paris",
        "citations": {"enabled": True},
        "source": {"type": "content", "content": [text("Sun."), text("Wind.")]},
    }
    found = {"type": "search_result", "title": "News", "source": "http://news", "content": [text("Snow.")]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [found, text("Done.")]}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    sent = body(user(plain, titled, text("Sum up")), assistant(call), user(result))

    answer = await tenant.client.post("/v1/messages", json=sent)

    assert answer.headers[IGNORED] == "messages[0].content[1].citations (enabled)"
    assert (
        "user\n<document>\nRain.\n</document>\n<document>\n<title>Weather</title>\n<context>of Paris</context>\nSun.\n"
        "Wind.\n</document>\nSum up<|im_end|>"
    ) in prompt(gateway.engine)
    assert (
        "<search_result>\n<title>News</title>\n<source>http://news</source>\nSnow.\n</search_result>\nDone."
    ) in prompt(gateway.engine)


async def test_a_summary_stands_for_what_it_sums_up(gateway: Gateway, tenant: TestTenant) -> None:
    """A compaction block is its summary; a failed one is nothing."""
    failed = {"type": "compaction", "content": None}
    done = {"type": "compaction", "content": "They spoke of rain.", "signature": "x"}

    await tenant.client.post("/v1/messages", json=body(USER, assistant(failed, done), USER))

    assert "assistant\nThey spoke of rain.<|im_end|>" in prompt(gateway.engine)


async def test_a_note_to_the_biller_is_not_shown(gateway: Gateway, tenant: TestTenant) -> None:
    """Two sessions of Claude Code have the same prompt, because its billing note stays out of the prompt."""
    for version in ("a", "b"):
        billing = text(f"x-anthropic-billing-header: cc_version={version};")
        answer = await tenant.client.post("/v1/messages", json=body(system=[billing, text("Be brief.")]))

        assert answer.headers[IGNORED] == "system[0] (x-anthropic-billing-header)"

    one, other = gateway.engine.requests
    assert one.prompt_token_ids == other.prompt_token_ids
    assert prompt(gateway.engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_hosted_tools_leave_the_others_their_names(tenant: TestTenant) -> None:
    """Parts of schemas that are not enforced are named by the index in the request's own list of tools."""
    loose = tool("f", input_schema={"type": "object", "properties": {"a": {"type": "string", "format": "iban"}}})

    answer = await tenant.client.post("/v1/messages", json=body(tools=[SEARCH, loose]))

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-graftwork-unenforced"].startswith("tools[1].input_schema#")


@pytest.mark.parametrize(
    ("messages", "choice", "shown"),
    [
        ([], None, ["now"]),
        ([], {"type": "tool", "name": "later"}, ["now", "later"]),
        ([system(change("tool_addition", "later"))], None, ["now", "later"]),
        ([system(change("tool_removal", "now"))], None, []),
        ([system(change("tool_removal", "now"), change("tool_addition", "now"))], None, ["now"]),
        (
            [
                assistant({"type": "tool_use", "id": "c1", "name": "now", "input": {}}),
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "tool_reference", "tool_name": "later"}],
                    }
                ),
            ],
            None,
            ["now", "later"],
        ),
    ],
)
async def test_the_model_sees_the_tools_on_offer(
    gateway: Gateway,
    tenant: TestTenant,
    messages: list[dict[str, Any]],
    choice: dict[str, Any] | None,
    shown: list[str],
) -> None:
    """A deferred tool is in the prompt once a message or the tool choice names it; a withdrawn tool is not."""
    tools = [tool("now"), tool("later", defer_loading=True)]
    sent = body(USER, *messages, tools=tools) | ({} if choice is None else {"tool_choice": choice})

    answer = await tenant.client.post("/v1/messages", json=sent)

    assert answer.status_code == 200, answer.text
    assert [name for name in ("now", "later") if f'"name": "{name}", "parameters"' in prompt(gateway.engine)] == shown


async def test_a_reminder_ends_with_its_turn(gateway: Gateway, tenant: TestTenant) -> None:
    """A system message for one turn is shown until the user speaks again."""
    reminder = system(text("Be quick."), clear_at="next_user_message")

    await tenant.client.post("/v1/messages", json=body(USER, reminder))
    during = prompt(gateway.engine)
    await tenant.client.post("/v1/messages", json=body(USER, reminder, USER))

    assert "Be quick." in during
    assert "Be quick." not in prompt(gateway.engine)


async def test_the_answer_continues_the_last_message(gateway: Gateway, tenant: TestTenant) -> None:
    """With a prefill the prompt is that of transformers with an open last message, streamed, whole and counted."""
    gateway.engine.text = "B)"
    sent = body(USER, assistant(text("The best answer is (")))
    plain = [USER, {"role": "assistant", "content": "The best answer is ("}]
    expected = REFERENCES["chatml"].apply_chat_template(plain, continue_final_message=True, return_dict=False)

    whole = await tenant.client.post("/v1/messages", json=sent)
    streamed = await tenant.client.post("/v1/messages", json=sent | {"stream": True})
    counted = await count(tenant, sent)

    assert [list(request.prompt_token_ids) for request in gateway.engine.requests] == [expected, expected]
    assert whole.json()["content"] == [{"type": "text", "text": "B)"}]
    assert '"text_delta"' in streamed.text
    assert counted.json()["input_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("last", "fields", "complaint"),
    [
        (assistant({"type": "tool_use", "id": "c", "name": "f", "input": {}}), {}, "messages[1] calls tools"),
        (assistant(text("Let me"), {"type": "tool_use", "id": "c", "name": "f", "input": {}}), {}, "messages[1] calls"),
        (assistant({"type": "thinking", "thinking": "Hm.", "signature": ""}), {}, "messages[1] has no text"),
        (
            assistant(text("{")),
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "output_config.format",
        ),
    ],
)
async def test_a_prefill_that_cannot_be_continued(
    gateway: Gateway, tenant: TestTenant, last: dict[str, Any], fields: dict[str, Any], complaint: str
) -> None:
    """A last message with calls or without text, and a prefill beside a format, are refused by their fields."""
    answer = await tenant.client.post("/v1/messages", json=body(USER, last, **fields))

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(complaint)
    assert gateway.engine.requests == []


@pytest.mark.parametrize("messages", [[], [system(change("tool_removal", "now"))], [system()]])
async def test_a_prompt_needs_a_message(tenant: TestTenant, messages: list[dict[str, Any]]) -> None:
    """Messages of which the model sees none are a 400 that names the field, unless `system` has a text."""
    sent = body() | {"messages": messages, "tools": [tool("now")]}

    refused = await count(tenant, sent)
    with_system = await count(tenant, sent | {"system": "Be brief."})

    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages has no message" if messages else "messages: ")
    assert with_system.status_code == (200 if messages else 400), with_system.text


async def test_an_older_name_of_the_format(gateway: Gateway, tenant: TestTenant) -> None:
    """`output_format` constrains the answer like `output_config.format`."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}

    answer = await tenant.client.post(
        "/v1/messages", json=body(output_format={"type": "json_schema", "schema": schema})
    )

    assert answer.status_code == 200, answer.text
    assert gateway.engine.requests[0].grammar is not None
    assert IGNORED not in answer.headers
