"""Tests of the map of prefixes, against lists of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.fleet.prefix_map import BLOCK_TOKENS, BlockKey, BlockKeys, PrefixMap
from graftwork.platform.ids import IsolationDomain

DOMAIN = IsolationDomain(b"tenant")
FEW = st.lists(st.integers(0, 1), max_size=5).map(lambda blocks: [b for b in blocks for _ in range(BLOCK_TOKENS)])


def keys_of(token_ids: list[int], domain: IsolationDomain = DOMAIN, digest: str | None = None) -> list[BlockKey]:
    keys = BlockKeys(domain, () if digest is None else (AdapterUse(digest),))
    keys.extend(token_ids)
    return keys.keys


@given(FEW, FEW, st.integers(0, 3))
def test_keys_are_equal_where_all_tokens_before_are(one: list[int], other: list[int], extra: int) -> None:
    """Two lists have as many keys in common as they have whole blocks in common, from the start."""
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1

    shared = [a == b for a, b in zip(keys_of(one + [7] * extra), keys_of(other), strict=False)]

    assert shared == [place < common // BLOCK_TOKENS for place in range(len(shared))]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=400), st.lists(st.integers(0, 400), max_size=4))
def test_keys_do_not_depend_on_how_the_tokens_came(token_ids: list[int], cuts: list[int]) -> None:
    """Tokens that are added in parts have the keys of all tokens at once."""
    keys = BlockKeys(DOMAIN, ())
    ends = sorted({*(min(cut, len(token_ids)) for cut in cuts), len(token_ids)})
    for start, end in zip([0, *ends], ends, strict=False):
        keys.extend(token_ids[start:end])

    assert keys.keys == keys_of(token_ids)


def test_domains_and_adapters_share_no_keys() -> None:
    """Another tenant's or another adapter's prefix is never taken for the own."""
    tokens = [5] * BLOCK_TOKENS

    found = {*keys_of(tokens), *keys_of(tokens, IsolationDomain(b"other")), *keys_of(tokens, digest="sha256:a")}

    assert len(found) == 3


@given(st.lists(st.tuples(st.sampled_from("ab"), FEW), max_size=30), FEW)
def test_the_map_knows_no_more_than_was_placed(placed: list[tuple[str, list[int]]], prompt: list[int]) -> None:
    """What is found is a common prefix with something that was placed there, and no engine exceeds its room."""
    prefixes = PrefixMap()
    for name in "ab":
        prefixes.set_room(name, 6 * BLOCK_TOKENS)
    for name, token_ids in placed:
        prefixes.note(name, keys_of(token_ids))
        prefixes.check_integrity()
        assert prefixes.cached_tokens(name, keys_of(token_ids)) == len(token_ids), "the latest is always whole"

    for name in "ab":
        found = prefixes.cached_tokens(name, keys_of(prompt))
        assert found == 0 or any(own == name and tokens[:found] == prompt[:found] for own, tokens in placed)


def test_an_engine_that_is_gone_has_nothing() -> None:
    """A forgotten engine has no prefixes, and gets none before its room is known."""
    prefixes, keys = PrefixMap(), keys_of([1] * 3 * BLOCK_TOKENS)
    prefixes.set_room("a", 1000)
    prefixes.note("a", keys)

    prefixes.forget("a")
    prefixes.note("a", keys)

    assert prefixes.cached_tokens("a", keys) == 0


def test_the_end_of_a_prefix_is_forgotten_first() -> None:
    """When an engine's room is full, the start of the older prefix is kept longest, as it is shared most."""
    prefixes = PrefixMap()
    prefixes.set_room("a", 5 * BLOCK_TOKENS)
    old, new = keys_of([1] * 3 * BLOCK_TOKENS), keys_of([2] * 3 * BLOCK_TOKENS)

    prefixes.note("a", old)
    prefixes.note("a", new)

    assert prefixes.cached_tokens("a", old) == 2 * BLOCK_TOKENS
    assert prefixes.cached_tokens("a", new) == 3 * BLOCK_TOKENS
