"""Defines what an engine of a Ray fleet is started with, and the command that starts it.

Owns the names of the environment variables, the folders and the ids of such engines. Starts nothing.
"""

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.settings.settings import Settings

_GATEWAYS_ONLY = frozenset(
    {"host", "port", "admin_key", "pepper", "redis_url", "engine_address", "replicas", "deadlines", "objectives"}
)
"""The settings that no engine needs."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What all engines of one generation are started with."""

    values: Mapping[str, str] = field(repr=False)
    """Settings by name, as text. The database's address and the engine token are among them."""
    generation: int = FIRST_GENERATION
    num_cpus: float = 1.0
    """The CPUs that Ray keeps for one engine."""
    num_gpus: float = 0.0

    @classmethod
    def of(cls, settings: Settings, *, num_cpus: float, num_gpus: float) -> "EngineSpec":
        """Returns the spec of engines with these settings. Raises InvalidRequest if the settings are not for a fleet."""
        if settings.database_url is None:
            raise InvalidRequest(
                "A Ray fleet needs a database that gateways and engines share: name it with --database-url.",
                param="database_url",
            )
        if settings.engine_token is None:
            raise InvalidRequest(
                "The engines of a Ray fleet need a token: set GRAFTWORK_ENGINE_TOKEN to one secret here and at the "
                "gateways, such as the output of `openssl rand -hex 32`.",
                param="engine_token",
            )
        default = Settings()
        values = {
            setting.name: _text(getattr(settings, setting.name))
            for setting in fields(settings)
            if setting.name not in _GATEWAYS_ONLY and getattr(settings, setting.name) != getattr(default, setting.name)
        }
        values |= {"data_dir": str(settings.data_dir.absolute()), "fleet": "leases"}
        return cls(values, num_cpus=num_cpus, num_gpus=num_gpus)

    def next_generation(self, newer: "EngineSpec") -> "EngineSpec":
        """Returns `newer` as the generation after this one."""
        return replace(newer, generation=self.generation + 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSpec":
        return cls(**json.loads(text))

    @property
    def settings(self) -> Settings:
        return Settings.from_environment(dict(self.values))

    def engine_environment(self, replica_id: str, address: str) -> dict[str, str]:
        """Returns the environment variables of one engine. Secrets are here, and not in the list of processes."""
        folder = self.settings.kv_dir or self.settings.data_dir / "kv"
        own = {
            "replica_id": replica_id,
            "advertise": address,
            "generation": str(self.generation),
            "kv_dir": str(folder.with_name(f"{folder.name}-{replica_id}")),
        }
        if "shared_kv_dir" in self.values:
            own.pop("kv_dir")
        return {f"GRAFTWORK_{name.upper()}": value for name, value in {**self.values, **own}.items()}

    def identity_file(self, replica_id: str) -> Path:
        """Returns the file that names the process of an engine on this machine."""
        return self._folder / f"{replica_id}@{socket.gethostname()}.json"

    def log_file(self, replica_id: str) -> Path:
        return self._folder / f"{replica_id}@{socket.gethostname()}.log"

    @property
    def _folder(self) -> Path:
        return self.settings.data_dir / "ray"


def engine_command(address: str) -> list[str]:
    """Returns the command of an engine that listens at `address`."""
    return [sys.executable, "-m", "graftwork.api.cli.main", "engine", "--listen", address]


def free_address(host: str) -> str:
    """Returns an address of this machine whose port is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
