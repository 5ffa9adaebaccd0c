"""The engine's logits and tokens against transformers and peft, row by row."""

from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan, StepResult
from graftwork.engine.scheduler.speculator import accepted_prefix
from graftwork.platform.ids import RequestId
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.flights import RunnerAround

VARIANTS = [None, "sha256:wide", "sha256:narrow", "sha256:rooted"]


def random_prompt(random: Random, length: int) -> list[int]:
    return [random.randrange(2, 97) for _ in range(length)]


def reference_tokens(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy answer of transformers, without the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=1
        )
    return [int(token) for token in made[0, len(prompt) :]]


class RecordingRunner(RunnerAround):
    """Records the logits of each row that gave a token, with its slice up to that row."""

    def __init__(self, driver: EngineDriver) -> None:
        super().__init__(driver.engine.runner)
        self._runner = driver.engine.runner
        self.rows: list[tuple[RequestSlice, torch.Tensor]] = []

    def run(self, plan: StepPlan) -> StepResult:
        runner = self._runner
        with torch.inference_mode():
            batch = runner.batch(plan)
            logits = runner.logits(batch)
        rows = iter(logits)
        choices: dict[RequestId, tuple[int, ...]] = {}
        for piece in batch.slices:
            own = list(islice(rows, len(piece.samples)))
            choices[piece.request_id] = tuple(int(row.argmax()) for row in own)
            standing = len(accepted_prefix(piece.draft_token_ids, choices[piece.request_id]))
            self.rows += [(_up_to(piece, index), row) for index, row in enumerate(own[:standing])]
        return StepResult(choices)


def _up_to(piece: RequestSlice, num_drafts: int) -> RequestSlice:
    """The slice with only its first `num_drafts` drafts."""
    num_tokens = len(piece.token_ids) - piece.num_drafts + num_drafts
    return replace(piece, token_ids=piece.token_ids[:num_tokens], samples=piece.samples[: num_drafts + 1])


@pytest.mark.parametrize("max_batch_tokens", [512, 7])
def test_each_row_of_a_mixed_batch_has_the_logits_of_its_own_adapter_alone(
    models: RandomModels, max_batch_tokens: int
) -> None:
    """In a mixed batch, each row's logits equal those of peft for that row alone: prefill, chunked prefill and decode."""
    random = Random(7)
    driver = models.engine(max_batch_tokens=max_batch_tokens, max_running=7)
    driver.warm(*VARIANTS)
    recorder = RecordingRunner(driver)
    driver.loop.steps.runner = recorder
    prompts = [random_prompt(random, length) for length in (1, 5, 9, 16, 23, 30, 4, 12)]

    for index, prompt in enumerate(prompts):
        driver.submit(prompt, adapter=VARIANTS[index % 4], max_tokens=5, ignore_eos=True)
    by_id = dict(zip(list(driver.outcomes)[4:], zip(prompts, VARIANTS * 2, strict=True), strict=True))
    driver.finish()

    assert len(recorder.rows) == 5 * len(prompts)
    for piece, logits in recorder.rows:
        prompt, adapter = by_id[piece.request_id]
        tokens = [*prompt, *driver.outcomes[piece.request_id].token_ids][: piece.end]
        with torch.inference_mode():
            expected = models.references[adapter](torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert driver.loop.stats().max_adapters_in_a_step == 3


def test_greedy_tokens_equal_transformers_generate(models: RandomModels) -> None:
    """Requests of the base and three adapters, served together, give the tokens of transformers' generate()."""
    random = Random(11)
    driver = models.engine(max_batch_tokens=32, max_running=16)
    prompts = [random_prompt(random, random.randrange(1, 40)) for _ in range(24)]

    outcomes = [driver.submit(p, adapter=VARIANTS[i % 4], max_tokens=16) for i, p in enumerate(prompts)]
    driver.finish()

    for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        assert outcome.token_ids == reference_tokens(models.references[VARIANTS[index % 4]], prompt, 16), index


def test_a_warm_prefix_gives_the_same_tokens_as_a_cold_one(models: RandomModels) -> None:
    """A prompt with a cached prefix gives the same tokens, and only the rest of it is computed."""
    prompt = random_prompt(Random(3), 30)
    driver = models.engine()
    cold = driver.run(prompt, adapter="sha256:wide")

    warm = driver.run(prompt, adapter="sha256:wide")

    assert warm.token_ids == cold.token_ids
    assert cold.cache is not None
    assert warm.cache is not None
    assert (cold.cache.device_tokens, cold.cache.recomputed_tokens) == (0, 30)
    assert (warm.cache.device_tokens, warm.cache.recomputed_tokens) == (28, 2)


def test_a_prefix_is_not_shared_across_adapters_or_domains(models: RandomModels) -> None:
    """The same prompt under another adapter, the base or another domain finds nothing cached."""
    prompt = random_prompt(Random(4), 30)
    driver = models.engine()
    driver.run(prompt, adapter="sha256:wide", domain=b"a")

    others = [
        driver.run(prompt, adapter="sha256:narrow", domain=b"a"),
        driver.run(prompt, adapter=None, domain=b"a"),
        driver.run(prompt, adapter="sha256:wide", domain=b"b"),
    ]
    same = driver.run(prompt, adapter="sha256:wide", domain=b"a")

    assert [outcome.cache.cached_tokens for outcome in others if outcome.cache] == [0, 0, 0]
    assert same.cache is not None
    assert same.cache.cached_tokens == 28


def test_stale_and_poisoned_memory_is_never_read(models: RandomModels) -> None:
    """Logits are the same if every unused KV page is full of NaN."""
    driver = models.engine()
    driver.poison_unused_pages()
    prompts = [random_prompt(Random(n), 3 + 5 * n) for n in range(4)]

    outcomes = [driver.submit(prompt, adapter=VARIANTS[i]) for i, prompt in enumerate(prompts)]
    driver.finish()

    for index, (prompt, outcome) in enumerate(zip(prompts, outcomes, strict=True)):
        assert outcome.token_ids == reference_tokens(models.references[VARIANTS[index]], prompt, 8)


def test_a_seeded_output_does_not_depend_on_the_batch(models: RandomModels) -> None:
    """A seeded request gives the same tokens alone and in a batch; without a seed they vary."""
    prompt = random_prompt(Random(5), 12)
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_tokens": 12, "ignore_eos": True}
    alone = models.engine().run(prompt, seed=42, **sampling)
    crowded = models.engine(max_batch_tokens=16, max_running=8)

    for number in range(5):
        crowded.submit(random_prompt(Random(number), 20), adapter=VARIANTS[number % 4], **sampling)
    among_others = crowded.submit(prompt, seed=42, **sampling)
    crowded.finish()
    unseeded = {tuple(crowded.run(prompt, **sampling).token_ids) for _ in range(4)}

    assert among_others.token_ids == alone.token_ids
    assert len(unseeded) > 1


def test_spec_of_a_slice_names_the_position_after_its_last_token() -> None:
    """The noise of a token depends on the position that the token will have."""
    spec = SampleSpec(SamplingParams(max_tokens=1), seed=1, position=3, banned_token_ids=())
    piece = RequestSlice("req_1", (5, 6, 7), 0, (0,), None, (spec,))  # type: ignore[arg-type]

    assert piece.end == spec.position
