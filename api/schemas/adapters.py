"""Defines the body of the route that changes an alias, and converts adapters and aliases to bodies of answers.

Never changes an adapter: the registry does.
"""

import math
from typing import Annotated, Self, cast

from pydantic import ConfigDict, Field, model_validator

from graftwork.adapters.format.specs import Adapter, AdapterVersion, AliasChange, AliasTarget
from graftwork.api.schemas.base import FieldError, NativeBody
from graftwork.api.schemas.shapes import exactly_one
from graftwork.platform.answers import adapters as answers

MAX_CANARIES = 16

VersionNumber = Annotated[int, Field(ge=1, lt=10**9)]
_VERSION = "^[1-9][0-9]{0,8}$"
VersionText = Annotated[str, Field(pattern=_VERSION)]
Weight = Annotated[float, Field(gt=0, le=1e6)]


class AliasBody(NativeBody):
    """The new target of an adapter's alias: one version, or several versions with weights."""

    model_config = ConfigDict(json_schema_extra=exactly_one("version", "weights"))

    version: VersionNumber | None = None
    """The version that gets all requests to the alias."""
    weights: Annotated[
        dict[VersionText, Weight] | None,
        Field(min_length=1, max_length=MAX_CANARIES, json_schema_extra={"propertyNames": {"pattern": _VERSION}}),
    ] = None
    """The weight of each version, by version number. A version gets its share of the requests to the alias."""

    @model_validator(mode="after")
    def require_one_of_both(self) -> Self:
        if (self.version is None) == (self.weights is None):
            raise ValueError("send either version or weights")
        if self.weights is not None and not math.isfinite(sum(self.weights.values())):
            raise FieldError("weights", "the weights do not sum to a number")
        return self

    def target(self) -> AliasTarget:
        if self.version is not None:
            return AliasTarget.to_version(self.version)
        weights = {int(version): share for version, share in (self.weights or {}).items()}
        return AliasTarget(tuple(sorted(weights.items())))


def adapter_answer(adapter: Adapter) -> answers.Adapter:
    """Converts an adapter, with its versions and aliases, to the body of an answer."""
    return answers.Adapter(
        id=adapter.id,
        name=adapter.name,
        created_at=int(adapter.created_at),
        versions=tuple(_version_answer(version) for version in adapter.versions),
        aliases={alias: _target_answer(target) for alias, target in adapter.aliases.items()},
    )


def alias_answer(change: AliasChange) -> answers.AliasChange:
    """Converts the change of an alias to the body of an answer, which has the new and the old target of the alias."""
    return answers.AliasChange(
        adapter=change.adapter,
        alias=change.alias,
        target=None if change.target is None else _target_answer(change.target),
        previous=None if change.previous is None else _target_answer(change.previous),
    )


def _target_answer(target: AliasTarget) -> answers.AliasTarget:
    return cast(answers.AliasTarget, target.to_json())


def _version_answer(version: AdapterVersion) -> answers.AdapterVersion:
    return answers.AdapterVersion(
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        target_modules=tuple(version.target_modules),
        size_bytes=version.size_bytes,
        status=version.status,
        created_at=int(version.created_at),
    )
