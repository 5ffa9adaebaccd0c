"""Engines that share KV files in a folder or in a bucket: sessions that move, and erasure."""

from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.build.calibration import measure_disk
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.kv.disk.object_pages import ObjectPages
from graftwork.engine.kv.disk.shared import SharedStore
from graftwork.engine.kv.index.cost_model import TransferCost
from graftwork.engine.messages import ForgetDomain
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome

FIRST = [5 + n % 50 for n in range(41)]
SECOND = [9, 8, 7, 6, 5, 4, 3]


def shared_engine(models: RandomModels, folder: Path, **options: Any) -> EngineDriver:
    return models.engine(disk_kv_bytes=2**22, shared_kv_folder=folder, **options)


def bucket_engine(models: RandomModels, folder: Path, **options: Any) -> EngineDriver:
    """An engine with a folder of its own and a bucket, which is a folder, too."""
    own = folder / f"own-{len(list(folder.glob('own-*')))}"
    own.mkdir()
    bucket = {"kv_object_url": f"file://{folder / 'bucket'}", "kv_object_bytes": 2**22}
    return models.engine(disk_kv_bytes=2**22, kv_folder=own, **bucket, **options)


KINDS = {"folder": shared_engine, "bucket": bucket_engine}


def store_of(driver: EngineDriver) -> SharedStore:
    disk = driver.engine.kv_cache.page_store.disk
    assert isinstance(disk, SharedStore)
    return disk


def show(writer: EngineDriver, reader: EngineDriver) -> None:
    """Lets one engine find all pages that another has stored."""
    peers = store_of(writer).peers
    if isinstance(peers, ObjectPages):
        peers.flush()
    store_of(reader).refresh()


def turn(driver: EngineDriver, prompt: list[int], num_history: int, **options: Any) -> Outcome:
    use = SessionUse(SessionKey("s"), num_history)
    return driver.run(prompt, session=use, max_tokens=9, ignore_eos=True, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [None, "sha256:wide"])
def test_a_session_that_moves_finds_its_pages(
    models: RandomModels, tmp_path: Path, dtype: str, adapter: str | None, kind: str
) -> None:
    """The next turn on another engine reads the pages that the first one has stored, and has the same tokens; so has one
    after the first engine is gone.
    """
    first, second = (KINDS[kind](models, tmp_path, dtype=dtype) for _ in range(2))
    history = FIRST + turn(first, FIRST, 0, adapter=adapter).token_ids
    first.command(SessionVerb.SUSPEND, "s", history, adapter=adapter)
    show(first, second)

    moved = turn(second, history + SECOND, len(history), adapter=adapter)
    stayed = turn(first, history + SECOND, len(history), adapter=adapter)
    first.close()
    third = KINDS[kind](models, tmp_path, dtype=dtype)
    store_of(third).refresh()
    afterwards = turn(third, history + SECOND, len(history), adapter=adapter)

    assert moved.token_ids == stayed.token_ids == afterwards.token_ids
    assert moved.cache is not None
    assert afterwards.cache is not None
    assert moved.cache.disk_tokens == len(history) // 4 * 4
    assert afterwards.cache.disk_tokens >= len(history) // 4 * 4
    assert store_of(third).num_pages > 0 or kind == "bucket"
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_erased_domain_is_in_no_file(models: RandomModels, tmp_path: Path, kind: str) -> None:
    """When one engine forgets a domain, its files are gone where all engines read, and other domains keep theirs."""
    first, second = (KINDS[kind](models, tmp_path) for _ in range(2))
    pattern = {"folder": "*/slot-*/*.kvpages", "bucket": "bucket/*/*/*.kvpages"}[kind]
    for domain in (b"goes", b"stays"):
        history = FIRST + turn(first, FIRST, 0, domain=domain).token_ids
        first.command(SessionVerb.SUSPEND, "s", history, domain=domain)
    show(first, second)
    before = len(list(tmp_path.glob(pattern)))

    second.loop.take(ForgetDomain(IsolationDomain(b"goes")))
    second.close()

    after = len(list(tmp_path.glob(pattern)))
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


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"disk_kv_bytes": 0}, {"shared_kv_folder": Path("kv")}])
def test_a_bucket_that_cannot_work_is_refused(models: RandomModels, tmp_path: Path, options: dict[str, Any]) -> None:
    """The refusal names both flags."""
    url = f"file://{tmp_path}/bucket"
    with pytest.raises(InvalidRequest, match="--kv-object-url does not work with --") as refusal:
        models.engine(**({"disk_kv_bytes": 2**22, "kv_folder": tmp_path, "kv_object_url": url} | options))

    assert refusal.value.param == "kv_object_url"


def test_an_engine_says_what_is_in_its_bucket(models: RandomModels, tmp_path: Path) -> None:
    """The figures of an engine count the pages that it has written to the bucket and read from it."""
    first, second = (bucket_engine(models, tmp_path) for _ in range(2))
    history = FIRST + turn(first, FIRST, 0).token_ids
    first.command(SessionVerb.SUSPEND, "s", history)
    show(first, second)
    turn(second, history + SECOND, len(history))

    written, read = first.loop.stats(), second.loop.stats()

    assert written.object_pages_written == read.object_pages == len(history) // 4
    assert read.object_pages_read == len(history) // 4
    assert read.object_bytes > 0
    for driver in (first, second):
        driver.close()


def test_a_measurement_is_for_nobody_else(models: RandomModels, tmp_path: Path) -> None:
    """What an engine writes to measure its disk is not copied to the bucket, and is gone afterwards."""
    driver = bucket_engine(models, tmp_path)
    store = store_of(driver)

    cost = measure_disk(store, driver.engine.kv_cache.page_store.sizes.page_bytes, TransferCost(0.0, 0.0))
    show(driver, driver)

    assert 0 < cost.seconds(16) < 60
    assert list((tmp_path / "bucket").rglob("*.kvpages")) == []
    assert store.counters.object_written == 0
    assert store.num_pages == 0
    driver.close()
