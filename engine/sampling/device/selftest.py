"""Tests the sampling kernels on a device at the engine's start, before any request uses them.

Triton compiles a kernel at its first launch. A machine may lack the tools that Triton needs for this, and on a new
device the results may be wrong. The test samples a few rows that together use every parameter, and compares the tokens
and the log probabilities with those of the torch sampler on the CPU.
"""

from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.sampling.device.device_sampler import DeviceSampler
from graftwork.engine.sampling.sampler import SampledRows
from graftwork.engine.sampling.torch_sampler import TorchSampler

_VOCAB = 4100  # a few blocks, the last one nearly empty
_SEED = 20261
_TOLERANCE = 1e-4
_PARAMS = (
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=20),
    SamplingParams(max_tokens=1, temperature=0.0, logit_bias=((7, 90.0), (8, 91.0))),
    SamplingParams(max_tokens=1, logprobs=0),
    SamplingParams(max_tokens=1, temperature=0.7, min_p=0.05),
    SamplingParams(max_tokens=1, temperature=0.7, top_k=20),
    SamplingParams(max_tokens=1, temperature=1.5, top_p=0.9),
    SamplingParams(max_tokens=1, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(max_tokens=1, top_p=0.5, presence_penalty=1.5),
)


def why_sampler_fails(device: torch.device) -> str | None:
    """Returns what is wrong with the sampling kernels on a device, as a text for the log.

    Returns None if their tokens and log probabilities are those of the torch sampler.
    """
    masks = MaskFiller(_VOCAB)
    specs = [_spec(number, params) for number, params in enumerate(_PARAMS)]
    logits = 3 * torch.randn(len(specs), _VOCAB, generator=torch.Generator().manual_seed(_SEED))
    expected = TorchSampler(masks).begin(specs).sample(logits.clone()).result()
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            sampler = DeviceSampler(masks, _VOCAB, len(specs), device)
            actual = sampler.begin(specs).sample(logits.to(device)).result()
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    finally:
        masks.close()
    return _difference(actual, expected)


class _EveryThird:
    """A grammar that allows every third word of 32 tokens. On a GPU its bits are read from the host's memory."""

    def fill(self, words: NDArray[np.int32]) -> None:
        words[::3] = -1


def _spec(number: int, params: SamplingParams) -> SampleSpec:
    history = None
    if params.counts_tokens:
        history = TokenHistory(range(0, _VOCAB, 3))
        history.extend([*range(0, _VOCAB, 2), 4, 4])
    mask = _EveryThird() if number % 2 else None
    return SampleSpec(params, _SEED + number, position=number, banned_token_ids=(3, 4), history=history, mask=mask)


def _difference(actual: SampledRows, expected: SampledRows) -> str | None:
    if list(actual.token_ids) != list(expected.token_ids):
        return f"it chose the tokens {list(actual.token_ids)}, but torch {list(expected.token_ids)}"
    for own, other in zip(actual.logprobs, expected.logprobs, strict=True):
        if own is None or other is None:
            continue
        if not abs(own.logprob - other.logprob) <= _TOLERANCE or [t for t, _ in own.top] != [t for t, _ in other.top]:
            return f"its log probabilities are {own}, but torch's {other}"
    return None
