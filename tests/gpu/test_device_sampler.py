"""Tests of the compiled sampling kernels, at the vocabulary of a real model."""

from random import Random
from types import ModuleType

import pytest
import torch

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.sampling.torch_sampler import TorchSampler
from tests.engine.sampling.device.sampler_cases import SamplerStep, random_step
from tests.engine.sampling.device.sampler_oracle import tokens_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 128_256
DEVICE = torch.device("cuda")


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.sampling.device import device_sampler

    return device_sampler


def likely_rows(num_rows: int) -> torch.Tensor:
    """Logits as a model's are: noise, and a few tokens far above it; in bf16."""
    noise = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(num_rows, VOCAB, generator=noise)
    peaks = torch.randint(VOCAB, (num_rows, 12), generator=noise)
    return logits.scatter_(1, peaks, 14 + 4 * torch.rand(num_rows, 12, generator=noise)).bfloat16()


def test_the_device_picks_the_tokens_of_the_cpu(kernels: ModuleType) -> None:
    """2,000 random rows of 3,000 tokens, with every parameter, get the CPU's token, except where the noise is at the
    border between two."""
    source, masks = Random(17), MaskFiller(3000)
    sampler = kernels.DeviceSampler(masks, 3000, 64, DEVICE)
    num_different = 0
    for _ in range(40):
        step = random_step(source, 3000, 50)

        actual = sampler.begin(step.specs).sample(step.logits.to(DEVICE)).result()

        expected = TorchSampler(masks).begin(step.specs).sample(step.logits.clone()).result()
        for row, (token, other) in enumerate(zip(actual.token_ids, expected.token_ids, strict=True)):
            if token != other:
                possible = tokens_within_rounding(step.logits[row], step.specs[row])
                assert token in possible, step.specs[row]
                num_different += len(possible) < 3000
    masks.close()
    assert num_different <= 4


def test_a_large_vocabulary_gives_the_tokens_of_the_cpu(kernels: ModuleType) -> None:
    """Rows of 128,256 tokens get the CPU's tokens and log probabilities, whether few tokens are kept or most."""
    source, masks, num_rows = Random(18), MaskFiller(VOCAB), 48
    step = SamplerStep(likely_rows(num_rows), random_step(source, VOCAB, num_rows).specs)

    actual = kernels.DeviceSampler(masks, VOCAB, 64, DEVICE).begin(step.specs).sample(step.logits.to(DEVICE)).result()

    expected = TorchSampler(masks).begin(step.specs).sample(step.logits.clone()).result()
    for row, (token, other) in enumerate(zip(actual.token_ids, expected.token_ids, strict=True)):
        assert token == other or token in tokens_within_rounding(step.logits[row], step.specs[row])
    for own, wanted in zip(actual.logprobs, expected.logprobs, strict=True):
        if own is not None and wanted is not None:
            assert [value for _, value in own.top] == pytest.approx([value for _, value in wanted.top], abs=1e-4)
    masks.close()


def test_a_row_has_the_same_bits_in_every_batch(kernels: ModuleType) -> None:
    """A row's token and log probabilities are the same alone and among 48 others, in two runs."""
    masks = MaskFiller(VOCAB)
    sampler = kernels.DeviceSampler(masks, VOCAB, 64, DEVICE)
    logits = likely_rows(48).to(DEVICE)
    specs = random_step(Random(19), VOCAB, 48).specs
    together = sampler.begin(specs).sample(logits).result()

    for row in range(0, 48, 7):
        alone = sampler.begin([specs[row]]).sample(logits[row : row + 1]).result()

        assert alone.token_ids == [together.token_ids[row]]
        assert repr(alone.logprobs[0]) == repr(together.logprobs[row])
    masks.close()


def test_sampling_waits_for_nothing(kernels: ModuleType) -> None:
    """Once the kernels are compiled, begin and sample make torch wait for the device nowhere, masks or not."""
    masks = MaskFiller(VOCAB)
    sampler = kernels.DeviceSampler(masks, VOCAB, 64, DEVICE)
    logits = likely_rows(32).to(DEVICE)
    specs = random_step(Random(20), VOCAB, 32).specs
    expected = sampler.begin(specs).sample(logits).result()

    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sampler.begin(specs).sample(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert sampled.result().token_ids == expected.token_ids
    masks.close()


def test_a_captured_graph_samples_another_step(kernels: ModuleType) -> None:
    """Replayed after the parameters and the logits have changed, the launches give the tokens of the new step."""
    masks = MaskFiller(VOCAB)
    sampler = kernels.DeviceSampler(masks, VOCAB, 64, DEVICE)
    logits = likely_rows(16).to(DEVICE)
    first = [SampleSpec(SamplingParams(max_tokens=1, top_p=0.9), row, 5) for row in range(16)]
    sampling = sampler.begin(first)
    sampling.sample(logits)
    assert sampling.parameters is None
    parameters = sampler.send(sampling.words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.launch(logits, parameters, None)

    second = [SampleSpec(SamplingParams(max_tokens=1, top_k=40), row, 6) for row in range(16)]
    logits.copy_(likely_rows(17)[1:])
    sampler.send(sampler.begin(second).words)
    graph.replay()
    replayed = sampling.memory.output[0, :16].tolist()

    assert replayed == list(sampler.begin(second).sample(logits).result().token_ids)
    masks.close()
