"""Lookup by suffix, against a search of all positions."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.speculative.lookup import LONGEST_MATCH, NGRAM_LENGTHS, PromptLookup, SuffixIndex, SuffixMatch

few_letters = st.lists(st.integers(0, 2), max_size=60)


def searched(tokens: list[int], entered: int, tail: list[int]) -> SuffixMatch | None:
    """The latest position behind the longest n-gram at the end of `tail`, and the match length there."""
    for length in NGRAM_LENGTHS:
        places = [
            position
            for position in range(length, entered)
            if len(tail) >= length and tokens[position - length : position] == tail[-length:]
        ]
        if places:
            place = places[-1]
            rungs = [length, *[rung for rung in (LONGEST_MATCH // 2, LONGEST_MATCH) if rung > length]]
            agreed = length
            for rung in rungs[1:]:
                if rung > min(len(tail), place) or tokens[place - rung : place] != tail[-rung:]:
                    break
                agreed = rung
            return SuffixMatch(place, agreed)
    return None


@given(few_letters, st.lists(st.integers(1, 9)), few_letters)
def test_the_latest_place_behind_the_longest_suffix_is_found(
    tokens: list[int], portions: list[int], other: list[int]
) -> None:
    """However a text is split when it is entered, its own end and other tails are found where a search finds them."""
    index = SuffixIndex(tokens)
    entered = 0
    for portion in [*portions, len(tokens)]:
        end = min(entered + portion, len(tokens))
        index.enter(0, entered, end)
        entered = end

    for tail in (tokens[-LONGEST_MATCH:], other[-LONGEST_MATCH:]):
        assert index.find(tail) == searched(tokens, entered, tail)


def test_a_long_agreement_is_told_from_a_short_one() -> None:
    """Forty repeated tokens match up to the longest match; eight equal tokens behind different ones match for eight."""
    random = Random(1)
    passage = [random.randrange(1000) for _ in range(40)]
    index = SuffixIndex([*passage, 5, 6])
    index.enter(0, 0, 42)

    assert index.find(passage[-LONGEST_MATCH:]) == SuffixMatch(40, 32)
    assert index.find([*range(2000, 2024), *passage[-8:]]) == SuffixMatch(40, 8)


def test_a_repeated_text_continues_as_it_did_last() -> None:
    """Of two matches the later one is followed, and forced tokens behind the text count as its end."""
    tokens = [1, 2, 3, 70, 71, 1, 2, 3, 80, 81, 82, 1, 2]
    lookup = PromptLookup(tokens)
    lookup.observe()

    behind = lookup.propose((3,), 3)
    tokens.append(3)
    lookup.observe()
    after = lookup.propose((), 8)

    assert behind is not None
    assert behind.token_ids == (80, 81, 82)
    assert after is not None
    assert after.token_ids == (80, 81, 82, 1, 2, 3)
    assert lookup.propose((55,), 3) is None
