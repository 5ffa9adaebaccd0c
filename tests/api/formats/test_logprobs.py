"""Tests of logprobs, choices and penalties through the unmodified `openai` package."""

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionTokenLogprob

from tests.api.gateway_on_port import gateway_on_port
from tests.api.in_process_gateway import Gateway, TestTenant
from tests.sessions.tokenizer_and_templates import text_tokenizer

TEXT = "Grüße 🙂 from Paris."
IDS = text_tokenizer().encode(TEXT, allow_special=True)


@pytest.fixture
async def client(gateway: Gateway, tenant: TestTenant) -> AsyncIterator[AsyncOpenAI]:
    gateway.engine.text = TEXT
    async with gateway_on_port(gateway) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        yield client


def check_content(content: list[ChatCompletionTokenLogprob], num_top: int) -> None:
    """Asserts one entry for each token, with its bytes, its score and its alternatives."""
    assert bytes(byte for entry in content for byte in entry.bytes or ()).decode() == TEXT
    assert [entry.logprob for entry in content] == [pytest.approx(-(token + 1) / 1000) for token in IDS]
    assert all(len(entry.top_logprobs) == num_top for entry in content)
    assert all(bytes(entry.bytes or ()).decode(errors="replace") == entry.token for entry in content)


async def test_chat(client: AsyncOpenAI) -> None:
    """A chat's logprobs spell its answer, token by token, with the asked number of alternatives."""
    for num_top in (0, 3):
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=num_top
        )

        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        check_content(logprobs.content or [], num_top)


async def test_streamed_chat(client: AsyncOpenAI) -> None:
    """Every chunk has the scores of the tokens that begin in it, in all choices, and the SDK's helper joins them."""
    found: dict[int, list[ChatCompletionTokenLogprob]] = {0: [], 1: []}
    create = client.chat.completions.create
    stream = await create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
        n=2,
        seed=3,
        stream=True,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None:
                assert choice.delta.content or choice.finish_reason
                found[choice.index] += choice.logprobs.content or []
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True
    ) as helper:
        final = await helper.get_final_completion()

    check_content(found[0], 2)
    check_content(found[1], 2)
    assert final.choices[0].logprobs is not None
    check_content(final.choices[0].logprobs.content or [], 0)


async def test_completion(client: AsyncOpenAI) -> None:
    """Each choice has parallel lists of tokens, logprobs, alternatives and offsets."""
    answer = await client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, logprobs=2, max_tokens=50)

    assert len(answer.choices) == 4
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == pytest.approx([-(token + 1) / 1000 for token in IDS])
        tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
        for token, offset in zip(tokens, offsets, strict=True):
            assert choice.text[offset:].startswith(token) or token.startswith("bytes:\\x")
        pairs = zip(tokens, logprobs.top_logprobs or [], strict=True)
        assert all(token in top and len(top) == 2 for token, top in pairs)


async def test_echoed_prompts_have_figures_too(client: AsyncOpenAI) -> None:
    """With echo, each token stands in the text at its offset, prompt and answer alike."""
    found = await client.completions.create(model="tiny", prompt="ab cd", logprobs=2, echo=True)

    (choice,) = found.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert len(tokens) > len(IDS)
    for token, offset in zip(tokens, offsets, strict=True):
        assert choice.text[offset:].startswith(token) or token.startswith("bytes:\\x")


async def test_streamed_completion(client: AsyncOpenAI) -> None:
    """The chunks' lists, joined, are the lists of the whole answer."""
    whole = await client.completions.create(model="tiny", prompt="ab", logprobs=1, max_tokens=50)
    stream = await client.completions.create(model="tiny", prompt="ab", logprobs=1, max_tokens=50, stream=True)

    chunks = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]

    expected = whole.choices[0].logprobs
    assert expected is not None
    assert [token for chunk in chunks for token in chunk.tokens or []] == expected.tokens
    assert [offset for chunk in chunks for offset in chunk.text_offset or []] == expected.text_offset
    assert [top for chunk in chunks for top in chunk.top_logprobs or []] == expected.top_logprobs


async def test_everything_at_once(gateway: Gateway, client: AsyncOpenAI) -> None:
    """A request with n, logit_bias and both penalties is served, and its prompt is charged once."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        n=3,
        logit_bias={"17": -100, "9": 5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=1,
        extra_body={"repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [3]},
    )

    sampling = gateway.engine.requests[2].sampling
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert (sampling.choice, sampling.logit_bias) == (2, ((9, 5.0), (17, -100.0)))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(gateway.engine.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == 3 * (len(IDS) + 1)
