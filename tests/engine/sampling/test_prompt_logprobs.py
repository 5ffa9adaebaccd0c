"""Log probabilities of a prompt's own tokens through the whole engine, against transformers' log_softmax in fp32."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from tests.engine.adapter_kinds import AdapterKinds, make_adapter_kinds
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import make_base

VARIANTS = [None, "sha256:wide", "sha256:narrow", "sha256:rooted"]


def random_prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


def check_against(model: torch.nn.Module, prompt: list[int], outcome: Outcome, num_top: int) -> None:
    """Compare the log probability, the rank and the alternatives of each token after the first with the model's."""
    with torch.inference_mode():
        reference = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    assert len(outcome.prompt_logprobs) == len(prompt) - 1
    for place, score in enumerate(outcome.prompt_logprobs):
        row, token = reference[place], prompt[place + 1]
        top = row.topk(num_top)
        assert score.logprob == pytest.approx(row[token].item(), abs=3e-4)
        assert score.rank == 1 + int((row > row[token]).sum())
        assert [other for other, _ in score.top] == top.indices.tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(top.values.tolist(), abs=3e-4)


@pytest.mark.parametrize("max_batch_tokens", [512, 7])
def test_prompts_have_the_log_probabilities_of_transformers(models: RandomModels, max_batch_tokens: int) -> None:
    """Whole and in chunks, with adapters, beside requests that decode, each prompt token has its own figures."""
    driver = models.engine(max_batch_tokens=max_batch_tokens, max_running=9)
    driver.warm(*VARIANTS)
    for number in range(3):
        driver.submit(random_prompt(90 + number, 9), adapter=VARIANTS[number], max_tokens=30, ignore_eos=True)
    prompts = [random_prompt(number, length) for number, length in enumerate((200, 1, 2, 65, 64, 31))]

    outcomes = [
        driver.submit(prompt, adapter=VARIANTS[number % 4], prompt_logprobs=number, max_tokens=3)
        for number, prompt in enumerate(prompts)
    ]
    driver.finish()

    for number, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        check_against(models.references[VARIANTS[number % 4]], prompt, outcome, number)
        assert outcome.token_ids


def test_adapters_of_the_vocabulary_change_the_figures(tmp_path: Path) -> None:
    """Adapters with an output head or embedding of their own score prompts as peft does, in one batch."""
    torch.set_num_threads(1)
    kinds: AdapterKinds = make_adapter_kinds(make_base(tmp_path / "base"))
    names = ["head", "saved", "dora-head", "embedding", "rank-8"]
    driver = kinds.engine()
    driver.warm(*names)

    outcomes = {
        name: driver.submit(random_prompt(place, 70), adapter=name, prompt_logprobs=2, max_tokens=0)
        for place, name in enumerate(names)
    }
    driver.finish()

    for place, name in enumerate(names):
        check_against(kinds.models[name], random_prompt(place, 70), outcomes[name], 2)


def test_a_cached_prefix_is_computed_again_for_its_figures(
    models: RandomModels, make_engine: Callable[..., EngineDriver]
) -> None:
    """A prompt in the cache has all its log probabilities, and a later request without them uses the cache."""
    engine = make_engine()
    prompt = random_prompt(1, 40)
    plain = engine.run(prompt)

    scored = engine.run(prompt, prompt_logprobs=3)
    later = engine.run(prompt)

    check_against(models.references[None], prompt, scored, 3)
    assert scored.cache is not None
    assert later.cache is not None
    assert scored.cache.recomputed_tokens == 40
    assert later.cache.device_tokens == 36
    assert scored.token_ids == plain.token_ids == later.token_ids


@pytest.mark.parametrize("host_kv_bytes", [0, 2**20])
def test_a_preempted_request_reports_each_token_once(models: RandomModels, host_kv_bytes: int) -> None:
    """A request that is preempted in the middle of its prompt goes on where it was: no token twice, none left out."""
    driver = models.engine(max_batch_tokens=16, max_running=1, host_kv_bytes=host_kv_bytes)
    prompt = random_prompt(5, 150)
    wanted = driver.submit(prompt, prompt_logprobs=1, max_tokens=4, tier=ServiceTier.FLEX)
    for _ in range(4):
        driver.step()
    begun = len(wanted.prompt_logprobs)

    urgent = driver.submit(random_prompt(6, 30), max_tokens=5, tier=ServiceTier.PRIORITY, domain=b"other")
    driver.finish()

    assert 0 < begun < len(prompt) - 1
    assert driver.loop.stats().preemptions == 1
    assert urgent.token_ids
    check_against(models.references[None], prompt, wanted, 1)
    assert len(wanted.token_ids) == 4


def test_without_tokens_to_generate_the_prompt_alone_is_computed(
    models: RandomModels, make_engine: Callable[..., EngineDriver]
) -> None:
    """With `max_tokens` 0 a request ends after its prompt without a token, also if the prompt fills the context."""
    engine = make_engine()
    prompt = random_prompt(2, 256)

    whole = engine.run(prompt, max_tokens=0, prompt_logprobs=0)
    silent = engine.run(random_prompt(3, 33), max_tokens=0)

    assert (whole.finish, whole.token_ids) == (FinishReason.LENGTH, [])
    assert (silent.finish, silent.token_ids, silent.prompt_logprobs) == (FinishReason.LENGTH, [], [])
    check_against(models.references[None], prompt, whole, 0)
    engine.loop.check_integrity()


def test_a_mixture_scores_its_prompt(models: RandomModels, make_engine: Callable[..., EngineDriver]) -> None:
    """The figures of a mixture with one adapter's weight 0 are those of the other adapter."""
    engine = make_engine()
    engine.warm("sha256:wide", "sha256:narrow")
    prompt = random_prompt(4, 20)

    mixed = engine.run(
        prompt, adapters=(AdapterUse("sha256:wide", 1.0), AdapterUse("sha256:narrow", 0.0)), prompt_logprobs=4
    )

    check_against(models.references["sha256:wide"], prompt, mixed, 4)
