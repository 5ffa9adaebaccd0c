"""The device sampler, interpreted, against the torch sampler and against a brute-force sampler in fp64."""

from collections.abc import Iterator
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.sampling.sampler import AwaitedTokens, SampledRows
from graftwork.engine.sampling.torch_sampler import TorchSampler
from tests.engine.sampling.device.sampler_cases import VOCABULARIES, AllowedTokens, SamplerStep, random_step
from tests.engine.sampling.device.sampler_oracle import tokens_within_rounding

LARGE = {"block": 4096, "room": 4096, "chunk": 4096, "digits": 16}
"""Sizes for which the interpreter needs few steps."""
SMALL = {"block": 128, "room": 32, "chunk": 128}
"""Sizes that cut small rows into many blocks and chunks, and leave many rows ungathered."""


class LateTokens:
    """A grammar that learns the token before its position late: it allows what it is told last."""

    allowed: tuple[int, ...] = ()

    def fill(self, words: NDArray[np.int32]) -> None:
        AllowedTokens(self.allowed).fill(words)


class Samplers:
    """The torch sampler and interpreted device samplers over one vocabulary."""

    def __init__(self, modules: dict[str, ModuleType], vocab: int) -> None:
        self.masks = MaskFiller(vocab)
        self._modules = modules
        self._vocab = vocab

    def torch(self, step: SamplerStep) -> SampledRows:
        return TorchSampler(self.masks).begin(step.specs).sample(step.logits.clone()).result()

    def device(self, **sizes: int) -> Any:
        module = self._modules["device_sampler"]
        return module.DeviceSampler(
            self.masks, self._vocab, 64, torch.device("cpu"), self._modules["launches"].SamplerSizes(**sizes)
        )


@pytest.fixture
def samplers_of(interpreted: dict[str, ModuleType]) -> Iterator[Any]:
    made: list[Samplers] = []

    def make(vocab: int) -> Samplers:
        made.append(Samplers(interpreted, vocab))
        return made[-1]

    yield make
    for samplers in made:
        samplers.masks.close()


def run(sampler: Any, step: SamplerStep) -> SampledRows:
    sampled: SampledRows = sampler.begin(step.specs).sample(step.logits.clone()).result()
    return sampled


def assert_same(step: SamplerStep, actual: SampledRows, expected: SampledRows) -> int:
    """Assert that the rows have the same tokens and log probabilities. Returns how many tokens differ by rounding."""
    num_different = 0
    assert actual.ends == expected.ends
    for row, (spec, logits) in enumerate(zip(step.specs, step.logits, strict=True)):
        token, other = actual.token_ids[row], expected.token_ids[row]
        if token != other:
            possible = tokens_within_rounding(logits, spec)
            assert token in possible, spec
            assert other in possible, spec
            num_different += len(possible) < len(logits)
        assert_same_logprobs(actual, expected, row, logits)
    return num_different


def assert_same_logprobs(actual: SampledRows, expected: SampledRows, row: int, logits: torch.Tensor) -> None:
    own, other = actual.logprobs[row], expected.logprobs[row]
    assert (own is None) == (other is None)
    if own is None or other is None or not logits.amax().isfinite():
        return
    logprobs = logits.double().log_softmax(-1)
    assert own.logprob == pytest.approx(logprobs[actual.token_ids[row]].item(), abs=1e-5)
    assert [value for _, value in own.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
    ordered = logits.sort(descending=True, stable=True).indices[: len(own.top)]
    assert [token for token, _ in own.top] == ordered.tolist()


@pytest.mark.parametrize(
    ("sizes", "vocab", "num_rows"), [(LARGE, 3000, 12), (LARGE, 131, 12), (SMALL, 260, 6), (SMALL, 37, 12)]
)
def test_it_picks_the_tokens_of_the_torch_sampler(
    samplers_of: Any, sizes: dict[str, int], vocab: int, num_rows: int
) -> None:
    """Random rows with every parameter get the torch sampler's tokens and log probabilities, however work is cut."""
    samplers = samplers_of(vocab)
    step = random_step(Random(vocab), vocab, num_rows)

    actual = run(samplers.device(**sizes), step)

    assert assert_same(step, actual, samplers.torch(step)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_it_picks_them_in_ten_thousand_cases(samplers_of: Any, seed: int) -> None:
    """Of 1,000 random rows, at most one differs from the torch sampler, and only where the noise is at a border."""
    source = Random(seed)
    num_different = 0
    for _ in range(20):
        vocab = source.choice(VOCABULARIES)
        samplers = samplers_of(vocab)
        step = random_step(source, vocab, 50)
        sizes = LARGE | {"room": source.choice([64, 4096]), "block": source.choice([512, 4096, 4096, 4096])}
        num_different += assert_same(step, run(samplers.device(**sizes), step), samplers.torch(step))

    assert num_different <= 1


def test_it_draws_as_the_definition_says(samplers_of: Any) -> None:
    """Random rows get the token of a brute-force sampler in fp64, and rounding is at no border."""
    step = random_step(Random(5), 500, 16)

    actual = run(samplers_of(500).device(**LARGE), step)

    possible = [tokens_within_rounding(logits, spec) for logits, spec in zip(step.logits, step.specs, strict=True)]
    assert sum(len(tokens) == 1 for tokens in possible) >= 10
    assert all(token in tokens for token, tokens in zip(actual.token_ids, possible, strict=True))


def test_an_awaited_token_counts_as_if_the_host_knew_it(samplers_of: Any) -> None:
    """A step whose histories lack the last token, which is on the device, gets the tokens of one whose histories have it.
    The awaited token would be chosen again if it did not count. Grammars learn it after the step was begun."""
    source, samplers, late = Random(11), samplers_of(260), LateTokens()
    sampler, noise = samplers.device(**SMALL), torch.Generator().manual_seed(4)
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.7)
    history = [TokenHistory([source.randrange(260) for _ in range(9)]) for _ in range(8)]
    specs = [SampleSpec(params, row, 9, history=one, mask=late if row < 4 else None) for row, one in enumerate(history)]
    specs += [SampleSpec(SamplingParams(max_tokens=9), row, 9) for row in range(8, 12)]
    sources = [19 - row if row % 3 else None for row in range(12)]

    for _ in range(3):
        logits = 3 * torch.randn(12, 260, generator=noise)
        before, best = torch.zeros(20, dtype=torch.int32), logits.argmax(-1)
        for row, place in enumerate(sources):
            before[place or 0] = best[row]
        sampling = sampler.begin(specs, AwaitedTokens(before, sources))
        for one, place in zip(history, sources, strict=False):
            one.extend([] if place is None else [int(before[place])])
        late.allowed = (*best.tolist(), *source.sample(range(260), 90))
        actual = sampling.sample(logits.clone()).result()

        assert actual.token_ids == samplers.torch(SamplerStep(logits, specs)).token_ids
        assert sum(actual.token_ids[row] != best[row] for row in range(8) if row % 3) >= 3


def test_a_row_chooses_the_same_in_any_batch(samplers_of: Any) -> None:
    """A row's token and log probabilities have the same bits in another order of rows, and beside a row of NaN."""
    source = Random(3)
    step = random_step(source, 131, 8)
    together = run(samplers_of(131).device(**LARGE), step)
    order = [*source.sample(range(8), 8), 0]
    logits = step.logits[order]
    logits[-1] = float("nan")

    shuffled = run(samplers_of(131).device(**LARGE), SamplerStep(logits, [step.specs[row] for row in order]))

    assert list(shuffled.token_ids[:-1]) == [together.token_ids[row] for row in order[:-1]]
    assert repr(shuffled.logprobs[:-1]) == repr([together.logprobs[row] for row in order[:-1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_takes_the_logits_of_the_model(samplers_of: Any, dtype: torch.dtype) -> None:
    """Logits of any dtype, in wider rows whose padding is NaN, give the tokens of their fp32 values, and stay as they
    were."""
    step = random_step(Random(8), 131, 6)
    wide = torch.full((6, 160), float("nan"), dtype=dtype)
    wide[:, :131] = step.logits
    samplers, before = samplers_of(131), wide.clone()

    actual = samplers.device(**SMALL).begin(step.specs).sample(wide[:, :131]).result()

    expected = samplers.torch(SamplerStep(wide[:, :131].float(), step.specs))
    assert actual.token_ids == expected.token_ids
    assert torch.equal(wide.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_without_any_token_gets_a_valid_one(samplers_of: Any, params: dict[str, Any]) -> None:
    """Rows that forbid all tokens, or hold NaN or infinity, get a token of the vocabulary; a NaN is the greedy one."""
    logits = torch.zeros(4, 37)
    logits[0] = float("-inf")
    logits[1] = float("nan")
    logits[2, 30] = float("nan")
    logits[3, 20] = float("inf")
    specs = [SampleSpec(SamplingParams(max_tokens=1, logprobs=3, **params), seed, 0) for seed in range(4)]

    token_ids = run(samplers_of(37).device(**LARGE), SamplerStep(logits, specs)).token_ids

    assert all(0 <= token < 37 for token in token_ids)
    assert list(token_ids[2:]) == [30, 20]


def test_complete_and_failed_grammars_are_reported(samplers_of: Any) -> None:
    """A row whose grammar allows nothing is reported, and gets a token as if it had no grammar."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    masks = [AllowedTokens(()), AllowedTokens((3,)), None]
    specs = [SampleSpec(params, 0, 0, mask=mask) for mask in masks]
    step = SamplerStep(torch.arange(40.0).repeat(3, 1), specs)

    actual = run(samplers_of(40).device(**LARGE), step)

    assert actual.ends == {0: None}
    assert list(actual.token_ids) == [39, 3, 39]


def test_a_larger_batch_gets_more_memory(samplers_of: Any) -> None:
    """Steps of 3, 20, 0 and 4 rows through one sampler have the torch sampler's tokens."""
    samplers = samplers_of(64)
    sampler = samplers.device(**LARGE)

    for num_rows in (3, 20, 0, 4):
        step = random_step(Random(num_rows), 64, num_rows) if num_rows else SamplerStep(torch.empty(0, 64), [])
        assert assert_same(step, run(sampler, step), samplers.torch(step)) == 0


def test_logits_that_do_not_fit_are_refused(samplers_of: Any) -> None:
    """Logits of another vocabulary, or not adjacent in memory, raise an error that says so."""
    spec = SampleSpec(SamplingParams(max_tokens=1), 0, 0)

    with pytest.raises(ValueError, match="do not fit 1 rows of a vocabulary of 40"):
        samplers_of(40).device().begin([spec]).sample(torch.zeros(1, 41))
    with pytest.raises(ValueError, match="contiguous"):
        samplers_of(40).device().begin([spec]).sample(torch.zeros(40, 1, 2).transpose(0, 1)[..., 0])
