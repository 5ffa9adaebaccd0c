"""Tests of the detokenizer: streaming gives the same text as decoding at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.sessions.text.tokenizer import Detokenizer
from tests.hypothesis_profiles import examples
from tests.sessions.fakes_text import text_tokenizer, texts, token_id
from tests.sessions.text.test_tokenizer import sentencepiece_tokenizer

VOCABULARY = text_tokenizer().vocab_size


@given(token_ids=st.lists(st.integers(0, VOCABULARY + 2), max_size=60), skip=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=examples(200))
def test_deltas_join_to_the_whole(token_ids: list[int], skip: bool, seed: int) -> None:
    """For any tokens, in steps of any size, the deltas joined are what the library decodes at once."""
    detokenizer = Detokenizer(text_tokenizer(), skip_special_tokens=skip)
    cuts = random.Random(seed)

    deltas, left = [], list(token_ids)
    while left:
        size = cuts.randint(0, 3)
        deltas += [detokenizer.push(token) for token in left[:size]]
        left = left[size:]
    deltas.append(detokenizer.flush())

    assert "".join(deltas) == text_tokenizer().decode(token_ids, skip_special_tokens=skip)


@given(text=texts)
@settings(max_examples=examples(100))
def test_only_whole_characters_are_passed_on(text: str) -> None:
    """Valid text is passed on as soon as each character is complete, and never as U+FFFD."""
    tokenizer = text_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    encoded = text.encode()
    seen, num_bytes = "", 0

    for token in tokenizer.encode_user_text(text):
        seen += detokenizer.push(token)
        num_bytes += len(tokenizer.bytes.of(tokenizer.token_text(token) or ""))
        assert seen == encoded[:num_bytes].decode(errors="ignore")

    assert (seen, detokenizer.flush()) == (text, "")


def test_begun_character_is_flushed_as_a_replacement() -> None:
    """Half an emoji at the end is one U+FFFD, and only at the end."""
    halves = text_tokenizer().encode_user_text("🙂")
    detokenizer = Detokenizer(text_tokenizer())

    assert detokenizer.push(halves[0]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_replacement_character_itself_is_text() -> None:
    """U+FFFD that the model writes is passed on like any other character."""
    detokenizer = Detokenizer(text_tokenizer())

    assert "".join(map(detokenizer.push, text_tokenizer().encode_user_text("\ufffd"))) == "\ufffd"


def test_shown_special_tokens_are_text() -> None:
    """Special tokens are skipped, except those in `shown`."""
    detokenizer = Detokenizer(text_tokenizer(), shown=frozenset([token_id("<|im_start|>")]))

    assert detokenizer.push(token_id("<|im_start|>")) == "<|im_start|>"
    assert detokenizer.push(token_id("<|im_end|>")) == ""


@pytest.mark.parametrize("text", ["say a", " say", "  a", "🙂 é\n", "", " "])
def test_byte_fallback(text: str) -> None:
    """SentencePiece's spaces and byte tokens come out as the library decodes them."""
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.encode(text, allow_special=True)
    detokenizer = Detokenizer(tokenizer)

    deltas = [detokenizer.push(token) for token in token_ids]

    assert "".join([*deltas, detokenizer.flush()]) == tokenizer.decode(token_ids) == text
