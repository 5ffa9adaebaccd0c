"""The table of token counts on the device, against counts from scratch."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.device.count_table import CountTable
from tests.hypothesis_profiles import examples

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def spec_of(history: TokenHistory | None) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1), 0, 0, history=history)


def write(table: CountTable, specs: list[SampleSpec]) -> list[int | None]:
    """Do what the edit kernel does with the changes. Returns each row's slot."""
    followed = table.follow(specs)
    for own in followed:
        if own is not None:
            for token, entry in own.changes.tolist():
                table.entries[own.slot, token] = entry
    table.check_integrity()
    return [None if own is None else own.slot for own in followed]


@settings(max_examples=examples(100))
@given(st.lists(TOKENS, min_size=5, max_size=5), st.lists(st.tuples(st.integers(0, 4), TOKENS), max_size=12))
def test_the_table_has_every_count(prompts: list[list[int]], steps: list[tuple[int, list[int]]]) -> None:
    """After any steps of five requests through a table of three slots, a request's slot has its counts."""
    table = CountTable(3, VOCAB, torch.device("cpu"))
    histories = [TokenHistory(prompt) for prompt in prompts]
    generated: list[list[int]] = [[] for _ in prompts]

    for number, tokens in steps:
        generated[number] += tokens
        histories[number].extend(tokens)
        slot, nothing, same = write(table, [spec_of(histories[number]), spec_of(None), spec_of(histories[number])])
        counts = Counter(generated[number])
        assert nothing is None
        assert slot is not None
        assert same == slot
        expected = [2 * counts[token] + (token in prompts[number]) for token in range(VOCAB)]
        assert table.entries[slot].tolist() == expected


def test_a_later_step_sends_only_what_has_changed() -> None:
    """After its first step, a request with a prompt of 10 tokens sends the tokens generated since."""
    table, history = CountTable(2, VOCAB, torch.device("cpu")), TokenHistory(range(10))
    (first,) = table.follow([spec_of(history)])
    history.extend([3, 11, 3])

    (second,) = table.follow([spec_of(history)])
    (third,) = table.follow([spec_of(history)])

    assert first is not None
    assert second is not None
    assert third is not None
    assert len(first.changes) == 10
    assert second.changes.tolist() == [[3, 5], [11, 2]]
    assert len(third.changes) == 0


def test_a_count_beyond_the_largest_stays_there() -> None:
    """A token generated 20,000 times has the largest entry that 16 bits can hold, not a negative one."""
    table, history = CountTable(1, VOCAB, torch.device("cpu")), TokenHistory([7])
    history.extend([7] * 20_000)

    (slot,) = write(table, [spec_of(history)])

    assert slot is not None
    assert table.entries[slot, 7] == 2**15 - 1


def test_too_many_requests_in_one_step_are_refused() -> None:
    """Three requests with penalties do not fit a table of two slots, and the error says so."""
    with pytest.raises(RuntimeError, match="more than 2 requests"):
        CountTable(2, VOCAB, torch.device("cpu")).follow([spec_of(history) for history in map(TokenHistory, [()] * 3)])
