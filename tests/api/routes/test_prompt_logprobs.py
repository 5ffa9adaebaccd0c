"""Tests of the log-probabilities of prompts: `echo` with `logprobs`, `max_tokens: 0` and `prompt_logprobs`."""

from typing import Any

import pytest

from tests.api.fake_engine import END
from tests.api.in_process_gateway import Gateway, TestTenant, chat, chunks
from tests.sessions.tokenizer_and_templates import text_tokenizer

TEXT = "The weather in Paris"
IDS = list(text_tokenizer().encode(TEXT, allow_special=True))
PIECES = [text_tokenizer().decode([token]) for token in IDS]
OFFSETS = [sum(map(len, PIECES[:place])) for place in range(len(PIECES))]


def body(prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


def logprob(token: int) -> float:
    """The log-probability that the fake engine gives every token."""
    return -(token + 1) / 1000


@pytest.mark.parametrize("prompt", [TEXT, IDS])
async def test_an_echoed_prompt_has_logprobs(gateway: Gateway, tenant: TestTenant, prompt: Any) -> None:
    """With echo and logprobs, the lists begin with the prompt's tokens; only the first one has null."""
    found = (await tenant.client.post("/v1/completions", json=body(prompt, echo=True, logprobs=1, max_tokens=1))).json()

    choice = found["choices"][0]
    lists = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert len(choice["text"]) > len(TEXT)
    assert lists["tokens"][: len(IDS)] == PIECES
    assert lists["token_logprobs"][: len(IDS)] == [None, *map(logprob, IDS[1:])]
    assert lists["text_offset"] == [*OFFSETS, len(TEXT)]
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][1] == {PIECES[1]: logprob(IDS[1])}
    assert {len(entries) for entries in lists.values()} == {len(IDS) + 1}
    assert gateway.engine.requests[0].sampling.prompt_logprobs == 1


async def test_nothing_is_generated(gateway: Gateway, tenant: TestTenant) -> None:
    """With max_tokens 0 and echo, the answer is the prompt with its logprobs, and no token is charged for an answer."""
    answer = await tenant.client.post("/v1/completions", json=body(echo=True, logprobs=0, max_tokens=0))

    found = answer.json()
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *map(logprob, IDS[1:])]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (len(IDS), 0)
    assert gateway.engine.requests[0].sampling.max_tokens == 0


async def test_a_stop_token_after_an_echo_has_an_entry(gateway: Gateway, tenant: TestTenant) -> None:
    """After an echoed prompt each generated token has an entry, the stop token too: clients drop the last one."""
    gateway.engine.text = ""

    found = (await tenant.client.post("/v1/completions", json=body(echo=True, logprobs=1, max_tokens=1))).json()

    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert choice["logprobs"]["token_logprobs"] == [None, *map(logprob, IDS[1:]), logprob(END)]
    assert choice["logprobs"]["text_offset"][-1] == len(TEXT)


async def test_several_choices_and_prompts_share_the_figures_of_their_prompt(
    gateway: Gateway, tenant: TestTenant
) -> None:
    """Each choice shows its own prompt's figures, which the engine computes once for each prompt."""
    fields = {"echo": True, "logprobs": 0, "n": 2, "max_tokens": 1}
    found = (await tenant.client.post("/v1/completions", json=body([IDS, IDS[::-1]], **fields))).json()

    shown = [choice["logprobs"]["token_logprobs"][1 : len(IDS)] for choice in found["choices"]]
    forwards, backwards = list(map(logprob, IDS[1:])), list(map(logprob, IDS[-2::-1]))
    assert shown == [forwards, forwards, backwards, backwards]
    asked = [request.sampling.prompt_logprobs for request in gateway.engine.requests]
    assert sorted(asked, key=str) == [0, 0, None, None]


async def test_a_stream_echoes_the_prompt_with_logprobs(tenant: TestTenant) -> None:
    """In a stream, the first chunk of each choice has the prompt and its figures; the chunks add up to the whole."""
    fields = {"echo": True, "logprobs": 2, "n": 2, "max_tokens": 3}
    whole = (await tenant.client.post("/v1/completions", json=body(**fields))).json()

    found = chunks((await tenant.client.post("/v1/completions", json=body(stream=True, **fields))).text)

    for index, expected in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert mine[0]["text"] == TEXT
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        for name, entries in expected["logprobs"].items():
            assert [one for choice in mine if choice["logprobs"] for one in choice["logprobs"][name]] == entries


async def test_completions_in_the_form_of_vllm(tenant: TestTenant) -> None:
    """prompt_logprobs of a completion maps token ids to log-probability, rank and text, the prompt's token first."""
    found = (await tenant.client.post("/v1/completions", json=body(prompt_logprobs=2, max_tokens=1))).json()

    choice = found["choices"][0]
    first, second = choice["prompt_logprobs"][:2]
    assert first is None
    assert len(choice["prompt_logprobs"]) == len(IDS)
    assert choice["logprobs"] is None
    assert list(second) == [str(IDS[1]), str(IDS[1] + 1)]
    assert second[str(IDS[1])] == {"logprob": logprob(IDS[1]), "rank": 1, "decoded_token": PIECES[1]}


async def test_chats_in_the_form_of_vllm(gateway: Gateway, tenant: TestTenant) -> None:
    """prompt_logprobs of a chat stands beside its choices, with one entry for each token of the prompt."""
    answer = await tenant.client.post("/v1/chat/completions", json=chat(prompt_logprobs=0, n=2, max_tokens=2))

    found = answer.json()["prompt_logprobs"]
    prompt = gateway.engine.requests[0].prompt_token_ids
    assert found[0] is None
    assert [list(entry) for entry in found[1:]] == [[str(token)] for token in prompt[1:]]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
async def test_streams_have_no_place_for_them(tenant: TestTenant, route: str) -> None:
    """prompt_logprobs in a stream is a 400 that names the field, as in vLLM."""
    given = body() if route == "completions" else chat()

    answer = await tenant.client.post(f"/v1/{route}", json=given | {"prompt_logprobs": 1, "stream": True})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_chats_with_token_ids(gateway: Gateway, tenant: TestTenant) -> None:
    """With return_token_ids, a chat and its stream have the tokens of the prompt and of each choice."""
    whole = (await tenant.client.post("/v1/chat/completions", json=chat(return_token_ids=True))).json()
    found = chunks(
        (await tenant.client.post("/v1/chat/completions", json=chat(return_token_ids=True, stream=True))).text
    )

    prompt = list(gateway.engine.requests[0].prompt_token_ids)
    token_ids = whole["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"] == found[0]["prompt_token_ids"] == prompt
    assert text_tokenizer().decode(token_ids) == gateway.engine.text
    assert len(token_ids) == whole["usage"]["completion_tokens"]
    assert [chunk["choices"][0].get("token_ids") for chunk in found] == [None] * (len(found) - 1) + [token_ids]
    assert not any("prompt_token_ids" in chunk for chunk in found[1:])
