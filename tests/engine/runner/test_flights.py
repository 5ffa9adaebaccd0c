"""Flights of the real runner: a step takes the tokens of the step before it from the device."""

from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.step import Flight, StepPlan, StepResult
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.runner.model_runner import ModelRunner
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.flights import RunnerAround
from tests.engine.kernels.interpreted import interpreted_copies
from tests.engine.runner.test_decoder_parity import random_prompt

ADAPTERS = (None, "sha256:wide", "sha256:narrow", "sha256:rooted")
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logprobs": 2, "min_tokens": 3},
    {"prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 5, "stop_token_ids": tuple(range(10, 40))},
    {"max_tokens": 1},
)


SAMPLER = ("number_math", "edit_kernel", "weigh_kernels", "choose_kernel", "launches", "device_sampler")
"""The modules of the device sampler that hold or launch kernels."""


class LateRunner(RunnerAround):
    """A runner whose steps are computed only when their results are read."""

    def launch(self, plan: StepPlan) -> Flight:
        return LateFlight(self, plan)


class LateFlight:
    """A step that nothing has computed until its result is read."""

    def __init__(self, runner: LateRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def sample(self) -> None:
        """Does nothing yet."""

    def result(self) -> StepResult:
        return self._runner.run(self._plan)


class AwaitCounter(RunnerAround):
    """Counts the tokens that are computed before the host knows them."""

    num_awaited = 0

    def launch(self, plan: StepPlan) -> Flight:
        self.num_awaited += sum(piece.awaits_token for piece in plan.slices)
        return self.inner.launch(plan)


def finished(driver: EngineDriver) -> list[Outcome]:
    """Submits requests of all kinds, some of them later than others, and runs them to their ends."""
    random = Random(11)
    outcomes: list[Outcome] = []
    for number in range(14):
        options = {"max_tokens": random.choice((4, 9)), **SAMPLING[number % len(SAMPLING)]}
        adapter = ADAPTERS[random.randrange(4)]
        outcomes.append(driver.submit(random_prompt(random, random.choice((1, 6, 23))), adapter=adapter, **options))
        driver.step()
    driver.finish()
    driver.loop.check_integrity()
    return outcomes


@pytest.mark.parametrize(("is_late", "max_draft_tokens"), [(False, 8), (True, 0)], ids=["early-drafts", "late"])
def test_overlap_changes_no_answer_and_no_bit(models: RandomModels, is_late: bool, max_draft_tokens: int) -> None:
    """With overlap, requests of all kinds get the tokens and log probabilities that they get without it."""
    options = {"max_draft_tokens": max_draft_tokens, "max_batch_tokens": 17, "max_running": 5}
    plain = models.engine(overlap_steps=False, **options)
    driver = models.engine(overlap_steps=True, **options)
    around = LateRunner(driver.loop.steps.runner) if is_late else driver.loop.steps.runner
    driver.loop.steps.runner = counter = AwaitCounter(around)
    for engine in (plain, driver):
        engine.warm(*ADAPTERS)

    expected, actual = finished(plain), finished(driver)

    for one, other in zip(expected, actual, strict=True):
        assert (one.token_ids, one.finish, one.error) == (other.token_ids, other.finish, other.error)
        assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)
    assert counter.num_awaited > (0 if max_draft_tokens else 30)


PENALTIES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.9, "top_p": 0.9},
    {"repetition_penalty": 3.0},
    {},
)
VOCAB = 97


class NoScores:
    """A scorer of prompts for requests that ask for no scores."""

    def score(self, slices: object, hidden: object) -> dict[object, object]:
        return {}


def penalised(driver: EngineDriver) -> list[Outcome]:
    """Submits requests whose tokens depend on the tokens before them, and runs them to their ends."""
    random = Random(12)
    outcomes = []
    for number in range(8):
        prompt = random_prompt(random, random.choice((2, 9)))
        outcomes.append(driver.submit(prompt, max_tokens=random.choice((5, 8)), **PENALTIES[number % len(PENALTIES)]))
        driver.step()
    driver.finish()
    return outcomes


def test_the_device_sampler_counts_tokens_that_the_host_does_not_know(models: RandomModels) -> None:
    """With overlap, the device sampler's penalties include the token that the step before has sampled: requests get the
    tokens of the torch sampler without overlap."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    names = [f"graftwork.engine.sampling.device.{name}" for name in SAMPLER]
    copies = interpreted_copies(["graftwork.engine.kernels.blocks", *names])
    sizes = copies[names[-2]].SamplerSizes(block=128, room=128, chunk=128, digits=16)
    options = {"max_draft_tokens": 0, "max_running": 4}
    plain = models.engine(overlap_steps=False, **options)
    driver = models.engine(overlap_steps=True, **options)
    masks, cpu, plain_runner = MaskFiller(VOCAB), torch.device("cpu"), driver.loop.steps.runner
    assert isinstance(plain_runner, ModelRunner)
    sampler = copies[names[-1]].DeviceSampler(masks, VOCAB, 8, cpu, sizes)
    no_scores: Any = NoScores()
    runner = ModelRunner(plain_runner.forward, sampler, no_scores, no_scores, cpu)
    driver.loop.steps.runner = counter = AwaitCounter(runner)

    expected, actual = penalised(plain), penalised(driver)

    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    assert counter.num_awaited > 20
    masks.close()
