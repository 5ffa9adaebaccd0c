"""Bans, biases and penalties, against transformers and against a simple counter."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from graftwork.engine.core.prefix_keys import TokenCounts, TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.torch_sampler import edit_logits
from tests.hypothesis_profiles import examples

VOCABULARY = 40
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def spec(prompt: list[int], made: list[int], drafts: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    """The spec of the row behind `prompt`, `made` and `drafts`, as the scheduler builds it."""
    sampling = SamplingParams(max_tokens=1, **params)
    history = TokenHistory(prompt if sampling.repetition_penalty != 1 else ())
    history.extend(made)
    return SampleSpec(sampling, 0, 0, (), history if sampling.counts_tokens else None, drafts)


def edited(logits: torch.Tensor, *specs: SampleSpec) -> torch.Tensor:
    changed = logits.clone()
    edit_logits(changed, specs)
    return changed


@given(prompt=tokens, made=tokens, drafts=tokens, penalty=st.floats(0.2, 4), seed=st.integers(0, 99))
@settings(max_examples=examples(100))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], made: list[int], drafts: list[int], penalty: float, seed: int
) -> None:
    """Each token of prompt, answer and drafts is penalised once, as in transformers."""
    logits = logits_of(seed)
    context = torch.tensor([[*prompt, *made, *drafts]], dtype=torch.int64)

    changed = edited(logits, spec(prompt, made, tuple(drafts), repetition_penalty=penalty))

    torch.testing.assert_close(changed, RepetitionPenaltyLogitsProcessor(penalty)(context, logits))


@given(
    prompt=tokens,
    made=tokens,
    drafts=tokens,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100))
def test_presence_and_frequency_are_those_of_openai(
    prompt: list[int], made: list[int], drafts: list[int], presence: float, frequency: float, seed: int
) -> None:
    """Logits become mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts the answer and drafts only."""
    logits = logits_of(seed)
    counts = Counter([*made, *drafts])
    expected = [
        mu - counts[token] * frequency - (counts[token] > 0) * presence for token, mu in enumerate(logits[0].tolist())
    ]

    row = spec(prompt, made, tuple(drafts), presence_penalty=presence, frequency_penalty=frequency)

    torch.testing.assert_close(edited(logits, row)[0], torch.tensor(expected))


def test_three_penalties_at_once() -> None:
    """A token of the prompt gets the repetition penalty, but no presence or frequency penalty."""
    logits = torch.tensor([[4.0, 4.0, 4.0, -4.0]])
    row = spec([0, 3], [1, 1], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)

    assert edited(logits, row).tolist() == [[2.0, 0.5, 4.0, -8.0]]


@given(biases=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), min_size=1, max_size=9))
@settings(max_examples=examples(50))
def test_bias_is_that_of_transformers(biases: dict[int, float]) -> None:
    """Each bias is added to its token's logit and to no other."""
    logits = logits_of(1)
    processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])

    changed = edited(logits, spec([], [], logit_bias=tuple(biases.items())))

    torch.testing.assert_close(changed, processor(torch.zeros(1, 1, dtype=torch.int64), logits))


def test_a_row_is_changed_by_its_own_spec() -> None:
    """Each row is changed by its own spec alone, and a row without one is unchanged."""
    logits = logits_of(2, rows=4)
    rows = [
        spec([1, 2], [3], repetition_penalty=2.0),
        spec([], []),
        spec([1, 2], [3, 3], frequency_penalty=0.5),
        spec([], [4], presence_penalty=1.0, logit_bias=((4, 3.0),)),
    ]

    changed = edited(logits, *rows)

    alone = [edited(logits[row : row + 1], rows[row]) for row in range(4)]
    assert torch.equal(changed, torch.cat(alone))
    assert torch.equal(changed[1], logits[1])


def test_a_bias_is_penalised_and_a_ban_stays() -> None:
    """Biases are applied before penalties, and a banned token stays banned."""
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    sampling = SamplingParams(max_tokens=1, repetition_penalty=2.0, logit_bias=((0, 3.0), (1, 100.0)))
    row = SampleSpec(sampling, 0, 0, (1,), TokenHistory([0, 1]))

    assert edited(logits, row).tolist() == [[2.0, float("-inf"), 1.0]]


@given(prompt=tokens, steps=st.lists(st.tuples(tokens, tokens), max_size=5))
def test_history_counts_as_a_counter_does(prompt: list[int], steps: list[tuple[list[int], list[int]]]) -> None:
    """The history's arrays hold the distinct tokens and their counts after any growth and any drafts."""
    history, made = TokenHistory(prompt), list[int]()
    target = TokenCounts()

    for new, drafts in steps:
        history.extend(new)
        made += new
        before = len(target)
        added = history.copy_to(target, drafts)
        expected = Counter(dict.fromkeys(prompt, 0))
        expected.update(made + drafts)

        found = dict(zip(target.token_ids[before:], target.counts[before:], strict=True))
        assert (len(found), found) == (added, dict(expected))
    assert history.num_generated_tokens == len(made)
    history.check_integrity()
