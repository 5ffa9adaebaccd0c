"""Tests that a draft model changes no token: engines with and without one over the same requests."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.messages import ForgetDomain
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import make_base
from tests.engine.runner.test_decoder_parity import VARIANTS
from tests.engine.speculative.test_equal_tokens import Requests, check_equal, open_engine


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that says something else."""
    return make_base(tmp_path_factory.mktemp("stranger") / "draft", seed=9, num_layers=1)


def requests_of_all_kinds(count: int) -> Requests:
    """Greedy and seeded requests, with penalties, biases, stop tokens and least lengths, over the base and adapters.

    Each has a domain of its own, so that what is cached does not depend on the speed.
    """
    random = Random(count)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 12},
        {"temperature": 1.0, "min_tokens": 5},
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.2},
        {"repetition_penalty": 1.4},
        {"temperature": 0.9, "logit_bias": ((7, 3.0), (11, -2.0))},
        {"stop_token_ids": (5, 17), "ignore_eos": True},
        {"logprobs": 2},
    ]
    return [
        {
            "prompt": [random.randrange(2, 97) for _ in range(random.randrange(3, 50))],
            "adapter": VARIANTS[number % 3 and number % 4],
            "max_tokens": random.randrange(1, 40),
            "seed": number,
            "domain": b"%d" % number,
            "tier": ServiceTier.PRIORITY if number % 7 == 0 else ServiceTier.DEFAULT,
            **kinds[number % len(kinds)],
        }
        for number in range(count)
    ]


def serve(driver: EngineDriver, requests: Requests) -> list[Outcome]:
    """Submits requests between steps, and cancels one of ten when it runs."""
    random, outcomes, cancelled = Random(1), list[Outcome](), list[Outcome]()
    for number, request in enumerate(requests):
        outcomes.append(driver.submit(**request))
        for _ in range(random.randrange(4)):
            driver.step()
        if number % 10 == 9:
            cancelled.append(driver.submit(prompt=[3, 4, 5], max_tokens=90, domain=b"leaves", ignore_eos=True))
            driver.step()
            driver.step()
            driver.cancel(cancelled[-1])
        driver.engine.scheduler.speculator.check_integrity()
    driver.finish()
    return outcomes


def check_answers(plain: list[Outcome], drafted: list[Outcome]) -> None:
    """All answers are equal, and so are their log probabilities."""
    check_equal(plain, drafted)
    for one, other in zip(plain, drafted, strict=True):
        chances = torch.tensor([[log.logprob for log in outcome.logprobs] for outcome in (one, other)])
        assert torch.allclose(chances[0], chances[1], atol=1e-4)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_stranger", [False, True])
def test_a_draft_model_changes_no_answer(
    models: RandomModels, stranger: Path, is_stranger: bool, overlaps: bool
) -> None:
    """Requests of all kinds have the same tokens, ends and log probabilities, whether the draft model is the served model
    or a stranger to it. Some are preempted, and some are cancelled."""
    requests = requests_of_all_kinds(30)
    sizes: dict[str, Any] = {"max_batch_tokens": 40, "max_running": 5, "host_kv_bytes": 2**21, "kernels": "torch"}
    plain = open_engine(models, 0, **sizes)
    folder = stranger if is_stranger else models.base
    drafted = open_engine(
        models, 6, draft_model=folder, draft_kv_bytes=60_000, overlap_steps=overlaps, draft_cache_bytes=0, **sizes
    )

    expected, found = serve(plain, requests), serve(drafted, requests)

    check_answers(expected, found)
    stats = drafted.loop.stats()
    assert stats.preemptions > 0
    if is_stranger:
        assert stats.model_rejected_drafts > 15
    else:
        assert stats.model_accepted_drafts > 100
        assert stats.steps < 0.8 * plain.loop.stats().steps
    drafted.loop.take(ForgetDomain(IsolationDomain(b"1")))
    drafted.loop.check_integrity()
