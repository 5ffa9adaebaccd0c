"""Tests that a draft head changes no token: engines with and without one over the same requests."""

from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.messages import ForgetDomain
from graftwork.platform.clock import ManualClock
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.demo_engines import DEMO, DemoEngines
from tests.engine.draft_head.test_head_drafter import head_of
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.speculative.test_equal_tokens import open_engine, verifying_all
from tests.engine.speculative.test_equal_with_model import check_answers, requests_of_all_kinds, serve


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kv_bytes", [400_000, 30_000])
def test_a_draft_head_changes_no_answer(
    deep: RandomModels, head: Path, small_head: Path, kv_bytes: int, overlaps: bool
) -> None:
    """Requests of all kinds, with adapters and without, have the same tokens, ends and log probabilities. Some are
    preempted, some are cancelled, and the head has room for all their texts or for few."""
    requests = [one | {"adapter": one["adapter"] and "sha256:deep"} for one in requests_of_all_kinds(30)]
    sizes: dict[str, Any] = {"max_batch_tokens": 40, "max_running": 5, "host_kv_bytes": 2**21, "kernels": "torch"}
    sizes["device_bytes"] = 3 * 2**20
    plain = open_engine(deep, 0, **sizes)
    folder = small_head if overlaps else head
    drafted = open_engine(
        deep, 6, draft_head=folder, draft_kv_bytes=kv_bytes, overlap_steps=overlaps, draft_cache_bytes=0, **sizes
    )

    expected, found = serve(plain, requests), serve(drafted, requests)

    check_answers(expected, found)
    stats = drafted.loop.stats()
    assert stats.preemptions > 0
    assert stats.model_rejected_drafts > 15
    drafted.loop.take(ForgetDomain(IsolationDomain(b"1")))
    drafted.loop.check_integrity()
    assert not head_of(drafted).num_texts


def demo_engine(engines: DemoEngines, **options: Any) -> EngineDriver:
    """An engine over the demo's model that believes rows and guesses to cost nothing, and verifies all that it can."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "device_bytes": 64 * 2**20, "page_tokens": 16}
    config = EngineConfig(model=DEMO / "model", **settings | options)
    return verifying_all(EngineDriver(build_engine(config, engines.source, ManualClock())))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_trained_head_saves_steps_and_changes_no_token(tmp_path: Path, temperature: float) -> None:
    """The demo's head, on the base and on an adapter that it has never seen: the same tokens, greedy and sampled. On the
    base it gives more than a third of the tokens, and steps are saved on both."""
    engines = DemoEngines(tmp_path)
    plain = demo_engine(engines, max_draft_tokens=0)
    drafted = demo_engine(engines, max_draft_tokens=6, draft_head=DEMO / "head", draft_from_texts=False)
    jobs: list[dict[str, Any]] = [
        {"prompt": prompt, "adapter": engines.digests[job], "temperature": temperature, "seed": 5, "max_tokens": 60}
        for job in ("base", "pirate")
        for prompt in engines.prompts(job, 4)
    ]

    outcomes: list[list[Outcome]] = []
    for driver in (plain, drafted):
        driver.warm(*engines.digests.values())
        outcomes.append([driver.run(**job) for job in jobs])

    assert [one.token_ids for one in outcomes[0]] == [one.token_ids for one in outcomes[1]]
    on_base = outcomes[1][:4]
    guessed = sum(one.drafts.accepted_tokens for one in on_base)
    assert guessed > sum(len(one.token_ids) for one in on_base) / 3
    assert drafted.loop.stats().steps < plain.loop.stats().steps
