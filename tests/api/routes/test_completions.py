"""Tests of `POST /v1/completions`, `/v1/tokenize` and `/v1/detokenize`."""

import json
from typing import Any

from graftwork.platform.quotas.quota import Quota
from tests.api.fake_engine import CONTEXT_TOKENS
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks
from tests.sessions.tokenizer_and_templates import prompt_encoder, text_tokenizer

TEXT = "The weather"
IDS = list(text_tokenizer().encode(TEXT, allow_special=True))


def body(prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def test_forms_of_a_prompt(gateway: Gateway, tenant: TestTenant) -> None:
    """Text, texts, ids and lists of ids are prompts, answered in order."""
    forms: list[Any] = [TEXT, [TEXT, "Paris"], IDS, [IDS, IDS[:1]], [TEXT, IDS]]
    counts = []
    for form in forms:
        answer = await tenant.client.post("/v1/completions", json=body(form, max_tokens=3))
        counts.append([choice["index"] for choice in answer.json()["choices"]])

    assert counts == [[0], [0, 1], [0], [0, 1], [0, 1]]
    prompts = [request.prompt_token_ids for request in gateway.engine.requests]
    assert prompts[0] == prompts[1] == prompts[3] == prompts[4] == tuple(IDS)


async def test_answer(gateway: Gateway, tenant: TestTenant) -> None:
    """An answer has OpenAI's shape; every prompt counts once."""
    answer = await tenant.client.post("/v1/completions", json=body([TEXT, "Paris"], n=2, max_tokens=50))

    found = answer.json()
    assert found["object"] == "text_completion"
    assert [choice["text"] for choice in found["choices"]] == [gateway.engine.text] * 4
    assert [choice["finish_reason"] for choice in found["choices"]] == ["stop"] * 4
    lengths = [len(request.prompt_token_ids) for request in gateway.engine.requests]
    assert found["usage"]["prompt_tokens"] == lengths[0] + lengths[2]


async def test_default_length(gateway: Gateway, tenant: TestTenant) -> None:
    """The default of max_tokens is 16, as in OpenAI's API."""
    await tenant.client.post("/v1/completions", json=body())

    assert gateway.engine.requests[0].sampling.max_tokens == 16


async def test_echo(gateway: Gateway, tenant: TestTenant) -> None:
    """With echo the prompt stands before the completion, for text and for ids."""
    for prompt in (TEXT, IDS):
        found = (await tenant.client.post("/v1/completions", json=body(prompt, echo=True, max_tokens=50))).json()

        assert found["choices"][0]["text"] == TEXT + gateway.engine.text


async def test_token_ids(gateway: Gateway, tenant: TestTenant) -> None:
    """With return_token_ids a choice has the ids that were made, the end token too."""
    found = (await tenant.client.post("/v1/completions", json=body(return_token_ids=True, max_tokens=50))).json()

    choice = found["choices"][0]
    assert text_tokenizer().decode(choice["token_ids"]) == gateway.engine.text
    assert len(choice["token_ids"]) == found["usage"]["completion_tokens"]
    assert choice["prompt_token_ids"] == IDS


async def test_stream(gateway: Gateway, tenant: TestTenant) -> None:
    """A stream spells the same text, with ids in the last chunk of each choice and usage at the end."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "echo": True}

    found = chunks((await tenant.client.post("/v1/completions", json=body(n=2, max_tokens=50, **options))).text)

    *steps, usage = found
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in steps if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == TEXT + gateway.engine.text
        assert mine[-1]["finish_reason"] == "stop"
        assert [choice for choice in mine if "token_ids" in choice] == mine[-1:]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(IDS)


async def test_bad_values(gateway: Gateway, tenant: TestTenant) -> None:
    """An invalid or unsupported value is a 400 that names the field."""
    vocab_size = gateway.resources.inference.description.vocab_size
    bad: list[tuple[str, Any]] = [
        ("suffix", "the end"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"x": 1}),
        ("stop_token_ids", [vocab_size]),
        ("best_of", 2),
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [vocab_size]),
        ("prompt", [-1]),
        ("prompt", [1 << 80]),
        ("prompt", {"text": "x"}),
        ("prompt", ["x"] * 129),
        ("guided_json", "{"),
        ("prompt", [0] * (CONTEXT_TOKENS + 1)),
    ]
    for field, value in bad:
        answer = await tenant.client.post("/v1/completions", json=body() | {field: value})

        assert answer.status_code == 400, (field, value, answer.text)
        assert answer.json()["error"]["param"] == field, (field, value, answer.text)
    assert gateway.engine.requests == []


async def test_too_many_choices(tenant: TestTenant) -> None:
    """Prompts times n is bounded."""
    answer = await tenant.client.post("/v1/completions", json=body([TEXT] * 3, n=100))

    assert answer.status_code == 400


async def test_tokenize_text(tenant: TestTenant) -> None:
    """tokenize returns the ids of a completion's prompt, and detokenize reverses it."""
    found = (await tenant.client.post("/v1/tokenize", json={"model": "tiny", "prompt": TEXT})).json()
    back = (await tenant.client.post("/v1/detokenize", json={"model": "tiny", "tokens": found["tokens"]})).json()

    assert found == {"tokens": IDS, "count": len(IDS), "max_model_len": CONTEXT_TOKENS}
    assert back == {"prompt": TEXT}


async def test_tokenize_messages(gateway: Gateway, tenant: TestTenant) -> None:
    """Messages become the same prompt as in chat.completions."""
    await tenant.client.post("/v1/chat/completions", json=chat("Hello <|im_end|>"))

    found = (await tenant.client.post("/v1/tokenize", json=chat("Hello <|im_end|>"))).json()

    assert tuple(found["tokens"]) == gateway.engine.requests[0].prompt_token_ids


async def test_user_text_is_not_control(gateway: Gateway, tenant: TestTenant) -> None:
    """A message that spells a control token becomes no control token."""
    found = (await tenant.client.post("/v1/tokenize", json=chat("<|im_end|>"))).json()
    plain = (await tenant.client.post("/v1/tokenize", json=chat("x"))).json()

    end = prompt_encoder().tokenizer.token_id("<|im_end|>")
    assert found["tokens"].count(end) == plain["tokens"].count(end)


async def test_bad_tokenize(tenant: TestTenant) -> None:
    """Neither or both of prompt and messages, ids without a token and unknown models are refused."""
    both = chat() | {"prompt": "x"}
    bad: list[tuple[str, dict[str, Any], int]] = [
        ("tokenize", {"model": "tiny"}, 400),
        ("tokenize", both, 400),
        ("detokenize", {"model": "tiny", "tokens": [10**9]}, 400),
        ("detokenize", {"model": "tiny", "tokens": [-1]}, 400),
        ("detokenize", {"model": "tiny", "tokens": ["a"]}, 400),
        ("tokenize", {"model": "nobody", "prompt": "x"}, 404),
    ]
    for route, given, status in bad:
        answer = await tenant.client.post(
            f"/v1/{route}", content=json.dumps(given), headers={"content-type": "application/json"}
        )

        assert answer.status_code == status, (route, given, answer.text)


async def test_a_token_limit_beyond_the_context(gateway: Gateway) -> None:
    """Each prompt reserves only the answer that fits behind it, and no prompt cuts the answer to another."""
    long_prompt = IDS[:1] * (CONTEXT_TOKENS - 10)
    needed = 2 * CONTEXT_TOKENS
    tenant = await gateway.tenant(quota=Quota(tokens_per_minute=needed))

    answer = await tenant.client.post("/v1/completions", json=body([long_prompt, IDS], max_tokens=10 * CONTEXT_TOKENS))

    assert answer.status_code == 200
    assert {request.sampling.max_tokens for request in gateway.engine.requests} == {CONTEXT_TOKENS - len(IDS)}


async def test_context_limit(tenant: TestTenant) -> None:
    """A prompt without room for an answer is a 400 in OpenAI's words."""
    answer = await tenant.client.post("/v1/completions", json=body(IDS[:1] * CONTEXT_TOKENS, max_tokens=5))

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error["message"] == (
        f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, you requested {CONTEXT_TOKENS + 5} "
        f"tokens ({CONTEXT_TOKENS} in the prompt, 5 in the completion). Please reduce the length of the prompt or "
        "completion (context_length_exceeded)."
    )
