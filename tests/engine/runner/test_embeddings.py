"""Embeddings of prompts through the whole engine, against transformers' last hidden states in fp32."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import ServiceTier
from graftwork.platform.errors import InvalidRequest
from tests.engine.adapter_kinds import AdapterKinds, make_adapter_kinds
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import make_base

VARIANTS = [None, "sha256:wide", "sha256:narrow", "sha256:rooted"]
BOTH = list(Pooling)


def random_prompt(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


def expected(model: Any, prompt: list[int], pooling: Pooling) -> list[float]:
    """Returns the pooled last hidden state of transformers, in fp32."""
    with torch.inference_mode():
        answer = model(torch.tensor([prompt]), output_hidden_states=True)
    hidden = answer.hidden_states[-1][0].double()  # behind the last norm
    pooled: list[float] = (hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)).tolist()
    return pooled


def check(model: Any, prompt: list[int], pooling: Pooling, outcome: Outcome) -> None:
    assert (outcome.finish, outcome.token_ids) == (FinishReason.LENGTH, [])
    assert outcome.embedding == pytest.approx(expected(model, prompt, pooling), abs=1e-4)


@pytest.mark.parametrize("pooling", BOTH)
@pytest.mark.parametrize("max_batch_tokens", [512, 7])
def test_embeddings_are_those_of_transformers(models: RandomModels, pooling: Pooling, max_batch_tokens: int) -> None:
    """Whole and in chunks, with adapters, beside requests that decode, each prompt has its own embedding."""
    driver = models.engine(max_batch_tokens=max_batch_tokens, max_running=9)
    driver.warm(*VARIANTS)
    for number in range(3):
        driver.submit(random_prompt(90 + number, 9), adapter=VARIANTS[number], max_tokens=30, ignore_eos=True)
    prompts = [random_prompt(number, length) for number, length in enumerate((200, 1, 2, 65, 64, 31))]

    outcomes = [
        driver.submit(prompt, adapter=VARIANTS[number % 4], pooling=pooling) for number, prompt in enumerate(prompts)
    ]
    driver.finish()

    for number, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        check(models.references[VARIANTS[number % 4]], prompt, pooling, outcome)
    driver.loop.check_integrity()


@pytest.mark.parametrize("pooling", BOTH)
def test_neighbours_do_not_change_a_bit(models: RandomModels, pooling: Pooling) -> None:
    """A prompt has the same embedding, to the last bit, alone and beside requests that decode."""
    prompt = random_prompt(7, 130)
    alone = models.engine().run(prompt, pooling=pooling, adapter="sha256:wide")
    crowd = models.engine()
    for number in range(4):
        crowd.submit(random_prompt(number, 20 + number), max_tokens=12, ignore_eos=True, adapter=VARIANTS[number])
    crowd.step()

    beside = crowd.run(prompt, pooling=pooling, adapter="sha256:wide")

    assert beside.embedding == alone.embedding


def test_every_kind_of_adapter_changes_the_embedding_as_peft_does(tmp_path: Path) -> None:
    """All kinds of adapters, those of the vocabulary among them, embed prompts as peft does, in one batch."""
    torch.set_num_threads(1)
    kinds: AdapterKinds = make_adapter_kinds(make_base(tmp_path / "base"))
    driver = kinds.engine()
    names = sorted(kinds.models)
    driver.warm(*filter(None, names))

    outcomes = [
        driver.submit(random_prompt(place, 40), adapter=name or None, pooling=BOTH[place % 2])
        for place, name in enumerate(names)
    ]
    driver.finish()

    for place, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        check(kinds.models[name], random_prompt(place, 40), BOTH[place % 2], outcome)


@pytest.mark.parametrize(("pooling", "device_tokens"), [(Pooling.LAST, 36), (Pooling.MEAN, 0)])
def test_the_last_token_needs_no_more_than_the_cache_lacks(
    models: RandomModels, make_engine: Callable[..., EngineDriver], pooling: Pooling, device_tokens: int
) -> None:
    """Behind a cached prompt the embedding of the last token computes what is not cached; a mean computes all of it."""
    engine = make_engine()
    prompt = random_prompt(1, 40)
    engine.run(prompt)

    outcome = engine.run(prompt, pooling=pooling)

    check(models.references[None], prompt, pooling, outcome)
    assert outcome.cache is not None
    assert outcome.cache.device_tokens == device_tokens


@pytest.mark.parametrize("pooling", BOTH)
@pytest.mark.parametrize("host_kv_bytes", [0, 2**20])
def test_a_preempted_prompt_goes_on_where_it_was(models: RandomModels, pooling: Pooling, host_kv_bytes: int) -> None:
    """A request that is preempted in the middle of its prompt has the embedding of an undisturbed one."""
    driver = models.engine(max_batch_tokens=16, max_running=1, host_kv_bytes=host_kv_bytes)
    prompt = random_prompt(5, 150)
    wanted = driver.submit(prompt, pooling=pooling, tier=ServiceTier.FLEX)
    for _ in range(4):
        driver.step()

    urgent = driver.submit(random_prompt(6, 30), max_tokens=5, tier=ServiceTier.PRIORITY, domain=b"other")
    driver.finish()

    assert driver.loop.stats().preemptions == 1
    assert urgent.token_ids
    check(models.references[None], prompt, pooling, wanted)


def test_an_embedding_leaves_its_prompt_in_the_cache(make_engine: Callable[..., EngineDriver]) -> None:
    """A chat behind an embedded prompt finds its KV."""
    engine = make_engine()
    prompt = random_prompt(3, 40)
    engine.run(prompt, pooling=Pooling.MEAN)

    later = engine.run(prompt)

    assert later.cache is not None
    assert later.cache.device_tokens == 36


@pytest.mark.parametrize("wrong", [{"max_tokens": 1}, {"prompt_logprobs": 0}])
def test_a_request_for_an_embedding_asks_for_nothing_else(
    make_engine: Callable[..., EngineDriver], wrong: dict[str, int]
) -> None:
    """A request that asks for tokens or for log probabilities besides its embedding is refused by name."""
    outcome = make_engine().run(random_prompt(1, 4), pooling=Pooling.LAST, **wrong)

    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.error.param == "pooling"
