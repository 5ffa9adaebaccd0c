"""Engines that share a folder of KV files: sessions that move, and erasure."""

from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.kv.disk.shared import SharedStore
from graftwork.engine.messages import ForgetDomain
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome

FIRST = [5 + n % 50 for n in range(41)]
SECOND = [9, 8, 7, 6, 5, 4, 3]


def shared_engine(models: RandomModels, folder: Path, **options: Any) -> EngineDriver:
    return models.engine(disk_kv_bytes=2**22, shared_kv_folder=folder, **options)


def store_of(driver: EngineDriver) -> SharedStore:
    disk = driver.engine.kv_cache.page_store.disk
    assert isinstance(disk, SharedStore)
    return disk


def turn(driver: EngineDriver, prompt: list[int], num_history: int, **options: Any) -> Outcome:
    use = SessionUse(SessionKey("s"), num_history)
    return driver.run(prompt, session=use, max_tokens=9, ignore_eos=True, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [None, "sha256:wide"])
def test_a_session_that_moves_finds_its_pages(
    models: RandomModels, tmp_path: Path, dtype: str, adapter: str | None
) -> None:
    """The next turn on another engine reads the pages that the first one has stored, and has the same tokens; so has one
    after the first engine is gone.
    """
    first, second = (shared_engine(models, tmp_path, dtype=dtype) for _ in range(2))
    history = FIRST + turn(first, FIRST, 0, adapter=adapter).token_ids
    first.command(SessionVerb.SUSPEND, "s", history, adapter=adapter)
    store_of(second).refresh()

    moved = turn(second, history + SECOND, len(history), adapter=adapter)
    stayed = turn(first, history + SECOND, len(history), adapter=adapter)
    first.close()
    third = shared_engine(models, tmp_path, dtype=dtype)
    afterwards = turn(third, history + SECOND, len(history), adapter=adapter)

    assert moved.token_ids == stayed.token_ids == afterwards.token_ids
    assert moved.cache is not None
    assert afterwards.cache is not None
    assert moved.cache.disk_tokens == len(history) // 4 * 4
    assert afterwards.cache.disk_tokens >= len(history) // 4 * 4
    assert store_of(third).num_pages > 0
    for driver in (second, third):
        driver.loop.check_integrity()
        driver.close()


def test_another_model_dtype_finds_nothing(models: RandomModels, tmp_path: Path) -> None:
    """An engine with another dtype shares the folder and none of the pages."""
    first, second = shared_engine(models, tmp_path), shared_engine(models, tmp_path, dtype="bfloat16")
    history = FIRST + turn(first, FIRST, 0).token_ids
    first.command(SessionVerb.SUSPEND, "s", history)
    store_of(second).refresh()

    moved = turn(second, history + SECOND, len(history))

    assert moved.cache is not None
    assert moved.cache.cached_tokens == 0
    for driver in (first, second):
        driver.close()


def test_an_erased_domain_is_in_no_file(models: RandomModels, tmp_path: Path) -> None:
    """When one engine forgets a domain, its files are gone from the folders of all, and other domains keep theirs."""
    first, second = (shared_engine(models, tmp_path) for _ in range(2))
    for domain in (b"goes", b"stays"):
        history = FIRST + turn(first, FIRST, 0, domain=domain).token_ids
        first.command(SessionVerb.SUSPEND, "s", history, domain=domain)
    store_of(second).refresh()
    before = len(list(tmp_path.glob("*/slot-*/*.kvpages")))

    second.loop.take(ForgetDomain(IsolationDomain(b"goes")))
    second.close()

    after = len(list(tmp_path.glob("*/slot-*/*.kvpages")))
    assert 0 < after < before
    kept = first.command(SessionVerb.READ, "s", FIRST, domain=b"stays")
    assert kept.missing_tokens < len(FIRST)
    first.close()


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"disk_kv_bytes": 0}])
def test_a_shared_folder_that_cannot_work_is_refused(
    models: RandomModels, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The refusal names the flag."""
    with pytest.raises(InvalidRequest, match="--shared-kv-dir") as refusal:
        models.engine(**({"disk_kv_bytes": 2**22, "shared_kv_folder": tmp_path} | options))

    assert refusal.value.param == "shared_kv_dir"
