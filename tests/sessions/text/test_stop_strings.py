"""Tests of stop strings against a simple search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.text.stop_strings import StopStrings
from tests.hypothesis_profiles import examples

letters = st.text("ab", max_size=16)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=4) | st.text("aab", min_size=5, max_size=8), max_size=3)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that ends first, of those the longest, and where it starts."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    sizes = range(len(text) + 1)
    return max(size for size in sizes if size == 0 or any(stop.startswith(text[-size:]) for stop in stops))


@given(pieces=st.lists(letters, max_size=6), stops=stop_sets)
@settings(max_examples=examples(300))
def test_any_pieces_are_matched_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    """The result does not depend on how the text is cut, and no more is held back than needed."""
    matcher = StopStrings(stops)
    passed, seen = "", ""

    for position, piece in enumerate(pieces):
        seen += piece
        outcome = matcher.push(piece)
        passed += outcome.text
        found = first_match(seen, stops)
        if found:
            assert (len(passed), outcome.matched) == found
            assert passed + found[1] + outcome.rest + "".join(pieces[position + 1 :]) == "".join(pieces)
            return
        assert outcome.matched is None
        assert passed == seen[: len(seen) - longest_beginning(seen, stops)]

    assert passed + matcher.flush() == seen


def test_beginning_within_a_beginning_is_found() -> None:
    """A repetitive stop string is found after a longer partial match has failed."""
    matcher = StopStrings(["aabaaa"])

    outcome = matcher.push("aabaabaaa!")

    assert (outcome.text, outcome.matched, outcome.rest) == ("aab", "aabaaa", "!")


def test_failed_beginning_leaves_nothing_behind() -> None:
    """After a failed partial match, exactly the longest shorter match is kept."""
    matcher = StopStrings(["aaabb"])

    outcome = matcher.push("aaabaabb")

    assert (outcome.text, outcome.matched) == ("aaabaabb", None)


def test_search_starts_anew_after_a_match() -> None:
    """Text before a match is not part of the next match."""
    matcher = StopStrings(["aa"])

    first = matcher.push("aaa")
    second = matcher.push(first.rest)

    assert (first.text, first.rest) == ("", "a")
    assert (second.text, second.matched, matcher.flush()) == ("", None, "a")


def test_long_stop_string_costs_no_more_than_its_text() -> None:
    """A stop string with the worst pattern is still searched in one pass."""
    matcher = StopStrings(["a" * 5000 + "b"])

    outcome = matcher.push("a" * 20000)

    assert len(outcome.text) == 15000
    assert matcher.push("b").matched is not None


def test_empty_stop_string_is_refused() -> None:
    """An empty stop string is refused."""
    with pytest.raises(InvalidRequest) as raised:
        StopStrings(["a", ""])

    assert raised.value.param == "stop"
