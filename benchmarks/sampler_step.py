"""What choosing the tokens of one step costs, feature by feature, beside the forward pass that it follows.

    python benchmarks/sampler_step.py [--batch 32] [--vocabulary 32000] [--history 2000] [--rounds 40] [--json OUT]

Milliseconds of processor time on one core, the median over rounds in which all features take turns, with their
quartiles; edits include a copy of the logits (0.1 ms). Logits are peaked as a model's are: normal noise, and a few tokens far above it. `plain` is the median of an
argmax over the same logits by itself: what greedy decoding cannot do without.

On a machine with a CUDA device, a second table has the device sampler's milliseconds there: from the first kernel to
the end of the copy of the result, by CUDA events. The clock of the host has no part in them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from machine import describe_machine

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.torch_sampler import StepLogprobs, choose_tokens

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, min_tokens": {"temperature": 0.0, "min_tokens": 99},
    "greedy, logit_bias of 50": {"temperature": 0.0, "logit_bias": tuple((7 * n, 1.0) for n in range(50))},
    "greedy, repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.2},
    "greedy, all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 0},
    "greedy, 20 logprobs": {"temperature": 0.0, "logprobs": 20},
    "temperature": {"temperature": 0.8},
    "temperature, min_p": {"temperature": 0.8, "min_p": 0.05},
    "temperature, top_k": {"temperature": 0.8, "top_k": 50},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": tuple((7 * n, 1.0) for n in range(50)),
        "logprobs": 20,
    },
}


@dataclass(frozen=True, slots=True)
class Figure:
    """Milliseconds of one step."""

    feature: str
    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--history", type=int, default=2_000, help="tokens behind each row, for penalties")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.batch, options.vocabulary, options.history, options.rounds)
    show(figures, f"batch {options.batch}, vocabulary {options.vocabulary}, history {options.history}")
    on_device: list[Figure] = []
    if torch.cuda.is_available():
        on_device = measure_on_device(options.batch, options.vocabulary, options.history, options.rounds)
        show(on_device, f"on {torch.cuda.get_device_name()}, bf16, the same sizes")
    if options.json:
        sizes = {name: getattr(options, name) for name in ("batch", "vocabulary", "history", "rounds")}
        record = {
            "machine": describe_machine(),
            **sizes,
            "figures": [asdict(figure) for figure in figures],
            "on_device": [asdict(figure) for figure in on_device],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(batch: int, vocabulary: int, history: int, rounds: int) -> list[Figure]:
    """The features take turns, so that a busy machine disturbs all alike."""
    logits = peaked_logits(batch, vocabulary)
    steps: dict[str, Callable[[], object]] = {"plain": lambda: logits.argmax(dim=-1).tolist()}
    for feature, params in FEATURES.items():
        steps[feature] = partial(one_step, logits, specs_of(batch, vocabulary, history, params))
    samples: dict[str, list[float]] = {feature: [] for feature in steps}
    for _ in range(rounds):
        for feature, step in steps.items():
            samples[feature].append(timed(step))
    return [Figure(feature, *_quartiles(taken)) for feature, taken in samples.items()]


def measure_on_device(batch: int, vocabulary: int, history: int, rounds: int) -> list[Figure]:
    """The features take turns, as in `measure`. The first step of each compiles the kernels and fills the counts."""
    from graftwork.engine.grammar.matching.masks import MaskFiller
    from graftwork.engine.sampling.device.device_sampler import DeviceSampler

    device = torch.device("cuda")
    logits = peaked_logits(batch, vocabulary).to(device, torch.bfloat16)
    masks = MaskFiller(vocabulary)
    steps: dict[str, Callable[[], float]] = {"plain": partial(timed_on_device, lambda: logits.argmax(dim=-1))}
    for feature, params in FEATURES.items():
        sampler = DeviceSampler(masks, vocabulary, batch, device)
        steps[feature] = partial(sampled_on_device, sampler, logits, specs_of(batch, vocabulary, history, params))
    for step in steps.values():
        step()
    samples: dict[str, list[float]] = {feature: [] for feature in steps}
    for _ in range(rounds):
        for feature, step in steps.items():
            samples[feature].append(step())
    masks.close()
    return [Figure(feature, *_quartiles(taken)) for feature, taken in samples.items()]


def sampled_on_device(sampler: Any, logits: torch.Tensor, specs: list[SampleSpec]) -> float:
    sampling = sampler.begin(specs)
    return timed_on_device(lambda: sampling.sample(logits))


def prepare_on_device(batch: int, vocabulary: int, history: int, device: torch.device) -> list[str]:
    """Prepare a step of every feature as `measure_on_device` does, and sample nothing. Returns the features."""
    from graftwork.engine.grammar.matching.masks import MaskFiller
    from graftwork.engine.sampling.device.device_sampler import DeviceSampler

    masks = MaskFiller(vocabulary)
    for params in FEATURES.values():
        sampler = DeviceSampler(masks, vocabulary, batch, device)
        sampler.begin(specs_of(batch, vocabulary, history, params))
    masks.close()
    return ["plain", *FEATURES]


def timed_on_device(step: Callable[[], object]) -> float:
    """Milliseconds between two events on the stream. The host runs ahead, so its own time does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)  # about half a millisecond, in which the host launches everything
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def one_step(logits: torch.Tensor, specs: list[SampleSpec]) -> None:
    """As the runner does it, on a copy where the logits are changed."""
    edits = any(spec.banned_token_ids or spec.history or spec.params.logit_bias for spec in specs)
    own = logits.clone() if edits else logits
    scores = StepLogprobs(own, specs)
    scores.of(choose_tokens(own, specs).tolist())


def peaked_logits(batch: int, vocabulary: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(batch, vocabulary, generator=noise)
    peaks = torch.randint(vocabulary, (batch, 12), generator=noise)
    return logits.scatter_(1, peaks, 8 + 3 * torch.rand(batch, 12, generator=noise))


def specs_of(batch: int, vocabulary: int, history: int, params: dict[str, Any]) -> list[SampleSpec]:
    source = Random(1)
    sampling = SamplingParams(max_tokens=100, **params)
    specs = []
    for row in range(batch):
        tokens = TokenHistory([source.randrange(vocabulary) for _ in range(history)])
        tokens.extend(source.randrange(vocabulary) for _ in range(100))
        banned = (1, 2) if sampling.min_tokens else ()
        specs.append(SampleSpec(sampling, row, history, banned, tokens if sampling.counts_tokens else None))
    return specs


def timed(step: Callable[[], object]) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1000


def _quartiles(taken: list[float]) -> tuple[float, float, float]:
    lower, median, upper = statistics.quantiles(taken, n=4)
    return median, lower, upper


def show(figures: list[Figure], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("feature", "ms a step", "quartiles", "beyond greedy", title=title)
    greedy = next(figure.median_ms for figure in figures if figure.feature == "greedy")
    for figure in figures:
        spread = f"{figure.lower_quartile_ms:.2f} … {figure.upper_quartile_ms:.2f}"
        table.add_row(figure.feature, f"{figure.median_ms:.2f}", spread, f"{figure.median_ms - greedy:+.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
