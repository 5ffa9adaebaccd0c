"""The answers of `/v1/adapters`."""

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads this one only, before Python 3.12

from graftwork.platform.answers.base import Answer


class VersionTarget(TypedDict):
    """An alias that stands for one version."""

    version: int


class WeightedTarget(TypedDict):
    """An alias that shares its requests among versions. Keys are version numbers, values sum to 1."""

    weights: dict[str, float]


AliasTarget = VersionTarget | WeightedTarget
"""What an alias stands for. It stays plain JSON when the SDK reads it."""


class AdapterVersion(Answer):
    """One set of weights, which never changes. The digest is its identity."""

    version: int
    digest: str
    rank: int
    target_modules: tuple[str, ...]
    size_bytes: int
    status: str
    created_at: int


class Adapter(Answer):
    """A name with its versions. `aliases` has the target of each alias by its name, such as "prod"."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    created_at: int
    versions: tuple[AdapterVersion, ...]
    aliases: dict[str, AliasTarget]

    @property
    def newest(self) -> AdapterVersion | None:
        return max(self.versions, key=lambda version: version.version, default=None)


class AliasChange(Answer):
    """What an alias stands for now, and what it stood for before."""

    adapter: str
    alias: str
    target: AliasTarget | None
    previous: AliasTarget | None


class AdapterDeleted(Answer):
    """An adapter that was deleted with all its versions."""

    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    name: str
    deleted: Literal[True] = True


class VersionDeleted(Answer):
    """A version of an adapter that was deleted."""

    object: Literal["adapter.version.deleted"] = "adapter.version.deleted"
    name: str
    version: int
    deleted: Literal[True] = True
