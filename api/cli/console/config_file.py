"""Reads `graftwork.toml`, the file with the settings of the server and of the client commands.

    [server]                          any setting of docs/operations.md by its name
    model = "./my-llama"
    port = 8000

    [client]
    url = "http://127.0.0.1:8000"
    api_key = "gw_…"

Owns where the file is found and what may be in it. A flag goes before a variable of the environment, and a variable
before the file: so this module puts the file's values into the environment of this process where a variable is missing.
The servers' child processes inherit them. Never changes a file.
"""

import os
import tomllib
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.settings import PATH_NAMES, SETTING_NAMES, parse_setting

FILE_NAME = "graftwork.toml"
CLIENT_NAMES = ("url", "api_key", "admin_key")


def find_config(named: Path | None, folder: Path, environment: Mapping[str, str]) -> Path | None:
    """Returns the file to read: the named one, that of the current `folder`, or the user's own. None if there is none.

    Raises InvalidRequest if the named file does not exist.
    """
    if named is not None:
        if not named.is_file():
            raise InvalidRequest(f"There is no file {named}: name an existing one with --config.", param="config")
        return named
    own = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "graftwork" / FILE_NAME
    return next((path for path in (folder / FILE_NAME, own) if path.is_file()), None)


def read_config(path: Path) -> dict[str, str]:
    """Returns the variables of the environment that a file stands for, such as `GRAFTWORK_PORT`, by name.

    Relative paths in the file are those of the file's folder. Raises InvalidRequest for a file that is not TOML, an
    unknown table or key, and a value that its setting cannot have.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.", param="config") from error
    variables: dict[str, str] = {}
    for table, known in (("server", SETTING_NAMES), ("client", CLIENT_NAMES)):
        values = tables.pop(table, {})
        if not isinstance(values, dict):
            raise InvalidRequest(f"{path}: {table} must be a table: write [{table}] above its keys.", param="config")
        for name, value in values.items():
            if name not in known:
                raise _unknown(path, f"[{table}] {name}", known)
            variables[f"GRAFTWORK_{name.upper()}"] = _text(path, table, name, value)
    for name in tables:
        raise _unknown(path, name, ("[server]", "[client]"))
    return variables


def apply_config(named: Path | None, environment: MutableMapping[str, str]) -> Path | None:
    """Puts the values of the file into the environment where a variable is missing. Returns the file; None without one.

    Raises InvalidRequest as `find_config` and `read_config`.
    """
    path = find_config(named, Path.cwd(), environment)
    if path is not None:
        for variable, text in read_config(path).items():
            if not environment.get(variable):
                environment[variable] = text
    return path


def load_config(named: Path | None) -> Path | None:
    """Applies the configuration file to this process. See `apply_config`."""
    return apply_config(named, os.environ)


def _text(path: Path, table: str, name: str, value: Any) -> str:
    """Returns a value as the text of its variable."""
    source = f"{path}: [{table}] {name}"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int | float):
        raise InvalidRequest(f"{source}: give a text, a number, true or false, or a list of texts.", param=name)
    if table == "server":
        if name in PATH_NAMES:
            parsed = parse_setting(name, source, value)
            value = path.parent / parsed if isinstance(parsed, Path) else value
        parse_setting(name, source, value)
    return str(value)


def _unknown(path: Path, name: str, known: tuple[str, ...]) -> InvalidRequest:
    from difflib import get_close_matches

    near = get_close_matches(name.rpartition(" ")[2], known, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return InvalidRequest(
        f"{path}: there is no setting {name}.{hint} docs/operations.md lists them all.", param="config"
    )
