"""Random steps for samplers: logits with ties and masks, and specs with every parameter."""

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.platform.errors import GraftworkError

VOCABULARIES = (37, 64, 131, 500, 1024, 3000)


@dataclass(frozen=True)
class AllowedTokens:
    """A grammar's mask that allows some tokens."""

    token_ids: tuple[int, ...]

    def fill(self, words: NDArray[np.int32]) -> GraftworkError | None:
        bits = np.zeros(len(words) * 32, dtype=np.uint8)
        bits[list(self.token_ids)] = 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return None


@dataclass(frozen=True)
class SamplerStep:
    """The logits of one step and its specs."""

    logits: torch.Tensor  # [rows, vocab]
    specs: list[SampleSpec]


def random_step(source: Random, vocab: int, num_rows: int) -> SamplerStep:
    rows = [random_logits(source, vocab) for _ in range(num_rows)]
    return SamplerStep(torch.stack(rows), [random_spec(source, vocab) for _ in range(num_rows)])


def random_logits(source: Random, vocab: int) -> torch.Tensor:
    """A flat or a peaked row: with values of bf16, which has few, or with few distinct values, or of fp32; some
    forbidden."""
    noise = torch.Generator().manual_seed(source.getrandbits(48))
    logits = torch.randn(vocab, generator=noise) * source.choice([0.01, 1.0, 3.0, 8.0])
    if source.random() < 0.5:
        peaks = torch.randint(vocab, (5,), generator=noise)
        logits[peaks] += 12 * torch.rand(5, generator=noise)
    match source.randrange(4):
        case 0:
            logits = logits.round()
        case 1 | 2:
            logits = logits.bfloat16().float()
    if source.random() < 0.2:
        logits[torch.rand(vocab, generator=noise) < source.choice([0.3, 0.99])] = float("-inf")
    return logits


def random_params(source: Random, vocab: int) -> SamplingParams:
    """Every sampling parameter, at its borders and between them."""
    chosen: dict[str, Any] = {
        "temperature": source.choice([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.0, 1.7, 100.0]),
        "top_k": source.choice([None, None, None, 1, 2, 7, 50, vocab - 1, vocab, vocab + 5, 10**6]),
        "top_p": source.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-12]),
        "min_p": source.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
        "presence_penalty": source.choice([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": source.choice([0.0, 0.0, 0.4, -0.7]),
        "repetition_penalty": source.choice([1.0, 1.0, 1.3, 0.5]),
        "logprobs": source.choice([None, None, 0, 5, 20]),
        "choice": source.choice([0, 3, 2**40]),
    }
    if source.random() < 0.3:
        biased = source.sample(range(vocab), source.choice([1, 5, 30]))
        chosen["logit_bias"] = tuple((token, source.choice([-100.0, 100.0, 1.5, -0.1])) for token in biased)
    return SamplingParams(max_tokens=1, **chosen)


def random_spec(source: Random, vocab: int) -> SampleSpec:
    params = random_params(source, vocab)
    history = None
    if params.counts_tokens:
        history = TokenHistory([source.randrange(vocab) for _ in range(source.choice([0, 20]))])
        history.extend(source.randrange(vocab) for _ in range(source.choice([0, 1, 30])))
    num_allowed = source.choice([1, 3, vocab // 2, vocab])
    return SampleSpec(
        params=params,
        seed=source.choice([0, 1, 2**64 - 1, source.getrandbits(64)]),
        position=source.randrange(10**6),
        banned_token_ids=source.choice([(), (), tuple(source.sample(range(vocab), 2))]),
        history=history,
        draft_token_ids=source.choice([(), tuple(source.randrange(vocab) for _ in range(3)), (5, 6, 5)]),
        mask=source.choice([None, None, AllowedTokens(tuple(source.sample(range(vocab), num_allowed)))]),
    )
