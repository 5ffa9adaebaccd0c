"""Tests of adapters that are loaded, evicted, reloaded and unloaded while requests use them."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.engine.messages import ForgetAdapter
from graftwork.platform.errors import InvalidRequest, NotFound
from tests.engine.engine_driver import EngineDriver
from tests.engine.random_models import make_base
from tests.engine.runner.test_decoder_parity import random_prompt

RANKS = (1, 3, 8, 12, 16, 24)
SHAPES = {
    "q_proj": (32, 32),
    "k_proj": (16, 32),
    "v_proj": (16, 32),
    "o_proj": (32, 32),
    "gate_proj": (56, 32),
    "up_proj": (56, 32),
    "down_proj": (32, 56),
}


def random_adapter(digest: str, rank: int, seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.3 * torch.randn(rows, columns, generator=generator)

    pairs = {
        (layer, target): LoraPair(matrix(rank, shape[1]), matrix(shape[0], rank), 1.0)
        for layer in range(2)
        for target, shape in SHAPES.items()
    }
    return AdapterWeights(digest, pairs)


class CountingAdapterSource:
    """An AdapterSource that counts its reads."""

    def __init__(self, weights: Mapping[str, AdapterWeights]) -> None:
        self.weights = dict(weights)
        self.loads: list[str] = []

    def load(self, digest: str) -> AdapterWeights:
        self.loads.append(digest)
        if digest not in self.weights:
            raise NotFound(f"There is no adapter {digest}.")
        return self.weights[digest]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("lifecycle") / "base")


def engine(base: Path, source: CountingAdapterSource, **options: Any) -> EngineDriver:
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
    return EngineDriver(build_engine(EngineConfig(model=base, **settings), lambda _: source))


def bytes_of(base: Path, rank: int) -> int:
    """What one adapter of this rank occupies."""
    driver = engine(base, CountingAdapterSource({"a": random_adapter("a", rank, 0)}))
    driver.run([2, 3], adapter="a")
    return driver.loop.stats().lora_pool_bytes


def test_an_adapter_that_was_evicted_and_loaded_again_finds_its_cached_prefix(base: Path) -> None:
    """An adapter that was evicted and loaded again finds its cached KV, because its digest is the same."""
    source = CountingAdapterSource({name: random_adapter(name, 8, seed) for seed, name in enumerate(("a", "b"))})
    room = bytes_of(base, 8)
    driver = engine(base, source, lora_pool_bytes=room, lora_host_bytes=room)
    prompt = random_prompt(Random(4), 30)
    cold = driver.run(prompt, adapter="a")
    driver.run(prompt, adapter="b")
    assert driver.loop.stats().resident_adapters == ("b",)

    warm = driver.run(prompt, adapter="a")

    assert source.loads == ["a", "b", "a"]
    assert warm.token_ids == cold.token_ids
    assert warm.cache is not None
    assert (warm.cache.device_tokens, warm.cache.recomputed_tokens) == (28, 2)


def test_unloading_lets_running_requests_finish_and_then_frees_the_bytes(base: Path) -> None:
    """After an unload a running request makes the same tokens as without it, and a new request needs a fresh load."""
    source = CountingAdapterSource({"a": random_adapter("a", 8, 1)})
    alone = engine(base, source).run([5, 6, 7], adapter="a", max_tokens=12, ignore_eos=True)
    driver = engine(base, source)
    running = driver.submit([5, 6, 7], adapter="a", max_tokens=12, ignore_eos=True)
    while len(running.token_ids) < 4:
        driver.step()

    del source.weights["a"]
    driver.loop.take(ForgetAdapter("a"))
    assert driver.loop.stats().resident_adapters == ("a",)
    late = driver.submit([5, 6, 7], adapter="a", domain=b"late")
    driver.finish()

    assert running.token_ids == alone.token_ids
    assert isinstance(late.error, NotFound)
    stats = driver.loop.stats()
    assert (stats.resident_adapters, stats.lora_pool_bytes) == ((), 0)


def test_a_hundred_first_uses_read_an_adapter_once(base: Path) -> None:
    """A hundred requests that wait for one adapter cause one read and are all served."""
    source = CountingAdapterSource({"a": random_adapter("a", 8, 1)})
    driver = engine(base, source)

    outcomes = [driver.submit([number % 90 + 2, 5], adapter="a", max_tokens=2) for number in range(100)]
    driver.finish()

    assert all(outcome.finish is not None for outcome in outcomes)
    assert source.loads == ["a"]


def test_a_mixture_that_can_never_fit_is_refused_and_one_that_fits_exactly_is_served(base: Path) -> None:
    """In a pool of two adapters a mixture of two is served, and one of three is refused with both numbers."""
    source = CountingAdapterSource({name: random_adapter(name, 8, seed) for seed, name in enumerate("abcd")})
    room = 2 * bytes_of(base, 8)
    driver = engine(base, source, lora_pool_bytes=room)
    driver.run([4, 5], adapter="d")
    halves = tuple(AdapterUse(name, 0.5) for name in "ab")

    fits = driver.submit([5, 6, 7], adapters=halves)
    other = driver.submit([5, 6, 7], adapter="d")
    large = driver.submit([5, 6, 7], adapters=(*halves, AdapterUse("c", 0.5)))
    driver.finish()

    assert fits.finish is not None
    assert other.finish is not None
    assert isinstance(large.error, InvalidRequest)
    assert str(room) in large.error.message


def test_a_bad_adapter_ends_its_own_requests_alone(base: Path) -> None:
    """Requests of an adapter that is not found get a typed error, and the others get their tokens."""
    source = CountingAdapterSource({"a": random_adapter("a", 8, 1)})
    driver = engine(base, source)

    outcomes = [driver.submit([5, 6], adapter=name) for name in ("a", "missing", "a", None)]
    driver.finish()

    assert [type(outcome.error) for outcome in outcomes] == [type(None), NotFound, type(None), type(None)]


def test_three_hundred_adapters_in_a_pool_for_forty(base: Path) -> None:
    """With 300 adapters of mixed rank in a pool for 40, every request gets the tokens that it gets alone."""
    names = [f"adapter-{number:03}" for number in range(300)]
    source = CountingAdapterSource(
        {name: random_adapter(name, RANKS[number % 6], number) for number, name in enumerate(names)}
    )
    mean = sum(bytes_of(base, rank) for rank in RANKS) // len(RANKS)
    pool = 40 * mean
    driver = engine(base, source, lora_pool_bytes=pool, lora_host_bytes=120 * mean, max_running=24, max_waiting=1000)
    random = Random(8)
    weights = [1 / (rank + 1) for rank in range(300)]
    wanted = [*random.choices(names, weights, k=300), *random.sample(names, 100)]
    requests = [(name, random_prompt(random, random.randrange(1, 12))) for name in wanted]

    outcomes = []
    for number, (name, prompt) in enumerate(requests):  # a flood: two arrive in every step
        outcomes.append(driver.submit(prompt, adapter=name, max_tokens=4, ignore_eos=True))
        if number % 2:
            driver.step()
            assert driver.loop.stats().lora_pool_bytes <= pool
    driver.finish()

    assert all(outcome.finish is not None for outcome in outcomes)
    assert len(driver.loop.stats().resident_adapters) >= 25
    alone = engine(base, source, max_running=1, lora_pool_bytes=400 * mean)
    for number in random.sample(range(len(requests)), 40):
        name, prompt = requests[number]
        expected = alone.run(prompt, adapter=name, max_tokens=4, ignore_eos=True, domain=str(number).encode())
        assert outcomes[number].token_ids == expected.token_ids, name
