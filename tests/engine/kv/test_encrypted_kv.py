"""Tests that no token depends on whether KV files are encrypted, and that nobody reads them without the tenant's key."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from graftwork.engine.core.requests import KvFileKey, SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.kv.disk.file_format import decode_header
from graftwork.engine.kv.index.radix_tree import PUBLIC
from graftwork.engine.kv.transfer.plan import domain_digest
from graftwork.engine.messages import ForgetDomain
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.kv.test_shared_disk import KINDS, show, store_of

KEY, OTHER_KEY = KvFileKey(b"k" * 32), KvFileKey(b"o" * 32)
FIRST = [5 + n % 50 for n in range(41)]
SECOND = [9, 8, 7, 6, 5, 4, 3]


def engine_on(models: RandomModels, folder: Path, **options: Any) -> EngineDriver:
    return models.engine(disk_kv_bytes=2**22, kv_folder=folder, **options)


def turn(driver: EngineDriver, prompt: list[int], num_history: int, **options: Any) -> Outcome:
    use = SessionUse(SessionKey("s"), num_history)
    return driver.run(prompt, session=use, max_tokens=12, ignore_eos=True, **options)


def first_turn(driver: EngineDriver, key: KvFileKey | None, **options: Any) -> list[int]:
    """Runs a session's first turn, and brings its pages to the disk. Returns its history."""
    history = FIRST + turn(driver, FIRST, 0, kv_key=key, **options).token_ids
    driver.command(SessionVerb.SUSPEND, "s", history, kv_key=key, **options)
    return history


def disk_tokens(outcome: Outcome) -> int:
    assert outcome.cache is not None
    return outcome.cache.disk_tokens


def straight(models: RandomModels, history: list[int], **options: Any) -> list[int]:
    """Returns the second turn's tokens from an engine without a disk."""
    return turn(models.engine(), history + SECOND, 0, **options).token_ids


@pytest.mark.parametrize("adapter", [None, "sha256:wide"])
def test_a_session_goes_on_from_encrypted_files_as_if_nothing_had_stopped(
    models: RandomModels, tmp_path: Path, adapter: str | None
) -> None:
    """After a restart, the next turn reads its history from encrypted files and has the tokens of the straight run."""
    driver = engine_on(models, tmp_path)
    history = first_turn(driver, KEY, adapter=adapter)
    driver.close()

    restarted = engine_on(models, tmp_path)
    unread = restarted.command(SessionVerb.READ, "s", history, adapter=adapter)
    known = restarted.command(SessionVerb.READ, "s", history, adapter=adapter, kv_key=KEY)
    resumed = turn(restarted, history + SECOND, len(history), adapter=adapter, kv_key=KEY)

    assert resumed.token_ids == straight(models, history, adapter=adapter)
    assert disk_tokens(resumed) == len(history) // 4 * 4
    assert (unread.disk_tokens, known.disk_tokens) == (0, len(history) // 4 * 4)
    assert all(decode_header(path.read_bytes()).salt for path in tmp_path.glob("*.kvpages"))
    restarted.close()


def test_the_files_hold_no_page_of_the_plain_files(models: RandomModels, tmp_path: Path) -> None:
    """No aligned 16 bytes of a plain file's pages are in the encrypted file of the same session."""
    bodies = []
    for name, key in (("plain", None), ("sealed", KEY)):
        driver = engine_on(models, tmp_path / name)
        first_turn(driver, key)
        driver.close()
        contents = [path.read_bytes() for path in sorted((tmp_path / name).glob("*.kvpages"))]
        bodies.append(b"".join(content[decode_header(content).header_bytes :] for content in contents))

    plain, sealed = bodies
    pieces = {plain[at : at + 16] for at in range(0, len(plain), 16)}
    assert len(plain) == len(sealed) > 10_000
    assert len(pieces) > 500
    assert not any(piece in sealed for piece in pieces)


@pytest.mark.parametrize("change", ["flip", "cut", "another key", "no key"])
def test_what_cannot_be_read_is_computed_again(models: RandomModels, tmp_path: Path, change: str) -> None:
    """With a flipped bit, a cut file, another key or none, nothing comes from the disk and the tokens are right; the
    pages are then stored again.
    """
    driver = engine_on(models, tmp_path)
    history = first_turn(driver, KEY)
    driver.close()
    restarted = engine_on(models, tmp_path)
    (path,) = tmp_path.glob("*.kvpages")
    header, content = decode_header(path.read_bytes()), bytearray(path.read_bytes())
    content[header.header_bytes + 5] ^= 1 if change == "flip" else 0
    path.write_bytes(content[:5000] if change == "cut" else content)
    key = {"another key": OTHER_KEY, "no key": None}.get(change, KEY)

    resumed = turn(restarted, history + SECOND, len(history), kv_key=key)
    restarted.command(SessionVerb.SUSPEND, "s", history + SECOND, kv_key=key)

    restarted.command(SessionVerb.CLOSE, "another", [])  # sweeps files without pages
    restarted.close()
    again = engine_on(models, tmp_path)

    assert resumed.token_ids == straight(models, history)
    assert disk_tokens(resumed) == 0
    assert not path.exists()
    assert restarted.loop.stats().disk_corrupt_files == (change != "no key")
    assert again.command(SessionVerb.READ, "s", history, kv_key=key).missing_tokens < 4
    again.close()


def test_plain_files_of_a_tenant_go_when_encryption_is_switched_on(models: RandomModels, tmp_path: Path) -> None:
    """The first request with a key finds nothing in plain files, and they are removed; other tenants keep theirs."""
    driver = engine_on(models, tmp_path)
    history = first_turn(driver, None)
    first_turn(driver, None, domain=b"other")
    driver.close()
    restarted = engine_on(models, tmp_path)

    resumed = turn(restarted, history + SECOND, len(history), kv_key=KEY)
    restarted.command(SessionVerb.SUSPEND, "s", history + SECOND, kv_key=KEY)
    other = turn(restarted, history + SECOND, len(history), domain=b"other")
    restarted.close()

    assert disk_tokens(resumed) == 0
    assert disk_tokens(other) > 0
    assert other.token_ids == resumed.token_ids == straight(models, history)
    salts = [decode_header(path.read_bytes()).salt for path in tmp_path.glob("*.kvpages")]
    assert sorted(salt is None for salt in salts) == [False, True]


def test_a_public_prompt_stays_plain(models: RandomModels, tmp_path: Path) -> None:
    """The pages of a public prompt are written plainly and serve another tenant; the rest of the prompt is encrypted."""
    driver = engine_on(models, tmp_path)
    first_turn(driver, KEY, domain=b"one", public_tokens=20)
    driver.close()
    restarted = engine_on(models, tmp_path)

    other = restarted.run(FIRST, domain=b"two", public_tokens=20, kv_key=OTHER_KEY)

    headers = [decode_header(path.read_bytes()) for path in tmp_path.glob("*.kvpages")]
    assert disk_tokens(other) == 20
    assert {header.domain: header.salt is None for header in headers} == {
        domain_digest(PUBLIC): True,
        domain_digest(b"one"): False,
    }
    restarted.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_moves_needs_its_key(models: RandomModels, tmp_path: Path, kind: str) -> None:
    """Another engine reads the session's encrypted pages with the key that comes with the request, and has the tokens of
    the straight run; with another key it computes them again.
    """
    first, second, third = (KINDS[kind](models, tmp_path) for _ in range(3))
    history = first_turn(first, KEY)
    for reader in (second, third):
        show(first, reader)

    moved = turn(second, history + SECOND, len(history), kv_key=KEY)
    strange = turn(third, history + SECOND, len(history), kv_key=OTHER_KEY)

    assert moved.token_ids == strange.token_ids == straight(models, history)
    assert disk_tokens(moved) == len(history) // 4 * 4
    assert disk_tokens(strange) == 0
    for driver in (first, second, third):
        store_of(driver).check_integrity()
        driver.close()


def test_an_erased_tenants_files_are_noise(models: RandomModels, tmp_path: Path) -> None:
    """Files that a backup brings back after the erasure are read with no key that anybody still has: the answer is
    computed again, and the files go.
    """
    folder, backup = tmp_path / "kv", tmp_path / "backup"
    driver = engine_on(models, folder)
    history = first_turn(driver, KEY)
    shutil.copytree(folder, backup)
    driver.loop.take(ForgetDomain(IsolationDomain(b"tenant")))
    late = turn(driver, FIRST, 0)
    driver.command(SessionVerb.SUSPEND, "s", FIRST + late.token_ids)
    driver.close()
    assert list(folder.glob("*.kvpages")) == []
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)

    for key in (None, OTHER_KEY):
        restored = engine_on(models, folder)
        resumed = turn(restored, history + SECOND, len(history), kv_key=key)
        restored.close()
        assert disk_tokens(resumed) == 0
        assert resumed.token_ids == straight(models, history)
    assert list(folder.glob("*.kvpages")) == []


def test_all_ranks_encrypt_their_parts(models: RandomModels, tmp_path: Path) -> None:
    """With tensor parallelism, each rank's files are encrypted, and a restart goes on from them."""
    options: dict[str, Any] = {"tensor_parallel": 2, "disk_kv_bytes": 2**23, "kv_folder": tmp_path}
    driver = models.engine(**options)
    history = first_turn(driver, KEY)
    driver.close()
    restarted = models.engine(**options)

    resumed = turn(restarted, history + SECOND, len(history), kv_key=KEY)

    assert resumed.token_ids == straight(models, history)
    assert disk_tokens(resumed) == len(history) // 4 * 4
    files = list(tmp_path.rglob("*.kvpages"))
    assert {path.parent.name for path in files} == {"rank-0-of-2", "rank-1-of-2"}
    assert all(decode_header(path.read_bytes()).salt for path in files)
    restarted.close()
