"""Reads the settings of a process. No other room of the server reads environment variables.

Owns the way from the command line and the environment to a `Settings` object. Never opens a file or a connection. The
other modules of this room declare the settings: one subject each, with names, defaults and allowed values.

Each value comes from the command line (`overrides`) if it is given there; if not, from the variable `GRAFTWORK_<NAME>`;
if that is not set, it is the default. The settings' repr does not show secrets, nor addresses that may contain one.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.settings.adapters import AdapterSettings
from graftwork.platform.settings.batches import BatchSettings
from graftwork.platform.settings.device import DeviceSettings
from graftwork.platform.settings.fleet import FleetSettings
from graftwork.platform.settings.gateway import GatewaySettings
from graftwork.platform.settings.observation import ObservationSettings
from graftwork.platform.settings.people import PeopleSettings
from graftwork.platform.settings.scheduling import SchedulingSettings
from graftwork.platform.settings.setting import parse_field
from graftwork.platform.settings.storage import StorageSettings
from graftwork.platform.settings.values import parse_model, parse_path


@dataclass(frozen=True)
class Settings(
    ObservationSettings,
    SchedulingSettings,
    DeviceSettings,
    FleetSettings,
    StorageSettings,
    BatchSettings,
    PeopleSettings,
    AdapterSettings,
    GatewaySettings,
):
    """All settings of the commands `graftwork serve`, `graftwork gateway` and `graftwork engine`."""

    @classmethod
    def from_environment(cls, overrides: Mapping[str, object] | None = None) -> "Settings":
        """Reads each setting from `overrides`, or else from the variable `GRAFTWORK_<NAME>`. An override of None counts
        as missing.

        Raises InvalidRequest for a value that cannot be read, with the name of its variable or override, and for an
        override that is no setting.
        """
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        values: dict[str, Any] = {}
        for setting in fields(cls):
            variable = f"GRAFTWORK_{setting.name.upper()}"
            if setting.name in given:
                values[setting.name] = parse_setting(setting.name, setting.name, given.pop(setting.name))
            elif text := os.environ.get(variable, ""):
                values[setting.name] = parse_setting(setting.name, variable, text)
            elif text := os.environ.get(former := _FORMER_VARIABLES.get(setting.name, ""), ""):
                values[setting.name] = parse_setting(setting.name, former, text)
        if given:
            raise InvalidRequest(f"There is no setting named {min(given)!r}.", param=min(given))
        return cls(**values)

    @property
    def most_replicas(self) -> int:
        """The most engines that `serve` runs at one time."""
        return self.replicas if self.max_replicas is None else max(self.replicas, self.max_replicas)

    @property
    def resolved_database_url(self) -> str:
        """The address of the database with an async driver: `database_url`, or a SQLite file in `data_dir`."""
        if self.database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir / 'graftwork.db'}"
        return async_database_url(self.database_url)

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The gRPC addresses of all engines: at least one."""
        return tuple(part.strip() for part in self.resolved_engine_address.split(",") if part.strip())

    @property
    def resolved_engine_address(self) -> str:
        """The gRPC address of the engine: `engine_address`, or the socket of the engine that this server starts itself."""
        return self.engine_address or f"unix:{self.data_dir.absolute() / 'engine.sock'}"


def async_database_url(url: str) -> str:
    """Returns the database address `url` with the async driver for its database, such as `postgresql+asyncpg://…`."""
    scheme, separator, rest = url.partition("://")
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    return f"{drivers.get(scheme, scheme)}{separator}{rest}"


def parse_setting(name: str, source: str, value: object) -> object:
    """Returns a value in the type of its setting. `source` is where the value came from, such as a variable.

    Raises InvalidRequest for a value that cannot be used.
    """
    try:
        return parse_field(_FIELDS[name], value)
    except (ValueError, TypeError) as error:
        shown = "The value" if not _FIELDS[name].repr else repr(value)
        raise InvalidRequest(f"{source}: {shown} cannot be used; {error}.", param=source) from error


_FORMER_VARIABLES: Mapping[str, str] = {"device_bytes": "GRAFTWORK_DEVICE_KV_BYTES"}
"""By setting, the former name of its variable. The former name is still read."""

_FIELDS = {one.name: one for one in fields(Settings)}
SETTING_NAMES = tuple(_FIELDS)
PATH_NAMES = frozenset(name for name, one in _FIELDS.items() if one.metadata["parse"] in (parse_path, parse_model))
"""The settings that are paths of files or folders."""
