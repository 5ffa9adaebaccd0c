"""Tests of prompt lookup: the suffix index, and the cache of answers."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.prefix_keys import CacheScope
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.speculative.lookup import (
    BYTES_PER_TOKEN,
    LONGEST_MATCH,
    NGRAM_LENGTHS,
    AnswerCache,
    PromptLookup,
    SuffixIndex,
    SuffixMatch,
)
from graftwork.platform.ids import IsolationDomain

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


TENANT = IsolationDomain(b"a")
ANSWER = [10, 11, 12, 13, 14, 15]
SCOPES = CacheScopes("sha256:model", "float32")


def scope(domain: str, *digests: str) -> CacheScope:
    return SCOPES.scope(IsolationDomain(domain.encode()), tuple(AdapterUse(digest) for digest in digests))


def proposed(cache: AnswerCache, of: CacheScope, tail: list[int]) -> tuple[int, ...]:
    span = cache.propose(of, tail, 3)
    return () if span is None else span.token_ids


def test_an_answer_is_found_by_its_own_tenant_and_adapter_alone() -> None:
    """Another domain with the same adapter finds nothing, and neither does the same domain with another adapter."""
    cache = AnswerCache(1 << 20)

    cache.remember(scope("a", "x"), TENANT, ["x"], ANSWER)

    assert proposed(cache, scope("a", "x"), [99, 10, 11, 12]) == (13, 14, 15)
    assert proposed(cache, scope("b", "x"), [99, 10, 11, 12]) == ()
    assert proposed(cache, scope("a", "y"), [99, 10, 11, 12]) == ()
    assert proposed(cache, scope("a"), [99, 10, 11, 12]) == ()


def test_the_answers_of_an_adapter_are_dropped_with_it() -> None:
    """Dropping an adapter drops the answers of its mixtures too; those of other adapters stay."""
    cache = AnswerCache(1 << 20)
    for digests in (("x",), ("x", "y"), ("y",)):
        cache.remember(scope("a", *digests), TENANT, digests, ANSWER)

    cache.forget_adapter("x")

    assert cache.scopes == (scope("a", "y"),)
    assert cache.num_bytes == len(ANSWER) * BYTES_PER_TOKEN


def test_a_forgotten_domain_has_no_answers() -> None:
    """Nothing is drafted from the answers of a forgotten domain, with any adapter, and all from those of others."""
    cache = AnswerCache(1 << 20)
    for domain, digest in (("a", "x"), ("a", "y"), ("b", "x")):
        cache.remember(scope(domain, digest), IsolationDomain(domain.encode()), [digest], ANSWER)

    cache.forget_domain(IsolationDomain(b"a"))

    assert cache.scopes == (scope("b", "x"),)
    cache.check_integrity()


def test_two_answers_are_not_read_as_one() -> None:
    """A match never spans the end of one answer and the beginning of the next."""
    cache = AnswerCache(1 << 20)
    for answer in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cache.remember(scope("a"), TENANT, (), answer)

    assert proposed(cache, scope("a"), [3, 4, 5]) == ()
    assert proposed(cache, scope("a"), [5, 6, 7]) == (8,)


def test_the_latest_answer_is_followed() -> None:
    """If two answers match, the draft follows the later one."""
    cache = AnswerCache(1 << 20)
    for last in (70, 80):
        cache.remember(scope("a"), TENANT, (), [1, 2, 3, last])

    assert proposed(cache, scope("a"), [1, 2, 3]) == (80,)


def test_a_full_scope_forgets_its_oldest_answers() -> None:
    """Of eight answers in a scope with room for 40 tokens, the last ones are found and the first is not."""
    cache = AnswerCache(8 * 40 * BYTES_PER_TOKEN)
    for number in range(20):
        cache.remember(scope("a"), TENANT, (), [100 * number + place for place in range(8)])

    assert proposed(cache, scope("a"), [1900, 1901, 1902]) == (1903, 1904, 1905)
    assert proposed(cache, scope("a"), [0, 1, 2]) == ()
    assert cache.num_bytes <= 40 * BYTES_PER_TOKEN


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=60), st.integers(0, 400))
def test_the_bound_holds_whatever_comes(answers: list[tuple[int, int]], room: int) -> None:
    """For any scopes and lengths the cache stays within its bytes and keeps the latest answer that fits."""
    cache = AnswerCache(room * BYTES_PER_TOKEN)
    random = Random(room)

    for tenant, length in answers:
        answer = [random.randrange(1000) for _ in range(length)]
        cache.remember(scope(str(tenant)), TENANT, (), answer)
        cache.check_integrity()
        if 4 <= length <= room // 8:
            assert proposed(cache, scope(str(tenant)), answer[:-1]) == (answer[-1],)
