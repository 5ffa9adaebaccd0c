"""Defines the JSON answers of the routes under `/v1/adapters`."""

from typing import Literal

from typing_extensions import TypedDict  # before Python 3.12, pydantic needs the class of typing_extensions

from graftwork.platform.answers.base import Answer


class VersionTarget(TypedDict):
    """The target of an alias that always selects the same version."""

    version: int


class WeightedTarget(TypedDict):
    """The target of an alias that divides the requests for this alias among several versions.

    `weights` maps version numbers to positive weights. A version gets the fraction weight / (sum of all weights) of the
    requests.
    """

    weights: dict[str, float]


AliasTarget = VersionTarget | WeightedTarget
"""The target of an alias. The SDK returns it as plain JSON."""


class AdapterVersion(Answer):
    """One version of an adapter. Its weights never change. `digest` is a hash that identifies the weights."""

    version: int
    digest: str
    rank: int
    target_modules: tuple[str, ...]
    size_bytes: int
    status: str
    created_at: int


class Adapter(Answer):
    """An adapter with its versions. `aliases` maps the name of an alias, such as "prod", to its target."""

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
    """The result of setting or removing an alias.

    `target` is the new target, or null if the alias was removed. `previous` is the old target, or null if the alias is
    new.
    """

    adapter: str
    alias: str
    target: AliasTarget | None
    previous: AliasTarget | None


class AdapterDeleted(Answer):
    """The result of deleting an adapter with all its versions."""

    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    name: str
    deleted: Literal[True] = True


class VersionDeleted(Answer):
    """The result of deleting one version of an adapter."""

    object: Literal["adapter.version.deleted"] = "adapter.version.deleted"
    name: str
    version: int
    deleted: Literal[True] = True
