"""Logprobs against torch's own, and through the whole engine against transformers."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.torch_sampler import StepLogprobs, choose_tokens
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver


def spec(logprobs: int | None, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, logprobs=logprobs, **params), 0, 0)


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Bias, ban and temperature change the chosen token but not the log probabilities."""
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    row = SampleSpec(SamplingParams(max_tokens=1, temperature=0.1, logprobs=2, logit_bias=((1, 50.0),)), 0, 0, (0,))
    expected = logits.log_softmax(-1)[0].tolist()

    scores = StepLogprobs(logits, [row])
    (score,) = scores.of(choose_tokens(logits, [row]).tolist())

    assert score is not None
    assert score.logprob == pytest.approx(expected[1])
    assert [token for token, _ in score.top] == [0, 2]
    assert [logprob for _, logprob in score.top] == pytest.approx([expected[0], expected[2]])


def test_each_row_gets_what_it_wants() -> None:
    """A row gets no report, the chosen token alone, or up to twenty; ties go by token id, whatever other rows ask for."""
    logits = -torch.arange(50).div(2, rounding_mode="floor").float().repeat(4, 1)  # 0, 0, -1, -1, …
    wanted = [None, 0, 3, 20]

    scores = StepLogprobs(logits, [spec(number) for number in wanted]).of([7, 7, 7, 7])

    assert scores[0] is None
    assert [[token for token, _ in score.top] for score in scores if score] == [[], [0, 1, 2], list(range(20))]


def test_a_small_vocabulary_has_no_more() -> None:
    """Asking for more alternatives than the vocabulary has gives all tokens."""
    (score,) = StepLogprobs(torch.zeros(1, 5), [spec(20)]).of([0])

    assert score is not None
    assert len(score.top) == 5


def test_an_answers_logprobs_are_those_of_transformers(
    models: RandomModels, make_engine: Callable[..., EngineDriver]
) -> None:
    """Each token's log probability and five alternatives equal those of transformers, with an adapter and in a batch."""
    engine = make_engine()
    prompt = [Random(1).randrange(2, 97) for _ in range(11)]
    engine.submit([5, 6, 7], max_tokens=9)

    wanted = engine.submit(prompt, adapter="sha256:wide", logprobs=5, max_tokens=6, ignore_eos=True, temperature=0.7)
    silent = engine.submit(prompt, max_tokens=6)
    engine.finish()

    with torch.inference_mode():
        context = torch.tensor([[*prompt, *wanted.token_ids]])
        logits = models.references["sha256:wide"](context).logits[0, len(prompt) - 1 : -1]
    reference = logits.float().log_softmax(dim=-1)
    assert len(wanted.logprobs) == len(wanted.token_ids) == 6
    assert silent.logprobs == []
    for place, (token, score) in enumerate(zip(wanted.token_ids, wanted.logprobs, strict=True)):
        top = reference[place].topk(5)
        assert score.logprob == pytest.approx(reference[place, token].item(), abs=2e-4)
        assert [other for other, _ in score.top] == top.indices.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(top.values.tolist(), abs=2e-4)
