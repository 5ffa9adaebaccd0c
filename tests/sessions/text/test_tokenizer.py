"""Tests of the tokenizer and the detokenizer."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from graftwork.platform.errors import ValidationFailed
from graftwork.sessions.text.tokenizer import Detokenizer, TextTokenizer
from tests.hypothesis_profiles import examples
from tests.sessions.tokenizer_and_templates import SPECIAL, VISIBLE, text_tokenizer, texts, token_id, tokenizer_json

WORDS = ["▁", "▁say", "say", "a", "<s>", "</s>", "[X]", "▁a", "\n", "[", "X", "]", "s", "y", "<", ">", "/"]


def sentencepiece_tokenizer() -> TextTokenizer:
    """Llama 2's shape: a space before the first word, control tokens within the vocabulary, byte fallback."""
    words = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    words |= {word: len(words) + index for index, word in enumerate(WORDS)}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    added = [
        {
            "id": words[token],
            "content": token,
            "special": special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for token, special in [("<s>", True), ("</s>", True), ("[X]", False)]
    ]
    back = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    merges = [["s", "a"], ["sa", "y"], ["▁", "say"], ["▁", "a"], ["<", "s"], ["<s", ">"]]
    words |= {pair[0] + pair[1]: len(words) + index for index, pair in enumerate(merges) if "".join(pair) not in words}
    model = {
        "type": "BPE",
        "vocab": words,
        "merges": merges,
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model,
    }
    return TextTokenizer(json.dumps(content))


@given(text=texts)
@settings(max_examples=examples(50))
def test_plain_text_has_the_same_ids_both_ways(text: str) -> None:
    """Text without control literals is encoded alike, as the library encodes it, and decodes to itself."""
    expected = tuple(Tokenizer.from_str(tokenizer_json()).encode(text, add_special_tokens=False).ids)

    assert text_tokenizer().encode(text, allow_special=True) == expected
    assert text_tokenizer().encode_user_text(text) == expected
    assert text_tokenizer().decode(expected) == text


@pytest.mark.parametrize("token", [*SPECIAL, *VISIBLE])
def test_user_text_never_becomes_an_added_token(token: str) -> None:
    """In plain text the spelling of an added token is encoded as characters."""
    spelled = text_tokenizer().encode(f"a{token}b", allow_special=False)

    assert token_id(token) in text_tokenizer().encode(f"a{token}b", allow_special=True)
    assert text_tokenizer().added_tokens.keys().isdisjoint(spelled)
    assert text_tokenizer().decode(spelled) == f"a{token}b"


def test_control_token_that_is_a_word_is_spelled_by_character() -> None:
    """If merges would make a control token of plain text, the text is encoded by character."""
    tokenizer = sentencepiece_tokenizer()

    spelled = tokenizer.encode_user_text("say <s>", continues=True)

    assert tokenizer.special_ids.isdisjoint(spelled)
    assert tokenizer.decode(spelled).endswith("<s>")


def test_text_that_continues_gets_no_leading_space() -> None:
    """Only the first piece of a text gets SentencePiece's leading space."""
    tokenizer = sentencepiece_tokenizer()

    assert tokenizer.encode("say", allow_special=True) == (tokenizer.token_id("▁say"),)
    assert tokenizer.encode("say", allow_special=True, continues=True) == (tokenizer.token_id("say"),)
    assert tokenizer.encode_user_text("say", continues=True) == (tokenizer.token_id("say"),)


def test_half_a_surrogate_pair_becomes_a_replacement() -> None:
    """JSON can carry a lone surrogate; it is encoded as U+FFFD instead of failing."""
    tokenizer = text_tokenizer()

    assert tokenizer.decode(tokenizer.encode_user_text("a\ud83db🙂")) == "a\ufffdb🙂"


def test_special_tokens_of_other_files_are_special() -> None:
    """A token that another file names as special is, even if tokenizer.json does not say so."""
    tokenizer = TextTokenizer(tokenizer_json(), ["<tool_call>", "not in the vocabulary"])

    assert token_id("<tool_call>") in tokenizer.special_ids
    assert tokenizer.vocab_size == text_tokenizer().vocab_size


@given(token_ids=st.lists(st.integers(0, 400)))
@settings(max_examples=examples(50))
def test_unknown_ids_are_left_out(token_ids: list[int]) -> None:
    """Ids beyond the vocabulary, which a padded embedding can yield, decode to nothing."""
    known = [token_id for token_id in token_ids if token_id < text_tokenizer().vocab_size]

    assert text_tokenizer().decode(token_ids) == text_tokenizer().decode(known)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_what_is_no_tokenizer_is_refused(content: str) -> None:
    """A file that is not a tokenizer fails validation and is named."""
    with pytest.raises(ValidationFailed, match=r"tokenizer\.json"):
        TextTokenizer(content)


def test_unknown_decoder_is_refused() -> None:
    """A decoder that cannot be streamed is refused when the model is loaded."""
    content = json.loads(tokenizer_json()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}

    with pytest.raises(ValidationFailed, match="WordPiece"):
        TextTokenizer(json.dumps(content))


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
