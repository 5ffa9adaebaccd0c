"""The answers of `/v1/adapters`."""

from dataclasses import dataclass
from typing import Any

from graftwork.api.sdk.types.base import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion(Answer):
    """One immutable set of weights; the digest is their identity."""

    version: int = 0
    digest: str = ""
    rank: int = 0
    target_modules: tuple[str, ...] = ()
    size_bytes: int = 0
    status: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Answer):
    """A name with its versions; `aliases` maps e.g. "prod" to its target."""

    id: str = ""
    name: str = ""
    created_at: float = 0.0
    versions: tuple[AdapterVersion, ...] = ()
    aliases: dict[str, Any] | None = None

    @property
    def newest(self) -> AdapterVersion | None:
        return max(self.versions, key=lambda version: version.version, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasChange(Answer):
    """What an alias points to now, and what it pointed to before: `{"version": 2}` or `{"weights": {…}}`."""

    adapter: str = ""
    alias: str = ""
    target: Any = None
    previous: Any = None
