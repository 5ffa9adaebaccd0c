"""Tests of the encoding of prompts: which process encodes them, and which prompts are refused before."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import ContextLengthExceeded, InvalidRequest
from graftwork.sessions.text.encoding import (
    LONG_CHARACTERS,
    SHORT_CHARACTERS,
    ContinuationPrompt,
    ConversationPrompt,
    LocalEncoding,
    Prompt,
    PromptEncoder,
    PromptEncoding,
    TextPrompt,
    as_plain,
    from_plain,
    has_more_characters,
)
from graftwork.sessions.text.messages import Message, ToolCall
from graftwork.sessions.text.token_density import TokenDensity
from graftwork.sessions.text.tokenizer import TextTokenizer
from tests.sessions.tokenizer_and_templates import chat_template, text_tokenizer, tokenizer_json

CONTEXT = 100_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WORDS = "The weather in Zürich is sunny 🙂 <|im_end|>. "
LONG = WORDS * (LONG_CHARACTERS // len(WORDS) + 1)
CALL = Message("assistant", None, (ToolCall("call_1", "f", '{"a": 1}'),))
LONG_PROMPTS: list[Prompt] = [
    TextPrompt(LONG, add_special_tokens=True),
    TextPrompt(LONG, continues=True),
    ConversationPrompt((Message("user", LONG), CALL, Message("tool", "ok", tool_call_id="call_1")), [TOOL]),
    ConversationPrompt((Message("user", LONG),), None, add_generation_prompt=False),
    ContinuationPrompt(Message("assistant", "Yes", reasoning="?"), (Message("user", LONG),), closed=True),
]


class WatchedTokenizer(TextTokenizer):
    """Notes the thread of each call that encodes."""

    def __init__(self) -> None:
        super().__init__(tokenizer_json())
        self.threads: list[int] = []

    def encode(self, text: str, **options: Any) -> tuple[int, ...]:
        self.threads.append(threading.get_ident())
        return super().encode(text, **options)


def local(tokenizer: TextTokenizer, context_tokens: int = CONTEXT) -> LocalEncoding:
    return LocalEncoding(tokenizer, PromptEncoder(chat_template(), tokenizer, context_tokens), context_tokens)


@pytest.fixture(scope="module")
def watched() -> WatchedTokenizer:
    return WatchedTokenizer()


@pytest.fixture
async def encoding(watched: WatchedTokenizer) -> AsyncIterator[PromptEncoding]:
    watched.threads.clear()
    encoding = PromptEncoding(local(watched), ManualClock(), num_workers=1)
    yield encoding
    await encoding.close()


async def test_long_prompts_are_encoded_in_another_process(encoding: PromptEncoding, watched: WatchedTokenizer) -> None:
    """A long prompt gets the ids that this process would give it, and this process never encodes it."""
    for prompt in LONG_PROMPTS:
        assert encoding.is_long(prompt)
        assert await encoding.encode("ten_1", prompt) == local(text_tokenizer()).encode(prompt)
        assert await encoding.count("ten_1", prompt) == len(local(text_tokenizer()).encode(prompt))

    assert watched.threads == []
    assert len(encoding.workers.worker_pids) == 1


async def test_other_prompts_are_encoded_on_another_thread(encoding: PromptEncoding, watched: WatchedTokenizer) -> None:
    """A prompt of a page, and one with values for the template, start no process and do not keep the event loop busy."""
    page = "x" * (SHORT_CHARACTERS + 1)
    messages = (Message("user", "Hi"),)
    for prompt in (TextPrompt(page), ConversationPrompt(messages, variables={"rounds": 10**9})):
        assert await encoding.encode("ten_1", prompt) == local(text_tokenizer()).encode(prompt)

    assert len(watched.threads) == 2
    assert threading.get_ident() not in watched.threads
    assert encoding.workers.worker_pids == ()


async def test_a_few_words_are_encoded_at_once(encoding: PromptEncoding, watched: WatchedTokenizer) -> None:
    """A prompt that takes as long as a thread's start changes to no thread, and gets the same ids."""
    for prompt in (TextPrompt("x" * (SHORT_CHARACTERS - 1)), ConversationPrompt((Message("user", "Hi"),))):
        assert await encoding.encode("ten_1", prompt) == local(text_tokenizer()).encode(prompt)

    assert watched.threads == [threading.get_ident()] * 2


async def test_errors_of_a_worker_are_those_of_this_process(encoding: PromptEncoding) -> None:
    """A long prompt that the template or the context refuses raises the same error as a short one."""
    text = TextPrompt("x" * (CONTEXT + 1))
    with pytest.raises(ContextLengthExceeded) as exact:
        await encoding.encode("ten_1", text)
    with pytest.raises(InvalidRequest) as no_template:
        await PromptEncoding(LocalEncoding(text_tokenizer(), None, CONTEXT), ManualClock()).encode(
            "ten_1", ConversationPrompt((Message("user", "Hi"),))
        )

    assert exact.value.details["prompt_tokens"] == CONTEXT + 1
    assert await encoding.count("ten_1", text) == CONTEXT + 1
    assert no_template.value.code == "no_chat_template"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    """The refusal has a number of tokens that the text has at least, and the tokenizer never sees the text."""
    tokenizer = WatchedTokenizer()
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    text = "x" * (longest * 50 + 1)
    prompts = (TextPrompt(text), ConversationPrompt((Message("user", text),)))

    for prompt in prompts:
        with pytest.raises(ContextLengthExceeded, match="resulted in at least") as caught:
            local(tokenizer, context_tokens=50).encode(prompt)
        assert 50 < caught.value.details["prompt_tokens"] <= len(text_tokenizer().encode(text, allow_special=True))

    assert tokenizer.threads == []


@given(st.text() | st.text(alphabet=" \n\t<|im_end>abchtw", max_size=200))
def test_the_least_number_of_tokens_is_honest(text: str) -> None:
    """No text has fewer tokens than the number that its length gives."""
    tokenizer = text_tokenizer()
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=False)
    density = TokenDensity.of(_content(Tokenizer.from_str(tokenizer_json())), vocabulary)

    assert density.longest_token_bytes is not None
    assert density.least_tokens(text) <= len(tokenizer.encode(text, allow_special=True))
    assert density.least_tokens(text) <= len(tokenizer.encode_user_text(text))


def test_tokenizers_that_drop_text_give_no_number() -> None:
    """If a tokenizer drops spaces, unknown characters or accents, no length of a text proves anything."""
    whole = Tokenizer.from_str(tokenizer_json())
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    stripped = Tokenizer.from_str(tokenizer_json())
    stripped.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    composed = Tokenizer.from_str(tokenizer_json())
    composed.normalizer = normalizers.NFC()

    least = [
        TokenDensity.of(_content(one), one.get_vocab(with_added_tokens=False)).least_tokens("é" * 1000)
        for one in (whole, composed, words, unknown, stripped)
    ]

    assert least[0] > least[1] > 0
    assert least[2:] == [0, 0, 0]


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def test_prompts_survive_as_plain_data() -> None:
    """A prompt that was turned into plain data is the same prompt again."""
    for prompt in LONG_PROMPTS:
        assert from_plain(as_plain(prompt)) == prompt


def test_the_length_of_a_prompt_counts_all_its_texts() -> None:
    """Contents, reasoning, names, arguments and tools count, keys too."""
    message = Message("assistant", "12", (ToolCall("3", "4", "56"),), name="7", reasoning="89")
    prompt = ConversationPrompt((message,), [{"ab": "c"}])

    assert has_more_characters(prompt, 11)
    assert not has_more_characters(prompt, 30)
    assert has_more_characters(ConversationPrompt((), [{"k" * 31: None}]), 30)
