"""Tests of `graftwork doctor`: what each check finds, and what it tells to do."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from graftwork.api.cli.doctor import machine, services
from graftwork.api.cli.doctor.examine import all_checks, examine
from graftwork.api.cli.doctor.findings import Amiss, Check, State, line, warning
from graftwork.api.sdk.transport.errors import AuthenticationError
from graftwork.engine.kernels.machine_report import MachineReport
from graftwork.platform.database import Database
from graftwork.platform.errors import Unavailable
from graftwork.platform.quotas import redis_connection
from graftwork.platform.settings.settings import Settings
from tests.api.cli.conftest import Graftwork
from tests.api.cli.live_gateway import LiveGateway

CPU, GPUS = MachineReport("2.13", 0), MachineReport("2.13", 2, "H200", 141 * 2**30)


def amiss(check: Check) -> Amiss:
    with pytest.raises(Amiss) as caught:
        check.run()
    return caught.value


def test_each_check_stands_for_itself() -> None:
    """A check that fails with any expected error becomes a finding with advice, and the others still run."""

    def lost() -> str:
        raise Unavailable("The database is away.")

    def absent() -> str:
        raise ModuleNotFoundError("no", name="torch")

    def closed() -> str:
        raise PermissionError("denied")

    def odd() -> str:
        raise warning("odd", "Look.")

    checks = [Check("a", lost), Check("b", absent), Check("c", closed), Check("d", odd), Check("e", lambda: "fine")]
    found = examine(checks)

    assert [(one.name, one.state) for one in found] == [
        ("a", State.WRONG),
        ("b", State.WARNING),
        ("c", State.WRONG),
        ("d", State.WARNING),
        ("e", State.OK),
    ]
    assert all(one.advice for one in found[:4])
    assert line(found[4]) == "ok       e          fine"
    assert line(found[3]).splitlines()[1].strip() == "→ Look."


def test_every_check_has_a_name_of_its_own(tmp_path: Path) -> None:
    """The checks of settings are named once each."""
    names = [check.name for check in all_checks(Settings(data_dir=tmp_path))]

    assert len({*names}) == len(names)
    assert {"device", "kernels", "database", "redis", "disk", "data", "port", "libraries", "clock"} <= {*names}


def test_old_libraries_are_named() -> None:
    """A library below the least version is named with both; missing ones and new ones are not."""
    lines = ["httpx>=999.1", "no-such-library>=1.0", "pydantic>=2.0", "typer"]
    found = amiss(Check("libraries", lambda: machine.check_libraries(lines)))

    assert found.state is State.WRONG
    assert found.text.startswith("httpx 0.")
    assert "999.1" in found.text
    assert "pydantic" not in found.text
    assert "pydantic" in machine.check_libraries([])


def test_a_wrong_clock() -> None:
    """A clock before this software was written is wrong."""
    assert amiss(Check("clock", lambda: machine.check_clock(0.0))).state is State.WRONG
    assert machine.check_clock(1_800_000_000.0).startswith("2027-01-15")


@pytest.mark.parametrize(
    ("settings", "report", "is_wrong"),
    [
        (Settings(device="cuda"), CPU, True),
        (Settings(device="auto"), CPU, False),
        (Settings(device="auto", tensor_parallel=4), GPUS, True),
        (Settings(device="cuda:1", tensor_parallel=2), GPUS, False),
    ],
)
def test_the_device(settings: Settings, report: MachineReport, is_wrong: bool) -> None:
    """A device that is asked for and not there is wrong; so are more devices than there are."""
    if is_wrong:
        assert amiss(Check("device", lambda: machine.check_device(settings, report))).state is State.WRONG
    else:
        assert "torch 2.13" in machine.check_device(settings, report)


def test_kernels_that_are_switched_off() -> None:
    """Torch in place of compiled kernels is a warning."""
    found = amiss(Check("kernels", lambda: machine.check_kernels(Settings(kernels="torch"), CPU)))

    assert found.state is State.WARNING


def test_a_model_without_files(tmp_path: Path) -> None:
    """What a model's folder lacks is named; no model at all is a warning; the shipped one is whole."""
    (tmp_path / "config.json").write_text("{}")
    found = amiss(Check("model", lambda: machine.check_model(Settings(model=tmp_path))))

    assert "tokenizer.json, *.safetensors" in found.text
    assert amiss(Check("model", lambda: machine.check_model(Settings()))).state is State.WARNING
    assert "MiB of weights" in machine.check_model(Settings(demo=True))


def test_the_data_folder(tmp_path: Path) -> None:
    """A folder that others can read is a warning with the command that closes it; a missing one will be made."""
    tmp_path.chmod(0o755)
    found = amiss(Check("data", lambda: machine.check_data_folder(Settings(data_dir=tmp_path))))
    tmp_path.chmod(stat.S_IRWXU)

    assert found.advice == f"Run chmod 700 {tmp_path}."
    assert "mode 700" in machine.check_data_folder(Settings(data_dir=tmp_path))
    assert "will be made" in machine.check_data_folder(Settings(data_dir=tmp_path / "new" / "deep"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_data_folder_of_another_user() -> None:
    """A folder that this user cannot write is wrong."""
    assert (
        amiss(Check("data", lambda: machine.check_data_folder(Settings(data_dir=Path("/proc"))))).state is State.WRONG
    )


@pytest.mark.parametrize(
    ("free", "state"), [(100 * 2**20, State.WRONG), (3 * 2**30, State.WARNING), (50 * 2**30, None)]
)
def test_disk_space(free: int, state: State | None, tmp_path: Path) -> None:
    """Little space is a warning, and almost none is wrong."""
    settings = Settings(data_dir=tmp_path / "not" / "made")
    if state is None:
        assert "50.0 GiB free" in machine.check_disk(settings, free)
    else:
        assert amiss(Check("disk", lambda: machine.check_disk(settings, free))).state is state


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.close()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_of_another_program(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that another program has is wrong; one that a Graftwork server has is a warning."""
    monkeypatch.setattr(services, "is_graftwork", lambda url: False)
    assert amiss(Check("port", lambda: services.check_port(Settings(port=taken_port)))).state is State.WRONG
    monkeypatch.setattr(services, "is_graftwork", lambda url: True)
    assert amiss(Check("port", lambda: services.check_port(Settings(port=taken_port)))).state is State.WARNING
    assert services.check_port(Settings(port=0)) == "127.0.0.1:0 is free"


def test_the_database(tmp_path: Path) -> None:
    """A new database will be made, one behind the schema is a warning, and one at head is fine."""
    settings = Settings(data_dir=tmp_path)
    assert "will be made" in services.check_database(settings)

    async def upgrade() -> None:
        database = Database(settings.resolved_database_url)
        await database.upgrade_to_head()
        await database.close()

    (tmp_path / "graftwork.db").touch()
    assert amiss(Check("database", lambda: services.check_database(settings))).state is State.WARNING
    asyncio.run(upgrade())
    assert "at head" in services.check_database(settings)


def test_services_that_do_not_answer(tmp_path: Path) -> None:
    """A database and a Redis that nobody runs are wrong, with what to correct."""
    away = Settings(
        data_dir=tmp_path, database_url="postgresql://nobody@127.0.0.1:9/none", redis_url="redis://127.0.0.1:9/0"
    )
    wanted = [check for check in all_checks(away) if check.name in ("database", "redis")]

    found = examine(wanted)

    assert [one.state for one in found] == [State.WRONG, State.WRONG]
    assert "--redis-url" in found[1].text


@pytest.mark.redis
def test_a_redis_that_answers(redis_url: str, tmp_path: Path) -> None:
    """A Redis of this machine answers, and its clock agrees."""
    assert "Redis answers in" in services.check_redis(Settings(data_dir=tmp_path, redis_url=redis_url))


def test_a_redis_with_another_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that differs is a warning, because limits end at the wrong time."""

    async def theirs(*_: object) -> float:
        return 60.0

    monkeypatch.setattr(redis_connection, "redis_time", theirs)

    with pytest.raises(Amiss, match="its clock differs by") as caught:
        services.check_redis(Settings(data_dir=tmp_path, redis_url="redis://unused"))
    assert caught.value.state is State.WARNING


def test_the_server_of_the_commands(live: LiveGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes the keys that are set; no key, and another version, are warnings; a wrong key is refused by name."""
    monkeypatch.setenv("GRAFTWORK_URL", live.url)
    for name in ("API_KEY", "ADMIN_KEY"):
        monkeypatch.delenv(f"GRAFTWORK_{name}", raising=False)
    with pytest.raises(Amiss, match="no key is set"):
        services.check_server()
    monkeypatch.setenv("GRAFTWORK_API_KEY", live.key)
    monkeypatch.setenv("GRAFTWORK_ADMIN_KEY", live.admin_key)
    right = services.check_server()
    for name, wrong in (("API_KEY", "gw_no_such"), ("ADMIN_KEY", "gwa_no_such")):
        with monkeypatch.context() as patched:
            patched.setenv(f"GRAFTWORK_{name}", wrong)
            with pytest.raises(AuthenticationError):
                services.check_server()
    monkeypatch.setattr(services, "graftwork", SimpleNamespace(__version__="99.0"))

    assert right == f"{live.url} answers and takes the keys"
    with pytest.raises(Amiss, match=r"and this is 99\.0"):
        services.check_server()


def test_the_command(graftwork: Graftwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints a line for each check, or JSON, and exits with status 1 if one is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAFTWORK_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GRAFTWORK_PORT", "0")
    healthy = graftwork("doctor")
    monkeypatch.setenv("GRAFTWORK_REDIS_URL", "redis://127.0.0.1:9/0")
    sick = graftwork("doctor", "--json")
    body = json.loads(sick.stdout)

    assert healthy.exit_code == 0, healthy.output
    assert "warning  server     no server answers at http://127.0.0.1:9" in healthy.output
    assert sick.exit_code == 1
    assert body["healthy"] is False
    assert {one["name"] for one in body["findings"] if one["state"] == "wrong"} == {"redis"}
