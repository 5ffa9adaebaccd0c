"""Tests of sampling through the openai package: logprobs, choices, biases, penalties and seeds."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.end_to_end.conftest import DemoServer

QUESTION: Any = [{"role": "user", "content": "Tell me about the weather in Paris, please, and in Rome, and in Oslo."}]


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=server.key("Plain")) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def texts_of(answer: ChatCompletion) -> list[str]:
    return [choice.message.content or "" for choice in answer.choices]


def test_logprobs_spell_the_answer_and_are_probabilities(client: OpenAI, model: str) -> None:
    """Log-probabilities are the same streamed or not, their bytes spell the text, and a greedy token is the first of
    its alternatives."""
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=20, logprobs=True, top_logprobs=5
    )
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=20, logprobs=True, top_logprobs=5, stream=True
    )

    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    streamed = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert bytes(byte for entry in content for byte in entry.bytes or []).decode() == texts_of(whole)[0]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in entry.top_logprobs), reverse=True
        )


def test_choices_have_noise_of_their_own(client: OpenAI, model: str) -> None:
    """A seed gives the same four different answers again, and the first is the answer for n = 1."""
    options: dict[str, Any] = {"model": model, "prompt": [9, 400, 17], "temperature": 2, "max_tokens": 12, "seed": 7}

    four = [choice.text for choice in client.completions.create(n=4, **options).choices]
    again = [choice.text for choice in client.completions.create(n=4, **options).choices]
    one = [choice.text for choice in client.completions.create(**options).choices]

    assert four == again
    assert one == four[:1]
    assert len(set(four)) == 4


def test_a_prompt_is_charged_once_for_all_choices(client: OpenAI, model: str) -> None:
    """Usage counts the prompt of three choices once, and every generated token."""
    prompt = [5 + number % 200 for number in range(500)]

    answer = client.completions.create(
        model=model, prompt=prompt, n=3, max_tokens=30, temperature=1, extra_body={"ignore_eos": True}
    )

    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (500, 90)


def test_biases_and_penalties_change_what_is_said(client: OpenAI, model: str) -> None:
    """A token with a large bias is always chosen, a banned one never, and a penalty reduces repetition."""
    options: dict[str, Any] = {"model": model, "prompt": "a a a a a a", "max_tokens": 40, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

    def made(**fields: Any) -> list[int]:
        choice: Any = client.completions.create(**options, **fields).choices[0]
        return list(choice.token_ids)

    free = made()
    said = Counter(free).most_common(1)[0]
    assert set(made(logit_bias={"300": 100})) == {300}
    assert said[0] not in made(logit_bias={str(said[0]): -100})
    assert Counter(made(frequency_penalty=2, presence_penalty=2)).most_common(1)[0][1] <= said[1]
