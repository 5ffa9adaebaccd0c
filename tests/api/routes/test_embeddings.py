"""Tests of `POST /v1/embeddings`, over an engine whose embedding of a prompt is its token ids."""

import base64
import math
import struct
from typing import Any

import pytest
from openai import AsyncOpenAI

from graftwork import AsyncGraftwork
from graftwork.engine.core.pooling import Pooling
from graftwork.platform.quotas.quota import Quota
from tests.api.fake_engine import CONTEXT_TOKENS, HIDDEN_SIZE
from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.sessions.tokenizer_and_templates import text_tokenizer

TEXTS = ["The weather in Paris is sunny.", "It rains.", "Tokyo"]
IDS = [list(text_tokenizer().encode(text, allow_special=True)) for text in TEXTS]


def body(inputs: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": inputs, **fields}


def raw(token_ids: list[int]) -> list[float]:
    """The embedding that the fake engine gives a prompt."""
    return [float(token) for token in (token_ids * HIDDEN_SIZE)[:HIDDEN_SIZE]]


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


async def test_texts_and_ids_are_embedded_in_order(gateway: Gateway, tenant: TestTenant) -> None:
    """A text, texts, ids and lists of ids have their embeddings in order, of length 1, and every prompt is billed."""
    forms: list[tuple[Any, list[list[int]]]] = [(TEXTS[0], IDS[:1]), (TEXTS, IDS), (IDS[0], IDS[:1]), (IDS, IDS)]
    for form, prompts in forms:
        answer = (await tenant.client.post("/v1/embeddings", json=body(form))).json()

        assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
        for one, prompt in zip(answer["data"], prompts, strict=True):
            assert one["embedding"] == pytest.approx(unit(raw(prompt)), rel=1e-6)
        num_tokens = sum(map(len, prompts))
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            num_tokens,
            0,
            num_tokens,
        )
    assert {request.sampling.max_tokens for request in gateway.engine.requests} == {0}


async def test_the_vector_follows_the_request(gateway: Gateway, tenant: TestTenant) -> None:
    """`normalize`, `dimensions` and `encoding_format` shape the vector; a shorter vector has the length 1 too."""
    plain, short, packed = [
        (await tenant.client.post("/v1/embeddings", json=body(TEXTS[0], **fields))).json()["data"][0]["embedding"]
        for fields in (
            {"normalize": False},
            {"dimensions": 3},
            {"encoding_format": "base64", "normalize": False, "dimensions": 5},
        )
    ]

    assert plain == raw(IDS[0])
    assert short == pytest.approx(unit(raw(IDS[0])[:3]), rel=1e-6)
    assert list(struct.unpack("<5f", base64.b64decode(packed))) == raw(IDS[0])[:5]


async def test_the_engine_gets_the_pooling(gateway: Gateway, tenant: TestTenant) -> None:
    """The last token's hidden state is the default, and `pooling` chooses the mean."""
    for fields in ({}, {"pooling": "mean"}):
        await tenant.client.post("/v1/embeddings", json=body("Paris", **fields))

    assert [request.pooling for request in gateway.engine.requests] == [Pooling.LAST, Pooling.MEAN]


async def test_many_texts_take_few_places(gateway: Gateway, tenant: TestTenant) -> None:
    """A request with 300 texts is answered, although one tenant may have 128 answers in flight."""
    texts = [f"Text {number}" for number in range(300)]

    answer = await tenant.client.post("/v1/embeddings", json=body(texts))

    assert answer.status_code == 200
    expected = [unit(raw(list(text_tokenizer().encode(text, allow_special=True)))) for text in texts]
    for one, vector in zip(answer.json()["data"], expected, strict=True):
        assert one["embedding"] == pytest.approx(vector, rel=1e-6)


async def test_wrong_requests_name_the_field(gateway: Gateway, tenant: TestTenant) -> None:
    """What cannot be embedded is a 400 that names the field, and nothing reaches the engine."""
    bad: list[tuple[str, Any]] = [
        ("input", None),
        ("input", []),
        ("input", ""),
        ("input", [[]]),
        ("input", ["Paris", ""]),
        ("input", ["x"] * 2049),
        ("input", [-1]),
        ("input", [gateway.resources.inference.description.vocab_size]),
        ("input", [0] * (CONTEXT_TOKENS + 1)),
        ("dimensions", 0),
        ("dimensions", HIDDEN_SIZE + 1),
        ("encoding_format", "hex"),
        ("pooling", "max"),
    ]
    for field, value in bad:
        answer = await tenant.client.post("/v1/embeddings", json=body("Paris") | {field: value})

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (field, value)
    assert not gateway.engine.requests


async def test_an_input_may_fill_the_context(gateway: Gateway, tenant: TestTenant) -> None:
    """An embedding needs no room for an answer, so an input may be as long as the context."""
    answer = await tenant.client.post("/v1/embeddings", json=body([5] * CONTEXT_TOKENS))

    assert answer.status_code == 200


async def test_limits_hold(gateway: Gateway) -> None:
    """Prompt tokens count in the tenant's limit, and an unknown model is a 404."""
    tenant = await gateway.tenant("Small", quota=Quota(tokens_per_minute=len(IDS[0])))

    answers = [await tenant.client.post("/v1/embeddings", json=body(TEXTS[0])) for _ in range(2)]
    unknown = await tenant.client.post("/v1/embeddings", json={"model": "nobody", "input": "x"})

    assert [answer.status_code for answer in answers] == [200, 429]
    assert unknown.status_code == 404


async def test_unmodified_clients_read_the_vectors(gateway: Gateway, tenant: TestTenant) -> None:
    """The openai package, which asks for base64, and our SDK read the same vectors."""
    async with (
        gateway_on_port(gateway) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as openai,
        AsyncGraftwork(base_url=url, api_key=tenant.key) as ours,
    ):
        theirs = await openai.embeddings.create(model="tiny", input=TEXTS)
        answer = await ours.embeddings.create(model="tiny", input=TEXTS, encoding_format="base64")

    for prompt, one, other in zip(IDS, theirs.data, answer.data, strict=True):
        assert one.embedding == pytest.approx(unit(raw(prompt)), rel=1e-6)
        assert list(other.vector) == one.embedding
    assert theirs.usage.prompt_tokens == sum(map(len, IDS))
