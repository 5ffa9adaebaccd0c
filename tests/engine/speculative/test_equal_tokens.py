"""Tests that drafts change no token: engines with and without drafts over the same requests."""

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.messages import ForgetAdapter
from graftwork.engine.sampling.torch_sampler import choose_tokens
from graftwork.platform.clock import ManualClock
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.runner.test_decoder_parity import VARIANTS

Requests = list[dict[str, Any]]


def open_engine(models: RandomModels, max_draft_tokens: int, **options: Any) -> EngineDriver:
    """Returns an engine for which rows and passes of a draft model cost nothing, so that it verifies every draft."""
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
    config = EngineConfig(model=models.base, max_draft_tokens=max_draft_tokens, **settings)
    driver = EngineDriver(build_engine(config, lambda _: models.source, ManualClock()))
    driver.warm(*VARIANTS)
    return verifying_all(driver)


def verifying_all(driver: EngineDriver) -> EngineDriver:
    """Lets an engine believe that rows and guesses cost nothing, so that it verifies every draft. Returns it."""
    speculator = driver.engine.scheduler.speculator
    for num_rows in range(1, 400):
        speculator.cost.record(num_rows, 1.0)
        if speculator.model_drafter is not None:
            speculator.model_drafter.pass_cost.record(num_rows, 0.001)
    return driver


def serve(driver: EngineDriver, requests: Requests, at_once: int) -> list[Outcome]:
    """Submit requests a few at a time between steps, so that batches mix decoding, prompt chunks and drafts."""
    random = Random(at_once)
    outcomes = []
    for start in range(0, len(requests), at_once):
        outcomes += [driver.submit(**request) for request in requests[start : start + at_once]]
        for _ in range(random.randrange(12)):
            driver.step()
    driver.finish()
    return outcomes


def repetitive_prompt(random: Random) -> list[int]:
    """A few passages, each repeated several times."""
    passages = [[random.randrange(2, 97) for _ in range(random.randrange(2, 9))] for _ in range(3)]
    return [token for _ in range(random.randrange(1, 6)) for token in random.choice(passages)]


def random_requests(count: int, seed: int, **sampling: Any) -> Requests:
    """Requests of the base and three adapters; some are asked twice."""
    random = Random(seed)
    requests: Requests = []
    for number in range(count):
        prompt = repetitive_prompt(random)
        request = {"prompt": prompt, "adapter": VARIANTS[number % 4], "max_tokens": random.randrange(1, 30)}
        if sampling:
            request |= sampling | {"seed": number}
        requests.append(dict(random.choice(requests)) if number % 5 == 4 else request)
    return requests


def with_predictions(requests: Requests, answers: list[Outcome]) -> Requests:
    """Gives two of three requests their answer as a prediction, with some tokens changed."""
    random = Random(len(requests))
    return [
        request | {"prediction": tuple(random.choice([token] * 6 + [50]) for token in answer.token_ids)}
        if number % 3
        else request
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def check_equal(plain: list[Outcome], drafted: list[Outcome], draws: "RecordedDraws | None" = None) -> None:
    """All answers are equal. With `draws`, one may go another way after a draw that was a near tie."""
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        if draws is not None and one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            place = next(place for place, (token, another) in enumerate(pairs) if token != another)
            assert draws.could_be(number, place, other.token_ids[place]), (number, place)
            continue
        assert other.token_ids == one.token_ids, number
        assert other.finish == one.finish


class RecordedDraws:
    """The logits from which an engine has drawn tokens.

    Which part of a prompt is cached follows from which requests have ended, so the same position may be computed in
    another chunk, with another last bit. Then a draw may fall to the other side, if the random number is at the border
    between two tokens.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._drawn: dict[tuple[int, int], tuple[torch.Tensor, SampleSpec]] = {}

    def record(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
        for row, spec in enumerate(specs):
            self._drawn[spec.seed, spec.position] = logits[row].clone(), spec
        return choose_tokens(logits, specs)

    def could_be(self, number: int, place: int, token_id: int) -> bool:
        """Whether an error of a few last bits in the logits makes this token the drawn one."""
        request = self._requests[number]
        logits, spec = self._drawn[request["seed"], len(request["prompt"]) + place]
        errors = 1e-5 * (2 * torch.rand(200, len(logits), generator=torch.Generator().manual_seed(number)) - 1)
        return token_id in choose_tokens(logits + errors, [spec] * 200)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.3, "top_p": 0.9}, {"temperature": 1.0, "min_tokens": 6}], ids=str
)
def test_every_answer_is_that_of_an_engine_without_drafts(
    models: RandomModels, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 prompts over four adapters, in mixed batches with chunked prompts and a shared cache, have equal tokens, but
    for draws that were near ties."""
    requests = random_requests(200, seed=3, **sampling)
    plain, drafted = (open_engine(models, drafts, max_batch_tokens=40, max_running=12) for drafts in (0, 6))
    draws = RecordedDraws(requests)

    with monkeypatch.context() as patch:
        patch.setattr("graftwork.engine.sampling.torch_sampler.choose_tokens", draws.record)
        expected = serve(plain, requests, 9)
    found = serve(drafted, with_predictions(requests, expected), 9)

    check_equal(expected, found, draws if sampling else None)
    num_different = sum(one.token_ids != other.token_ids for one, other in zip(expected, found, strict=True))
    assert num_different <= 4
    stats = drafted.loop.stats()
    assert stats.accepted_tokens > 300
    assert stats.drafted_tokens > stats.accepted_tokens + 100
    assert num_different or stats.generated_tokens == plain.loop.stats().generated_tokens
    assert plain.loop.stats().drafted_tokens == 0
    drafted.loop.check_integrity()


def test_bfloat16_rows_have_the_same_bits_drafted_or_not(models: RandomModels) -> None:
    """In bf16 many logits are equal, so one different bit would change some of 200 greedy answers; none changes."""
    requests = random_requests(200, seed=4)
    for number, request in enumerate(requests):
        request["domain"] = (
            b"%d" % number
        )  # which prefixes are cached depends on which requests have ended, and so on the speed
    plain, drafted = (open_engine(models, drafts, dtype="bfloat16", max_running=16) for drafts in (0, 8))

    expected = serve(plain, requests, 16)
    found = serve(drafted, with_predictions(requests, expected), 16)

    check_equal(expected, found)
    assert drafted.loop.stats().accepted_tokens > 300


def test_poisoned_pages_and_rejected_drafts_leave_no_trace(models: RandomModels) -> None:
    """Answers are equal with NaN in all unused pages, although rejected drafts have written to some."""
    requests = random_requests(40, seed=5)
    plain, drafted = open_engine(models, 0), open_engine(models, 9)
    drafted.poison_unused_pages()

    expected = serve(plain, requests, 8)
    found = serve(drafted, with_predictions(requests, expected), 8)

    check_equal(expected, found)
    stats = drafted.loop.stats()
    assert stats.drafted_tokens > stats.accepted_tokens + 50


def test_without_a_seed_the_distribution_is_the_models(models: RandomModels) -> None:
    """3,000 unseeded answers of two tokens, each with the likeliest token drafted, pass a chi-square test against the
    probabilities of transformers."""
    prompt, model, count = [5, 6, 7, 8], models.references[None], 3000
    expected = {
        (first, second): chance * further * count
        for first, chance in likeliest(model, prompt).items()
        for second, further in likeliest(model, [*prompt, first]).items()
    }
    favourite = max(expected, key=lambda pair: expected[pair])
    driver = open_engine(models, 4, max_running=32)

    outcomes = [
        driver.submit(prompt, max_tokens=2, temperature=2.0, top_k=3, ignore_eos=True, prediction=favourite)
        for _ in range(64)
    ]
    while len(outcomes) < count:
        driver.finish()
        outcomes += [
            driver.submit(prompt, max_tokens=2, temperature=2.0, top_k=3, ignore_eos=True, prediction=favourite)
            for _ in range(min(64, count - len(outcomes)))
        ]
    driver.finish()

    found = Counter(tuple(outcome.token_ids) for outcome in outcomes)
    assert set(found) <= set(expected)
    statistic = sum((found[pair] - wanted) ** 2 / wanted for pair, wanted in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * sqrt(2 * freedom)
    assert driver.loop.stats().accepted_tokens > 300


def likeliest(model: torch.nn.Module, tokens: list[int]) -> dict[int, float]:
    """The three likeliest next tokens and their probabilities at temperature 2."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    best = logits.topk(3)
    return dict(zip(best.indices.tolist(), (best.values / 2).softmax(-1).tolist(), strict=True))


def test_the_draft_figures_of_a_request_are_told_at_its_end(models: RandomModels) -> None:
    """The draft figures of all requests add up to the engine's, and a right prediction counts as accepted in whole."""
    answer = open_engine(models, 0).run([5, 6, 7], max_tokens=12, ignore_eos=True).token_ids
    driver = open_engine(models, 4)

    told = driver.run([5, 6, 7], max_tokens=12, ignore_eos=True, prediction=tuple(answer))
    wrong = driver.run([9, 9, 9], max_tokens=4, prediction=(3,) * 5, ignore_eos=True, domain=b"other")

    assert told.token_ids == answer
    assert (told.drafts.accepted_prediction_tokens, told.drafts.rejected_prediction_tokens) == (12, 0)
    assert 0 < told.drafts.accepted_tokens <= told.drafts.drafted_tokens <= 11
    assert wrong.drafts.accepted_prediction_tokens + wrong.drafts.rejected_prediction_tokens == 5
    stats = driver.loop.stats()
    assert sum(outcome.drafts.drafted_tokens for outcome in driver.outcomes.values()) == stats.drafted_tokens
    assert sum(outcome.drafts.accepted_tokens for outcome in driver.outcomes.values()) == stats.accepted_tokens


def test_an_earlier_answer_is_drafted_from_until_its_adapter_goes(models: RandomModels) -> None:
    """The same question takes fewer steps the second time, but not for another domain or after its adapter is forgotten."""
    driver = open_engine(models, 8)
    prompt = list(range(2, 60))

    def steps(domain: bytes) -> int:
        before = driver.loop.stats().steps
        driver.run(prompt, adapter="sha256:wide", max_tokens=24, ignore_eos=True, domain=domain)
        return driver.loop.stats().steps - before

    first, second, stranger = steps(b"a"), steps(b"a"), steps(b"b")
    driver.loop.take(ForgetAdapter("sha256:wide"))
    forgotten = steps(b"a")

    assert second <= first - 3
    assert stranger == first
    assert forgotten >= first
