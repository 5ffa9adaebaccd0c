"""Tests that memory on all ranks follows rank 0: tiers of KV, adapters in frames, files."""

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.session_commands import SessionVerb, ToolWait
from graftwork.engine.messages import ForgetAdapter, ForgetDomain
from graftwork.platform.ids import IsolationDomain
from tests.engine.attention.streaming_llama import StreamingLlama
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import Outcome
from tests.engine.kv.test_tiers import SECOND, SMALLEST, first_turn, second_turn
from tests.engine.runner.test_decoder_parity import random_prompt

FRAME_BYTES = 2 * 2 * 4 * 8 * 4
"""Bytes of a page of one rank: keys and values of two layers, four tokens and one head of eight features, in fp32."""
NUM_FRAMES = 124
"""Frames with room for one context, 64, and for one large adapter or several small ones."""


@pytest.mark.parametrize("overlap_loads", [False, True])
@pytest.mark.parametrize("adapter", [None, "sha256:wide"])
def test_a_session_goes_through_all_tiers_of_two_ranks(
    models: RandomModels, tmp_path: Path, adapter: str | None, overlap_loads: bool
) -> None:
    """The second turn has one rank's tokens from the device, the host, and the files of ended ranks."""
    plain = models.engine()
    history = first_turn(plain, adapter)
    expected = second_turn(plain, history, adapter).token_ids
    options: dict[str, Any] = {
        "tensor_parallel": 2,
        "disk_kv_bytes": 2**23,
        "kv_folder": tmp_path,
        "overlap_loads": overlap_loads,
    }
    driver = models.engine(**options)

    assert first_turn(driver, adapter) == history
    driver.command(SessionVerb.HOLD, "s", history, ToolWait("search"), adapter=adapter)
    warm = second_turn(driver, history, adapter)
    head = history + SECOND + warm.token_ids
    driver.command(SessionVerb.SUSPEND, "s", head, adapter=adapter)
    driver.poison_unused_pages()
    from_host = second_turn(driver, history, adapter)
    driver.close()
    restarted = models.engine(**options)
    from_disk = second_turn(restarted, history, adapter)
    restarted.close()

    assert warm.token_ids == from_host.token_ids == from_disk.token_ids == expected
    reports = [outcome.cache for outcome in (warm, from_host, from_disk)]
    assert [report.device_tokens for report in reports if report] == [48, 0, 0]
    assert [report.host_tokens for report in reports if report] == [0, 56, 0]
    assert [report.disk_tokens for report in reports if report] == [0, 0, 56]


def test_a_session_with_a_rolling_window_goes_through_all_tiers_of_two_ranks(
    models: RandomModels, tmp_path: Path
) -> None:
    """Its pages roll by on both ranks, and its turns have the tokens of StreamingLLM from the device, the host, and the files of
    ended ranks."""
    options: dict[str, Any] = {
        "tensor_parallel": 2,
        "disk_kv_bytes": 2**23,
        "kv_folder": tmp_path,
        "max_batch_tokens": 16,
        "max_draft_tokens": 0,
    }
    asked: dict[str, Any] = {"attention_window": 9, "attention_sinks": 5, "max_tokens": 6, "ignore_eos": True}
    window, random = RollingWindow(5, 9), Random(4)
    driver = models.engine(**options)
    text = random_prompt(random, 90)

    for tier in (None, "host", "disk"):
        use = SessionUse(SessionKey("s"), 0 if tier is None else len(text) - 3)
        found = driver.run(text, session=use, **asked)
        model = StreamingLlama(models.references[None], window.sinks, window.window)
        answer = model.logits([*text, *found.token_ids])[len(text) - 1 : -1].argmax(-1).tolist()
        assert found.token_ids == answer, tier
        if tier is not None:
            assert found.cache is not None
            assert getattr(found.cache, f"{tier}_tokens") > 80
        text += found.token_ids
        driver.command(SessionVerb.SUSPEND, "s", text, window=window)
        driver.poison_unused_pages()
        text += random_prompt(random, 3)
        if tier == "host":
            driver.close()
            driver = models.engine(**options)
    driver.close()


def test_pages_that_one_rank_has_lost_are_computed_again(models: RandomModels, tmp_path: Path) -> None:
    """If the files of rank 1 are gone, the answer is the same, and nothing is read from the disk of rank 0."""
    options: dict[str, Any] = {"tensor_parallel": 2, "disk_kv_bytes": 2**23, "kv_folder": tmp_path}
    driver = models.engine(**options)
    history = first_turn(driver, None)
    expected = second_turn(driver, history, None).token_ids
    driver.command(SessionVerb.SUSPEND, "s", history)
    driver.close()
    shutil.rmtree(tmp_path / "rank-1-of-2")

    restarted = models.engine(**options)
    outcome = second_turn(restarted, history, None)

    assert outcome.token_ids == expected
    assert outcome.cache is not None
    assert outcome.cache.disk_tokens == 0
    restarted.close()


def test_metrics_count_the_disks_of_all_ranks(models: RandomModels, tmp_path: Path) -> None:
    """The bytes are those of both folders, and files of rank 1 that are damaged are counted and computed again."""
    options: dict[str, Any] = {"tensor_parallel": 2, "disk_kv_bytes": 2**23, "kv_folder": tmp_path}
    driver = models.engine(**options)
    history = first_turn(driver, None)
    expected = second_turn(driver, history, None).token_ids
    driver.command(SessionVerb.SUSPEND, "s", history)
    folders = [tmp_path / f"rank-{rank}-of-2" for rank in range(2)]
    sizes = [sum(file.stat().st_size for file in folder.glob("*") if ".kv" in file.name) for folder in folders]
    stored = driver.loop.stats()
    driver.close()
    for file in folders[1].glob("*.kv*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    restarted = models.engine(**options)
    outcome = second_turn(restarted, history, None)
    restarted.rest()
    stats = restarted.loop.stats()
    restarted.close()

    assert sizes[1] > 0
    assert stored.disk_bytes == sum(sizes)
    assert outcome.token_ids == expected
    assert stats.disk_corrupt_files >= 1


def test_a_forgotten_domain_leaves_no_file_on_any_rank(models: RandomModels, tmp_path: Path) -> None:
    """After the only tenant is forgotten, the folders of both ranks are empty."""
    driver = models.engine(tensor_parallel=2, disk_kv_bytes=2**23, kv_folder=tmp_path)
    history = first_turn(driver, None)
    driver.command(SessionVerb.SUSPEND, "s", history)
    folders = [tmp_path / f"rank-{rank}-of-2" for rank in range(2)]
    before = [len(list(folder.glob("*"))) for folder in folders]

    driver.loop.take(ForgetDomain(IsolationDomain(b"tenant")))
    driver.close()

    assert all(before)
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_requests_that_outgrow_the_device_are_offloaded_on_all_ranks(models: RandomModels) -> None:
    """With room for one context, three long answers at once are preempted in turn, and are the same as each alone."""
    prompts = [random_prompt(Random(seed), 30) for seed in range(3)]
    alone = [models.engine().run(prompt, max_tokens=90, ignore_eos=True).token_ids for prompt in prompts]
    driver = models.engine(tensor_parallel=2, device_bytes=SMALLEST // 2 + 2**11, host_kv_bytes=2**22)

    outcomes = [
        driver.submit(prompt, max_tokens=90, ignore_eos=True, domain=bytes([number]))
        for number, prompt in enumerate(prompts)
    ]
    driver.finish()

    assert [outcome.token_ids for outcome in outcomes] == alone
    assert driver.loop.stats().preemptions > 0
    driver.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adapters_come_go_and_move_on_all_ranks(models: RandomModels, num_ranks: int) -> None:
    """On a device with room for few adapters, adapters and pages are evicted and moved between long answers, and each
    answer is that of an engine with ample room."""
    digests = [None, "sha256:wide", "sha256:narrow", "sha256:rooted"]
    random = Random(4)
    asked = [(random.choice(digests), random_prompt(random, random.randrange(5, 60))) for _ in range(24)]
    ample = models.engine()
    expected = [ample.run(prompt, adapter=digest, max_tokens=6, ignore_eos=True).token_ids for digest, prompt in asked]
    driver = models.engine(
        tensor_parallel=num_ranks, device_bytes=NUM_FRAMES * FRAME_BYTES, kv_reserve_share=0.0, lora_host_bytes=60_000
    )

    outcomes: list[Outcome] = []
    for index, (digest, prompt) in enumerate(asked):
        outcomes.append(driver.submit(prompt, adapter=digest, max_tokens=6, ignore_eos=True))
        if index % 3 == 2:
            driver.finish()
            driver.loop.check_integrity()
        if index == 12:
            driver.loop.take(ForgetAdapter("sha256:wide"))

    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert [outcome.token_ids for outcome in outcomes] == expected
    allocator = driver.engine.frame_allocator
    assert driver.loop.stats().adapter_loads > 3
    assert allocator.num_relocated_pages > 0
    driver.close()
