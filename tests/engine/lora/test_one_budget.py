"""Tests of KV and adapters in one memory: each is evicted for the other within bounds, and no token changes."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.messages import ForgetAdapter
from graftwork.platform.clock import ManualClock
from graftwork.platform.errors import ValidationFailed
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.lora.test_lifecycle import CountingAdapterSource, random_adapter
from tests.engine.random_models import make_base
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.tagged_kv_cache import load_always

PAGE, FRAME, CONTEXT = 16, 4096, 16
"""Tokens of a page, bytes of its frame, and pages of one context."""
RANK_8, RANK_24 = 8, 23
"""Frames of an adapter of that rank."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("one-budget") / "base")


def engine(
    base: Path, source: CountingAdapterSource, frames: int, clock: ManualClock | None = None, **options: Any
) -> EngineDriver:
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": PAGE, "kv_reserve_share": 0.0} | options
    config = EngineConfig(model=base, device_bytes=frames * FRAME, **settings)
    return EngineDriver(build_engine(config, lambda _: source, clock=clock, costs=load_always()))


def source_of(names: str, rank: int = 8) -> CountingAdapterSource:
    return CountingAdapterSource({name: random_adapter(name, rank, ord(name)) for name in names})


def tokens_alone(base: Path, source: CountingAdapterSource, prompt: list[int], **options: Any) -> list[int]:
    """Returns the tokens of one request on an engine with ample room."""
    return engine(base, source, 1000).run(prompt, **options).token_ids


def run_turn(driver: EngineDriver, session: str, prompt: list[int]) -> Outcome:
    """Runs a turn of a session, whose pages are then on the host too."""
    outcome = driver.run(prompt, session=SessionUse(SessionKey(session), 0), max_tokens=2, ignore_eos=True)
    driver.command(SessionVerb.HOLD, session, prompt + outcome.token_ids)
    return outcome


def test_long_sessions_and_crowds_of_adapters_push_each_other_out_by_age(base: Path) -> None:
    """Sessions evict the oldest adapters down to the floor, adapters evict them in turn, and the sessions are found
    on the host."""
    source = source_of("abcdef")
    driver = engine(base, source, 80, lora_floor_share=0.25)
    prompts = [random_prompt(Random(seed), 200) for seed in range(6)]
    driver.warm(*"abcdef")
    crowded = driver.loop.stats().resident_adapters

    first = [run_turn(driver, f"s{number}", prompt) for number, prompt in enumerate(prompts)]
    left = driver.loop.stats().resident_adapters
    driver.warm(*"abcdef")
    again = run_turn(driver, "s0", prompts[0])

    assert crowded == tuple("abcdef")
    assert left == tuple("def")  # 24 frames; two would be 16, and the floor is 20
    assert driver.loop.stats().resident_adapters[-1] == "f"
    assert again.cache is not None
    assert again.cache.host_tokens > 0
    assert again.cache.recomputed_tokens <= PAGE
    assert (
        again.token_ids == first[0].token_ids == tokens_alone(base, source, prompts[0], max_tokens=2, ignore_eos=True)
    )


def test_a_running_request_goes_on_while_its_pages_are_moved(base: Path) -> None:
    """A running request makes the same tokens while its pages are moved to make a run of frames for an adapter."""
    source = source_of("a", rank=24)
    driver = engine(base, source, 40, max_batch_tokens=256)
    before, prompt = random_prompt(Random(1), 220), random_prompt(Random(2), 60)
    driver.run(before, session=SessionUse(SessionKey("before"), 0), max_tokens=1)
    running = driver.submit(prompt, max_tokens=150, ignore_eos=True)
    while len(running.token_ids) < 20:
        driver.step()
    driver.command(SessionVerb.CLOSE, "before", before)
    moved = driver.engine.frame_allocator.num_relocated_pages

    grafted = driver.submit([5, 6, 7], adapter="a", max_tokens=20, ignore_eos=True)
    driver.finish()

    assert moved == 0
    assert driver.engine.frame_allocator.num_relocated_pages > 0
    assert running.token_ids == tokens_alone(base, source, prompt, max_tokens=150, ignore_eos=True)
    assert grafted.token_ids == tokens_alone(base, source, [5, 6, 7], adapter="a", max_tokens=20, ignore_eos=True)


def test_adapters_in_use_are_slid_together_for_one_that_finds_no_run(base: Path) -> None:
    """Adapters in use are moved together for a large adapter, and all requests make the tokens that they make alone."""
    source = source_of("abcdef")
    source.weights["g"] = random_adapter("g", 24, 7)
    driver = engine(base, source, 70)
    driver.warm(*"abcdef")
    long: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    running = {name: driver.submit([7, 8, 9], adapter=name, **long) for name in "acf"}
    while min(len(outcome.token_ids) for outcome in running.values()) < 5:
        driver.step()
    for name in "bde":
        driver.loop.take(ForgetAdapter(name))

    running["g"] = driver.submit([7, 8, 9], adapter="g", **long)
    driver.finish()

    assert driver.engine.frame_allocator.num_moved_runs == 2
    told = {name: outcome.token_ids for name, outcome in running.items()}
    assert told == {name: tokens_alone(base, source, [7, 8, 9], adapter=name, **long) for name in "acfg"}


def test_a_small_device_says_what_a_large_one_says(base: Path) -> None:
    """On a device with room for a few adapters and sessions, every answer equals that of a large device."""
    random = Random(5)
    ranks = {name: random.choice((3, 8, 16, 24)) for name in "abcdefghij"}
    source = CountingAdapterSource({name: random_adapter(name, rank, ord(name)) for name, rank in ranks.items()})
    small, large = engine(base, source, 75), engine(base, source, 2000)
    tails: dict[str, list[int]] = {}
    for _ in range(40):
        turns: list[tuple[str, str | None, list[int]]] = []
        for session in random.sample("stuvwxyz", 3):
            adapter = random.choice([*ranks, None])
            history = tails.get(session, [])
            prompt = (history if len(history) < 180 else []) + random_prompt(random, random.randrange(10, 50))
            turns.append((session, adapter, prompt))
        outcomes = []
        for driver in (small, large):
            told = [
                driver.submit(
                    prompt, adapter=adapter, session=SessionUse(SessionKey(session), 0), max_tokens=12, ignore_eos=True
                )
                for session, adapter, prompt in turns
            ]
            driver.finish()
            for (session, adapter, prompt), outcome in zip(turns, told, strict=True):
                driver.command_now(SessionVerb.HOLD, session, prompt + outcome.token_ids, adapter=adapter)
            outcomes.append([outcome.token_ids for outcome in told])
        assert outcomes[0] == outcomes[1]
        tails |= {turn[0]: turn[2] + tokens for turn, tokens in zip(turns, outcomes[0], strict=True)}

    assert small.engine.frame_allocator.num_relocated_pages > 0
    assert small.loop.stats().adapter_loads >= len(ranks)
    assert len(small.loop.stats().resident_adapters) < len(ranks) == len(large.loop.stats().resident_adapters)
    small.loop.check_integrity()


def test_a_flood_of_base_requests_does_not_keep_an_adapter_out(base: Path) -> None:
    """While base requests keep the device full, an adapter that has waited for its patience gets its room first."""
    clock, source = ManualClock(), source_of("a", rank=24)
    options: dict[str, Any] = {"lora_floor_share": 0.0, "host_kv_bytes": 0, "max_running": 16}
    driver = engine(base, source, CONTEXT + RANK_24, clock, **options)
    driver.warm("a")
    flood = [
        driver.submit(random_prompt(Random(n), 30), domain=b"%d" % n, max_tokens=20 + 7 * (n % 5), ignore_eos=True)
        for n in range(80)
    ]
    while driver.loop.stats().resident_adapters:
        driver.step()
        clock.advance(0.05)

    cold = driver.submit([5, 6, 7], adapter="a", ignore_eos=True)
    begun = sum(bool(outcome.token_ids) for outcome in flood)
    while not driver.loop.stats().resident_adapters:
        driver.step()
        clock.advance(0.05)

    assert sum(bool(outcome.token_ids) for outcome in flood) <= begun + 2
    driver.finish()
    assert all(outcome.finish is not None for outcome in flood)
    assert cold.token_ids == tokens_alone(base, source, [5, 6, 7], adapter="a", ignore_eos=True)


def test_an_adapter_that_could_never_fit_says_what_would_hold_it(base: Path) -> None:
    """The error for an adapter that can never fit names the setting and the least bytes with which it is served."""
    source = source_of("a", rank=24)
    options: dict[str, Any] = {"kv_reserve_share": 0.5}
    refused = engine(base, source, CONTEXT + 4, **options).run([5, 6], adapter="a")
    assert isinstance(refused.error, ValidationFailed)
    needed = int(refused.error.message.split("device_bytes of at least ")[1].split(" ")[0].rstrip("."))

    enough = engine(base, source, needed // FRAME, **options).run([5, 6], adapter="a")
    less = engine(base, source, needed // FRAME - 1, **options).run([5, 6], adapter="a")

    assert enough.finish is not None
    assert isinstance(less.error, ValidationFailed)
