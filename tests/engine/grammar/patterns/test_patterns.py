"""Tests of patterns against Python's `re` and the rules of ECMA-262."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.grammar.patterns.matching import Fuel, is_universal, matches
from graftwork.engine.grammar.patterns.nodes import PatternError, none_of, repeats, written
from graftwork.engine.grammar.patterns.reader import read_search, read_whole

TEXTS = st.text(alphabet="ab1 -.x", max_size=6)
ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "[a-x]", "\\.", "(?:ab|x)", "(a|b1)", "\\-", "[\\d-]"])
TERMS = st.builds(str.__add__, ATOMS, st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"]))
PATTERNS = st.builds(
    lambda start, terms, end: start + "".join(terms) + end,
    st.sampled_from(["", "^"]),
    st.lists(TERMS, max_size=4),
    st.sampled_from(["", "$"]),
)


@given(pattern=PATTERNS, other=PATTERNS, text=TEXTS)
def test_a_search_finds_what_python_finds(pattern: str, other: str, text: str) -> None:
    """A search finds the same as Python: anchors hold in their alternative, and other patterns match anywhere."""
    both = f"{pattern}|{other}"

    assert matches(read_search(both), text) == bool(re.search(both, text))


@given(pattern=PATTERNS, text=TEXTS)
def test_what_is_written_for_an_engine_is_the_same_pattern(pattern: str, text: str) -> None:
    """A written pattern, read again, is the same pattern, and it matches the whole text."""
    node = read_search(pattern)
    again = read_whole(re.sub(r"\\x\{([0-9A-F]+)\}", r"\\u{\1}", written(node)))

    assert matches(again, text) == matches(node, text)


@given(barred=st.lists(st.text(alphabet="ab", max_size=3), max_size=4), text=st.text(alphabet="abc", max_size=4))
def test_none_of_is_every_other_text(barred: list[str], text: str) -> None:
    """`none_of` matches every text outside a finite set."""
    assert matches(none_of(barred), text) == (text not in barred)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)b", "a(?!b)", "(?<=a)b", r"(a)\1", r"\bword", r"\p{L}", "(?i)a", "a**", "[]", "[^]", "a{2,1}", "(a", "a)", "a{,3}",
     r"\ud83d", "(^a)b", "a$b", r"\u{41", r"\u{}", r"\x-1", r"\x4", r"\u+041"],
)  # fmt: skip
def test_what_is_not_regular_or_not_sure_is_refused(pattern: str) -> None:
    """Look-around, back references, flags and ambiguous syntax are refused."""
    with pytest.raises(PatternError):
        read_search(pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"^\d$", "٣", False),
        (r"^\w$", "é", False),
        (r"^\s$", "\ufeff", True),
        ("^.$", "\u2028", False),
        ("^a$", "a\n", False),
    ],
)
def test_classes_are_those_of_ecma(pattern: str, text: str, fits: bool) -> None:
    """Digits and words are ASCII, the byte order mark is a space, and `$` is the very end."""
    assert matches(read_search(pattern), text) == fits


def units_to_match(pattern: str, text: str) -> int:
    """The fuel that matching takes; fails if the text matches."""
    fuel = Fuel(10**9)
    assert not matches(read_search(pattern), text, fuel)
    return 10**9 - fuel.left


def test_matching_costs_as_much_as_the_text_is_long() -> None:
    """For a pattern that explodes under backtracking, a text twice as long takes twice the steps."""
    pattern = "^(a+)+(b|c)+$"

    assert units_to_match(pattern, "a" * 400) <= 2.1 * units_to_match(pattern, "a" * 200)


def test_repeats_multiply() -> None:
    """Nested counted repeats multiply."""
    assert repeats(read_search("((a{10}){10}b{3}){4}")) == 400


def test_a_universal_pattern_is_known_as_one() -> None:
    """A pattern that any text matches is told from one that nearly any text matches."""
    assert is_universal(read_search(""))
    assert is_universal(read_search("a*"))
    assert not is_universal(read_search("^.*$"))
