"""Tests of patterns over module names against Python's regular expressions."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.adapters.format.name_pattern import NamePattern
from graftwork.adapters.format.pattern_parser import PatternRefused
from tests.hypothesis_profiles import examples

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.mlp.down_proj",
    "layers.1.self_attn.k_proj",
    "q_proj",
]


def peft_matches(pattern: str, name: str) -> bool:
    """The expression of peft.utils.other.get_pattern_key."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "_proj",
        "self_attn.q_proj",
        r"layers\.1\.self_attn\.q_proj",
        "layers.1.self_attn.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "^layers.1.self_attn.k_proj$",
        ".*q_proj",
        r"layers\.(0|1)\..*",
        r"model\.layers\.(?:0|1\d)\..*_proj",
        r"layers\.[01]\.self_attn\.[^k]_proj",
        r"layers\.\d+\.mlp\.(gate|up|down)_proj",
        r"layers\.[0-9]{2}\..*",
        r"layers\.[0-9]{1,2}\.self_attn\.q_proj",
        "(q|k|)_proj",
        r"[\w-]+",
        "",
        "a|q_proj",
        ".*?q_proj",
        r"(layers\.)?q_proj",
        "[]q]_proj",
    ],
)
def test_matches_the_names_that_peft_matches(pattern: str) -> None:
    """For usual patterns the result equals that of PEFT's own expression."""
    matcher = NamePattern(pattern)

    assert [matcher.matches(name) for name in NAMES] == [peft_matches(pattern, name) for name in NAMES]


ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "1", "^", "$"])
QUANTIFIERS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"])


@st.composite
def patterns(draw: st.DrawFn, depth: int = 2) -> str:
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        is_group = depth > 0 and draw(st.booleans())
        atom = f"({'|'.join(draw(st.lists(patterns(depth - 1), min_size=1, max_size=3)))})" if is_group else draw(ATOMS)
        parts.append(atom + ("" if atom in "^$" else draw(QUANTIFIERS)))
    return "".join(parts)


@settings(max_examples=examples(300))
@given(patterns(), st.lists(st.text(alphabet="ab1.", max_size=6), min_size=1, max_size=5))
def test_agrees_with_python_on_every_pattern_it_reads(pattern: str, names: list[str]) -> None:
    """For random patterns and names the automaton matches exactly when Python's `re` does."""
    matcher = NamePattern(pattern)

    for name in names:
        assert matcher.matches(name) == peft_matches(pattern, name), (pattern, name)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*a){20}", "((a*)*)*b", "(a?){100}a{100}"])
def test_patterns_that_stall_python_are_matched_in_bounded_work(pattern: str) -> None:
    """The work of a match grows with the name's length, not with the number of ways to read it."""
    matcher = NamePattern(pattern)

    assert not matcher.matches("a" * 60 + "!")
    assert matcher.work < 61 * 1024


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "[a",
        "a**",
        "a*+",
        "*a",
        "a{1",
        "a{2,1}",
        "a{x}",
        "a{}",
        "^*",
        "(?i)a",
        "(?=a)",
        "(?P<x>a)",
        r"\1",
        r"\b",
        "a\\",
        "[b-a]",
        r"[\d-z]",
        "a{999}{999}",
        "(a{999}){999}",
        "(((){999}){999}){999}",
        "((((((((((((((((((a))))))))))))))))))",
        "ä",
        "a" * 257,
    ],
)
def test_what_is_not_read_is_refused(pattern: str) -> None:
    """Malformed, unsupported and oversized patterns raise PatternRefused."""
    with pytest.raises(PatternRefused):
        NamePattern(pattern)


@pytest.mark.filterwarnings(
    "ignore:Possible (nested set|set):FutureWarning"
)  # Python's, of what its classes may become
@given(st.text(alphabet="ab.*+?{}[]()^$|\\1,-:=", max_size=20))
def test_random_text_is_read_or_refused(text: str) -> None:
    """Random text raises nothing but PatternRefused; a text that is read is also valid in Python."""
    try:
        matcher = NamePattern(text)
    except PatternRefused:
        return
    for name in ("ab.1", "a", "b.a"):
        assert matcher.matches(name) == peft_matches(text, name)
