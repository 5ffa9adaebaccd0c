"""Tests of `graftwork.toml`."""

import os
from pathlib import Path

import pytest

from graftwork.api.cli.console.config_file import apply_config, find_config, read_config
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import Settings
from tests.api.cli.conftest import Graftwork


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_becomes_variables(tmp_path: Path) -> None:
    """Texts, numbers, truths and lists become the variables that mean the same; paths are those of the file's folder."""
    file = written(
        tmp_path / "graftwork.toml",
        '[server]\nmodel = "models/llama"\nport = 9000\ndemo = true\nkv_price = 0.5\ncors_origin = ["http://a.example", "*"]\n'
        '[client]\nurl = "http://x"\n',
    )

    assert read_config(file) == {
        "GRAFTWORK_MODEL": str(tmp_path / "models/llama"),
        "GRAFTWORK_PORT": "9000",
        "GRAFTWORK_DEMO": "true",
        "GRAFTWORK_KV_PRICE": "0.5",
        "GRAFTWORK_CORS_ORIGIN": "http://a.example,*",
        "GRAFTWORK_URL": "http://x",
    }


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a value in all three places the flag wins, then the variable, then the file."""
    file = written(tmp_path / "x.toml", '[server]\nport = 1\nhost = "file"\nlog_level = "debug"\n')
    environment = {"GRAFTWORK_PORT": "2", "GRAFTWORK_HOST": "variable", "GRAFTWORK_LOG_LEVEL": ""}

    assert apply_config(file, environment) == file
    for name in ("PORT", "HOST", "LOG_LEVEL"):
        monkeypatch.setenv(f"GRAFTWORK_{name}", environment[f"GRAFTWORK_{name}"])
    settings = Settings.from_environment({"port": 3})

    assert (settings.port, settings.host, settings.log_level) == (3, "variable", "debug")


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    """The named file goes before that of the current folder, and that before the user's own; without any there is none."""
    here, home = tmp_path / "here", tmp_path / "home"
    environment = {"XDG_CONFIG_HOME": str(home)}
    here.mkdir()
    assert find_config(None, here, environment) is None
    own = written(home / "graftwork" / "graftwork.toml", "")
    assert find_config(None, here, environment) == own
    local = written(here / "graftwork.toml", "")
    assert find_config(None, here, environment) == local
    named = written(tmp_path / "named.toml", "")
    assert find_config(named, here, environment) == named
    with pytest.raises(InvalidRequest, match="no file"):
        find_config(tmp_path / "absent.toml", here, environment)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1\n", r"\[server\] prot. Did you mean port\?"),
        ("[client]\nport = 1\n", r"\[client\] port"),
        ("[sever]\n", r"no setting sever"),
        ("port = 8000\n", "no setting port"),
        ("server = 1\n", "must be a table"),
        ("[server]\nport = 99999\n", r"\[server\] port: 99999 cannot be used"),
        ("[server]\nobjectives = {a = 1}\n", "give a text"),
        ("[server\n", "cannot be read"),
    ],
)
def test_wrong_files_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    """An unknown key, a value that its setting cannot have, and a file that is not TOML are errors with file and key."""
    file = written(tmp_path / "graftwork.toml", text)

    with pytest.raises(InvalidRequest, match=said) as caught:
        read_config(file)
    assert str(file) in caught.value.message


def test_a_secret_of_the_file_is_not_shown(tmp_path: Path) -> None:
    """The error for a wrong secret does not repeat it."""
    file = written(tmp_path / "graftwork.toml", '[server]\nengine_token = "short secret"\n')

    with pytest.raises(InvalidRequest) as caught:
        read_config(file)
    assert "short secret" not in caught.value.message


def test_commands_read_the_file(
    graftwork: Graftwork, unreachable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client command takes the server's address from the file of its folder; a wrong file ends it with one line."""
    for name in ("GRAFTWORK_URL", "GRAFTWORK_DEVICE"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "graftwork.toml", '[client]\nurl = "http://127.0.0.1:7"\n')
    asked = graftwork("tenants", "list")
    assert os.environ["GRAFTWORK_URL"] == "http://127.0.0.1:7"
    refused = graftwork("--config", str(written(tmp_path / "bad.toml", "[server]\nx = 1\n")), "tenants", "list")

    assert "http://127.0.0.1:7" in asked.output
    assert refused.exit_code == 1
    assert "bad.toml: there is no setting [server] x" in refused.output
    assert refused.output.count("\n") == 1
