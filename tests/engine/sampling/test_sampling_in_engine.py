"""Sampling through the whole engine: penalties, biases, stop tokens, seeds, and several choices of one prompt."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.errors import InvalidRequest
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver

MakeEngine = Callable[..., EngineDriver]


def prompt_of(seed: int, length: int = 20) -> list[int]:
    source = Random(seed)
    return [source.randrange(2, 97) for _ in range(length)]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_writes_what_transformers_writes(
    models: RandomModels, make_engine: MakeEngine, penalty: float
) -> None:
    """With a repetition penalty, greedy answers in a batch are those of transformers' generate."""
    engine, reference = make_engine(), models.references[None]
    prompts = [prompt_of(seed) for seed in range(4)]
    plain = engine.submit(prompts[0], max_tokens=24, ignore_eos=True)

    answers = [engine.submit(prompt, max_tokens=24, ignore_eos=True, repetition_penalty=penalty) for prompt in prompts]
    engine.finish()

    for prompt, answer in zip(prompts, answers, strict=True):
        context = torch.tensor([prompt])
        made: Any = reference.generate(  # type: ignore[operator]
            context,
            attention_mask=torch.ones_like(context),
            max_new_tokens=24,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=penalty,
        )
        assert answer.token_ids == made[0, len(prompt) :].tolist()
    assert plain.token_ids != answers[0].token_ids


def test_frequency_penalty_counts_what_was_made(make_engine: MakeEngine) -> None:
    """With a very large frequency penalty no token comes twice; without it the same prompt repeats tokens."""
    engine = make_engine()
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}

    free = engine.run(prompt_of(3), **options)
    bound = engine.run(prompt_of(3), presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((5, -100.0),), **options)

    assert Counter(free.token_ids).most_common(1)[0][1] > Counter(bound.token_ids).most_common(1)[0][1]
    assert 5 not in bound.token_ids


def test_a_bias_of_a_hundred_is_obeyed(make_engine: MakeEngine) -> None:
    """A token with bias 100 is always chosen, sampled or greedy, and one with bias -100 never."""
    engine = make_engine()

    for temperature in (0.0, 1.5):
        answer = engine.run(prompt_of(1), max_tokens=9, temperature=temperature, logit_bias=((42, 100.0),))
        assert answer.token_ids == [42] * 9


def test_stop_token_ids_end_an_answer_but_not_too_early(make_engine: MakeEngine) -> None:
    """A stop token of the request ends its answer, but not before min_tokens."""
    engine = make_engine()
    bias = ((42, 100.0), (43, 90.0))

    ended = engine.run(prompt_of(1), max_tokens=9, logit_bias=bias, stop_token_ids=(42,), min_tokens=3)

    assert ended.token_ids == [43, 43, 43, 42]
    assert ended.finish is FinishReason.STOP


@pytest.mark.parametrize(("field", "value"), [("logit_bias", ((97, 1.0),)), ("stop_token_ids", (97,))])
def test_tokens_outside_the_vocabulary_end_their_request_alone(make_engine: MakeEngine, field: str, value: Any) -> None:
    """A token id outside the vocabulary is refused with the field's name, and other requests are served."""
    engine = make_engine()
    other = engine.submit(prompt_of(2))

    refused = engine.submit(prompt_of(1), min_tokens=3, **{field: value})
    engine.finish()

    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.param == field
    assert other.finish is not None


def test_seeded_output_does_not_depend_on_batch_or_cache(make_engine: MakeEngine) -> None:
    """A seeded answer with penalties is the same alone on a cold cache and in a batch on a warm one."""
    options: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 1.0,
        "top_p": 0.9,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    }
    choices = [make_engine().run(prompt_of(9), seed=11, choice=choice, **options).token_ids for choice in range(3)]
    crowded = make_engine(max_batch_tokens=8)
    crowded.run(prompt_of(9), max_tokens=1)

    others = [crowded.submit(prompt_of(number, 7), temperature=0.8, presence_penalty=1.0) for number in range(5)]
    mine = [crowded.submit(prompt_of(9), seed=11, choice=choice, **options) for choice in range(3)]
    crowded.finish()

    assert [outcome.token_ids for outcome in mine] == choices
    assert len(set(map(tuple, choices))) == 3
    assert all(outcome.finish for outcome in others)


def test_choices_share_one_prefill(make_engine: MakeEngine) -> None:
    """When the first choice has its first token, the other choices find the whole pages of the prompt cached."""
    engine = make_engine()
    prompt = prompt_of(5, 41)  # ten pages of four, and one token that is always computed
    first = engine.submit(prompt, max_tokens=30, ignore_eos=True)
    while not first.token_ids:
        engine.step()

    second = engine.submit(prompt, max_tokens=30, ignore_eos=True)
    engine.step()

    assert not first.is_over
    assert second.cache is not None
    assert (second.cache.device_tokens, second.cache.recomputed_tokens) == (40, 1)
    engine.finish()
    assert second.token_ids == first.token_ids


def test_only_penalties_count_tokens() -> None:
    """Only requests with penalties count their tokens."""
    assert not SamplingParams(max_tokens=1, logit_bias=((1, 1.0),), temperature=2.0).counts_tokens
    assert SamplingParams(max_tokens=1, presence_penalty=-0.1).counts_tokens
    assert SamplingParams(max_tokens=1, repetition_penalty=0.9).counts_tokens
