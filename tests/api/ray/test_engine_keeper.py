"""Tests of the process of an engine of a Ray fleet, without Ray: programs take the engine's place."""

import signal
import sys
from pathlib import Path

import pytest

from graftwork.api.ray.detached_process import ProcessIdentity
from graftwork.api.ray.engine_keeper import EngineKeeper, KeeperState
from graftwork.api.ray.engine_spec import EngineSpec
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings

TOKEN = "0123456789abcdef"
URL = "postgresql://user:secret@db/graftwork"
SLEEPER = "import os, signal; print(os.environ['GRAFTWORK_REPLICA_ID'], flush=True); signal.pause()"
FAILURE = "raise SystemExit('no such model')"


def spec(folder: Path, **settings: object) -> EngineSpec:
    given = {"data_dir": folder, "database_url": URL, "engine_token": TOKEN, **settings}
    return EngineSpec.of(Settings(**given), num_cpus=1.0, num_gpus=0.0)  # type: ignore[arg-type]


def keeper(folder: Path, program: str = SLEEPER) -> EngineKeeper:
    return EngineKeeper("one", spec(folder), "127.0.0.1", lambda address: [sys.executable, "-c", program])


def once(keeper: EngineKeeper, process_id: int | None = None, starts: int = 0) -> KeeperState:
    """Returns the state once an engine other than `process_id` runs, or it was started often enough."""
    for _ in range(3000):
        state = keeper.state()
        if starts and state.starts >= starts and state.last_words:
            return state
        if not starts and state.process_id not in (None, process_id):
            return state
        keeper.wait(0.01)
    raise AssertionError(f"the engine never ran: {keeper.state()}")


def test_a_killed_engine_is_started_again_until_it_is_stopped(tmp_path: Path) -> None:
    """After SIGKILL another process runs; after `stop` none does, and no file names one."""
    kept = keeper(tmp_path)
    first = once(kept)
    assert first.process_id is not None
    killed = ProcessIdentity.of(first.process_id)
    assert killed is not None
    killed.send(signal.SIGKILL)

    second = once(kept, first.process_id)
    kept.stop()

    assert kept.wait(30)
    assert (second.starts, second.is_stopping) == (2, False)
    assert kept.state().process_id is None
    assert ProcessIdentity.read(spec(tmp_path).identity_file("one")) is None


def test_the_next_keeper_finds_the_engine_of_a_lost_one(tmp_path: Path) -> None:
    """A keeper finds the engine that another one has started, also if that is gone, and starts none beside it."""
    lost = keeper(tmp_path)
    running = once(lost).process_id

    found = keeper(tmp_path)
    state = once(found)
    found.stop()
    lost.stop()

    assert found.wait(30)
    assert lost.wait(30)
    assert (state.process_id, state.starts) == (running, 0)


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The state has the end of the engine's log, and a stop ends the attempts."""
    kept = keeper(tmp_path, FAILURE)

    state = once(kept, starts=1)
    kept.stop()

    assert kept.wait(30)
    assert "no such model" in state.last_words


def test_a_process_id_of_another_process_is_no_engine(tmp_path: Path) -> None:
    """An identity whose start time differs is not running: the system has given the id to another process."""
    own = ProcessIdentity.of(1)
    assert own is not None
    ProcessIdentity(1, own.started + 1).write(tmp_path / "file")

    assert ProcessIdentity.read(tmp_path / "file") is None
    own.write(tmp_path / "file")
    assert ProcessIdentity.read(tmp_path / "file") == own


def test_engines_get_the_settings_and_ids_of_their_own(tmp_path: Path) -> None:
    """All settings that differ from the defaults reach the engine by its environment, and come back from JSON."""
    given = spec(tmp_path, device_bytes=1 << 20, demo=True, admin_key="never")

    found = EngineSpec.from_json(given.to_json()).engine_environment("f-1", "10.0.0.5:9000")

    assert found["GRAFTWORK_DEVICE_BYTES"] == str(1 << 20)
    assert (found["GRAFTWORK_FLEET"], found["GRAFTWORK_GENERATION"]) == ("leases", "1")
    assert (found["GRAFTWORK_REPLICA_ID"], found["GRAFTWORK_ADVERTISE"]) == ("f-1", "10.0.0.5:9000")
    assert found["GRAFTWORK_KV_DIR"].endswith("kv-f-1")
    assert "never" not in found.values()
    assert TOKEN not in repr(given)
    assert "secret" not in repr(given)


@pytest.mark.parametrize(("missing", "named"), [("database_url", "--database-url"), ("engine_token", "ENGINE_TOKEN")])
def test_a_fleet_needs_a_database_and_a_token(tmp_path: Path, missing: str, named: str) -> None:
    """Without what gateways and engines share, the fleet is refused, and the error says what to give."""
    with pytest.raises(InvalidRequest, match=named):
        spec(tmp_path, **{missing: None})
