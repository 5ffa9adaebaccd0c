"""Tests of tokens whose bytes cut characters: no text is lost, and none is held back without need."""

from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from graftwork.engine.core.events import CacheReport
from graftwork.sessions.generation.events import TextDelta
from graftwork.sessions.generation.output_parser import OutputParser, OutputRules
from graftwork.sessions.text.token_bytes import byte_level_alphabet
from graftwork.sessions.text.tokenizer import Detokenizer, TextTokenizer
from tests.hypothesis_profiles import examples
from tests.sessions.tokenizer_and_templates import text_tokenizer

DEMO = Path(__file__).parents[3] / "demo" / "model" / "tokenizer.json"
CHARACTERS = "é€🙂"
"""Two, three and four bytes."""
STOPS = ("</s>", "<<", "s>x", "🙂é", "\ufffd\ufffd", "the ", "e t")


@cache
def demo_tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(DEMO)


@cache
def slicing_tokenizer() -> TextTokenizer:
    """A byte-level BPE with a token for every run of bytes in CHARACTERS."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    spelled = [letters[byte] for byte in CHARACTERS.encode()]
    runs = ["".join(spelled[start:end]) for start, end in combinations(range(len(spelled) + 1), 2)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*letters.values(), *runs]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer.to_str())


def spelled(tokenizer: TextTokenizer, token_id: int) -> bytes:
    return tokenizer.bytes.of(tokenizer.token_text(token_id) or "")


def complete(data: bytes) -> str:
    """The characters of the bytes so far, without those at the end that more bytes might complete."""
    for size in range(min(3, len(data)) + 1):
        tail = data[len(data) - size :]
        if size and any(begins(tail + rest) for rest in CONTINUATIONS):
            return data[: len(data) - size].decode(errors="replace")
    return data.decode(errors="replace")


CONTINUATIONS = [first + b"\x80" * count for first in (b"\x80", b"\x90", b"\xa0") for count in range(3)]
"""Bytes that may follow: some lead bytes narrow the first of them."""


def begins(data: bytes) -> bool:
    """Whether these bytes are one whole character."""
    try:
        return len(data.decode()) == 1 and len(data) > 1
    except UnicodeDecodeError:
        return False


def held_for(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end may be the start of a stop string."""
    sizes = range(1, min(len(text), max(map(len, stops)) - 1) + 1)
    return max((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), default=0)


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the text ends: before the stop string that ends first; of several, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending))
    return None


@pytest.mark.parametrize("stops", [(), ("🙂",), ("€🙂x",), ("é€!", "€🙂")])
def test_every_split_of_the_bytes_spells_the_same(stops: tuple[str, ...]) -> None:
    """All 256 ways to cut é€🙂 into tokens: each character comes with its last byte, stop strings or not."""
    tokenizer, data = slicing_tokenizer(), CHARACTERS.encode()
    ids = {spelled(tokenizer, token_id): token_id for token_id in range(tokenizer.vocab_size)}
    whole = first_stop(CHARACTERS, stops)

    for count in range(len(data)):
        for cuts in combinations(range(1, len(data)), count):
            pieces = [data[start:end] for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True)]
            parser = OutputParser(tokenizer, OutputRules(stop=stops))
            for piece in pieces:
                if not parser.is_over:
                    parser.push([ids[piece]])
            parser.finish()

            assert tokenizer.decode([ids[piece] for piece in pieces]) == CHARACTERS
            assert text_of(parser) == CHARACTERS[:whole]


def text_of(parser: OutputParser) -> str:
    """All text of an answer that has ended."""
    return parser.finished(None, CacheReport()).text


def random_tokens(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    plain = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    return st.lists(st.sampled_from(plain), max_size=30)


@pytest.mark.parametrize("make", [demo_tokenizer, slicing_tokenizer, text_tokenizer])
@given(data=st.data())
@settings(max_examples=examples(150))
def test_streaming_is_decoding_at_once(make: object, data: st.DataObject) -> None:
    """Random tokens join to what the library decodes, and each character is passed on with its last byte."""
    tokenizer = make()  # type: ignore[operator]
    token_ids = data.draw(random_tokens(tokenizer))
    detokenizer = Detokenizer(tokenizer)
    seen, so_far = "", b""

    for token_id in token_ids:
        seen += detokenizer.push(token_id)
        so_far += spelled(tokenizer, token_id)
        assert seen == complete(so_far)

    assert seen + detokenizer.flush() == tokenizer.decode(token_ids)


def likely_tokens(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Tokens that often spell stop strings, or parts of them."""
    texts = ("</s>", "<<", "s>x", "<", "s", ">", "🙂é", "🙂", "the the t", " the", "\ufffd", "e", " ")
    pieces = [tokenizer.encode_user_text(text) for text in texts]
    return st.lists(st.sampled_from(pieces), max_size=12).map(
        lambda drawn: [token for piece in drawn for token in piece]
    )


@pytest.mark.parametrize("make", [demo_tokenizer, text_tokenizer])
@given(data=st.data(), stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True).map(tuple))
@settings(max_examples=examples(150))
def test_stop_strings_cut_as_if_at_once(make: object, data: st.DataObject, stops: tuple[str, ...]) -> None:
    """After every token only a possible start of a stop string or of a character is held back."""
    tokenizer = make()  # type: ignore[operator]
    token_ids = data.draw(st.one_of(likely_tokens(tokenizer), random_tokens(tokenizer)))
    parser = OutputParser(tokenizer, OutputRules(stop=stops))
    told, so_far = "", b""

    for token_id in token_ids:
        told += "".join(event.text for event in parser.push([token_id]) if isinstance(event, TextDelta))
        so_far += spelled(tokenizer, token_id)
        text = complete(so_far)
        if parser.is_over:
            assert told == text[: first_stop(text, stops)]
            break
        assert first_stop(text, stops) is None
        assert told == text[: len(text) - held_for(text, stops)]
    told += "".join(event.text for event in parser.finish() if isinstance(event, TextDelta))

    whole = tokenizer.decode(token_ids)
    assert told == text_of(parser) == whole[: first_stop(whole, stops)]
