"""Runs of requests on engines that differ only in the LoRA backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.lora.weights import AdapterSource, AdapterWeights, LoraPair
from tests.engine.engine_driver import EngineDriver
from tests.engine.lora.test_lifecycle import SHAPES
from tests.engine.runner.test_decoder_parity import RecordingRunner, random_prompt
from tests.engine.tagged_kv_cache import load_always

VOCAB = 97


@dataclass(frozen=True)
class Request:
    """A prompt of random tokens, and the adapters that answer it."""

    prompt_tokens: int
    uses: tuple[AdapterUse, ...] = ()
    window: RollingWindow | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The sampling fields of its rolling window."""
        if self.window is None:
            return {}
        return {"attention_window": self.window.window, "attention_sinks": self.window.sinks}


@dataclass(frozen=True)
class Run:
    """The results of some requests on one engine."""

    token_ids: list[list[int]]
    logits: torch.Tensor  # [num_requests, tokens made, vocab]
    max_adapters_in_a_step: int


def pair(out_features: int, in_features: int, rank: int, seed: int, scale: float = 1.0) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    A = 0.3 * torch.randn(rank, in_features, generator=generator)
    return LoraPair(A, 0.3 * torch.randn(out_features, rank, generator=generator), scale)


def weights(
    digest: str, rank: int, seed: int, targets: Sequence[str] = tuple(SHAPES), num_layers: int = 1, scale: float = 1.0
) -> AdapterWeights:
    """A random adapter of the base of `make_base`."""
    return AdapterWeights(
        digest,
        {
            (layer, target): pair(*SHAPES[target], rank, 100 * seed + 10 * layer + number, scale)
            for layer in range(num_layers)
            for number, target in enumerate(targets)
        },
    )


def engine_of(base: Path, source: AdapterSource, **options: Any) -> EngineDriver:
    """Returns an engine in fp32, unless `options` say otherwise."""
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
    return EngineDriver(build_engine(EngineConfig(model=base, **settings), lambda _: source, costs=load_always()))


def run(driver: EngineDriver, adapters: Sequence[str], requests: Sequence[Request], max_tokens: int = 2) -> Run:
    """Loads the adapters, then submits all requests at once and runs them to their end."""
    driver.engine.adapters.want([(name,) for name in adapters])
    while any(not driver.engine.adapters.is_ready(name) for name in adapters):
        driver.loop.take(driver.loop.inbox.get(timeout=60))
        driver.engine.adapters.want([(name,) for name in adapters])
    recorder = RecordingRunner(driver)
    driver.loop.steps.runner = recorder
    random, earlier = Random(7), set(driver.outcomes)
    outcomes = [
        driver.submit(
            random_prompt(random, one.prompt_tokens),
            adapters=one.uses,
            max_tokens=max_tokens,
            ignore_eos=True,
            **one.options,
        )
        for one in requests
    ]
    driver.finish()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert not errors, errors
    by_id: dict[str, list[torch.Tensor]] = {
        request_id: [] for request_id in driver.outcomes if request_id not in earlier
    }
    for piece, row in recorder.rows:
        by_id[piece.request_id].append(row.cpu())
    return Run(
        [outcome.token_ids for outcome in outcomes],
        torch.stack([torch.stack(rows) for rows in by_id.values()]),
        driver.loop.stats().max_adapters_in_a_step,
    )
