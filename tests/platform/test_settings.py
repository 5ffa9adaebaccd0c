"""Tests of the sources of settings, and of their refusals."""

from pathlib import Path

import pytest

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings, async_database_url
from graftwork.platform.settings.values import parse_bytes


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "DATA_DIR", "DATABASE_URL", "DEVICE_BYTES", "DEVICE_KV_BYTES", "DEMO", "PEPPER"):
        monkeypatch.delenv(f"GRAFTWORK_{name}", raising=False)


def test_the_former_name_of_a_setting_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GRAFTWORK_DEVICE_KV_BYTES` sets the device's budget unless `GRAFTWORK_DEVICE_BYTES` is set."""
    monkeypatch.setenv("GRAFTWORK_DEVICE_KV_BYTES", "1KiB")
    former = Settings.from_environment()
    monkeypatch.setenv("GRAFTWORK_DEVICE_BYTES", "2KiB")

    assert former.device_bytes == 1024
    assert Settings.from_environment().device_bytes == 2048


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An override has priority over the variable, and the variable over the default; None is no override."""
    monkeypatch.setenv("GRAFTWORK_PORT", "9000")
    monkeypatch.setenv("GRAFTWORK_DEMO", "yes")

    settings = Settings.from_environment({"port": 7000, "demo": None, "device_bytes": "512MiB"})

    assert (settings.port, settings.demo, settings.host) == (7000, True, "127.0.0.1")
    assert settings.device_bytes == 512 * 2**20
    assert Settings.from_environment().port == 9000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GRAFTWORK_PORT", "eighty"),
        ("GRAFTWORK_PORT", "65536"),
        ("GRAFTWORK_PORT", "-1"),
        ("GRAFTWORK_DEMO", "perhaps"),
        ("GRAFTWORK_DEVICE_BYTES", "12 apples"),
        ("GRAFTWORK_DEVICE_KV_BYTES", "-5"),
        ("GRAFTWORK_DEVICE", "tpu"),
        ("GRAFTWORK_THREADS", "1000000"),
        ("GRAFTWORK_DTYPE", "fp8"),
        ("GRAFTWORK_LORA_KERNELS", "cuda"),
        ("GRAFTWORK_CORS_ORIGIN", "chat.example.com"),
        ("GRAFTWORK_CORS_ORIGIN", "https://chat.example.com/page"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The error names the variable, shows the value and says what to give."""
    monkeypatch.setenv(variable, value)

    with pytest.raises(InvalidRequest) as caught:
        Settings.from_environment()

    assert caught.value.message.startswith(f"{variable}: '{value}' cannot be used; give ")


def test_an_unknown_override_is_refused() -> None:
    """An override with an unknown name is an error."""
    with pytest.raises(InvalidRequest, match="prot"):
        Settings.from_environment({"prot": 1})


def test_every_setting_can_be_given() -> None:
    """Every field of the settings has a reader."""
    defaults = {name: value for name, value in vars(Settings()).items() if value is not None}

    assert Settings.from_environment(defaults) == Settings()


def test_secrets_are_not_shown() -> None:
    """The settings' repr leaves out keys, the pepper and addresses with passwords."""
    settings = Settings(
        admin_key="gwa_x_secret",
        pepper="secret",
        database_url="postgresql://u:secret@h/d",
        redis_url="redis://:secret@h",
    )

    assert "secret" not in repr(settings)


def test_the_embedded_addresses_lie_in_the_data_folder() -> None:
    """Without addresses, the database is a file and the engine a socket in the data folder."""
    settings = Settings(data_dir=Path("/var/graftwork"))

    assert settings.resolved_database_url == "sqlite+aiosqlite:////var/graftwork/graftwork.db"
    assert settings.resolved_engine_address == "unix:/var/graftwork/engine.sock"
    assert Settings(engine_address="engine:50051").resolved_engine_address == "engine:50051"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postgresql://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgres://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"),
    ],
)
def test_database_addresses_get_their_async_driver(given: str, expected: str) -> None:
    """Usual database addresses get the async driver."""
    assert async_database_url(given) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("1KiB", 1024), ("1.5 GiB", 3 * 2**29), ("2GB", 2 * 10**9), (2**40, 2**40)],
)
def test_sizes_are_read(text: object, expected: int) -> None:
    """Sizes are numbers of bytes, or numbers with a binary or a decimal unit."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1 gib", "-1", -1, True, "1e9", "nan"])
def test_sizes_that_are_none_are_refused(text: object) -> None:
    """A text that is not a size is refused."""
    with pytest.raises(ValueError, match="give a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("setting", "value"), [("fleet", "ray"), ("replicas", -1), ("replicas", 65), ("autoscale", 1)])
def test_what_is_not_served_is_no_setting(setting: str, value: object) -> None:
    """A setting or a value that would have no effect is not offered: who gives it is told that there is none."""
    with pytest.raises(InvalidRequest, match=setting):
        Settings.from_environment({setting: value})


def test_who_wants_ray_is_told_its_command() -> None:
    """`--fleet ray` is not a place where gateways find engines: the error names the command that starts them there."""
    with pytest.raises(InvalidRequest, match="graftwork fleet start"):
        Settings.from_environment({"fleet": "ray"})


@pytest.mark.parametrize(
    ("text", "expected"), [("engine:1", ("engine:1",)), ("a:1, b:2,unix:/c", ("a:1", "b:2", "unix:/c"))]
)
def test_several_engines_are_named_with_commas_between(text: str, expected: tuple[str, ...]) -> None:
    """An engine address may name several engines."""
    assert Settings(engine_address=text).engine_addresses == expected


@pytest.mark.parametrize("value", ["0.5", "-1", "nan", "1e3", "30s", 3601])
def test_a_lease_has_a_length(value: object) -> None:
    """A lease has 1 to 3600 seconds."""
    assert Settings.from_environment({"lease_s": "2.5"}).lease_s == 2.5
    with pytest.raises(InvalidRequest, match=r"lease_s.*1 to 3600"):
        Settings.from_environment({"lease_s": value})
