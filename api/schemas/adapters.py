"""Bodies of the alias route, and how adapters look in answers."""

import math
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from graftwork.adapters.format.specs import Adapter, AdapterVersion, AliasChange, AliasTarget
from graftwork.api.schemas.base import FieldComplaint, NativeBody

MAX_CANARIES = 16

VersionNumber = Annotated[int, Field(ge=1, lt=10**9)]
VersionText = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Weight = Annotated[float, Field(gt=0, le=1e6)]


class AliasBody(NativeBody):
    """One version, or a canary over several."""

    version: VersionNumber | None = None
    weights: Annotated[dict[VersionText, Weight] | None, Field(min_length=1, max_length=MAX_CANARIES)] = None

    @model_validator(mode="after")
    def one_of_both(self) -> Self:
        if (self.version is None) == (self.weights is None):
            raise ValueError("send either version or weights")
        if self.weights is not None and not math.isfinite(sum(self.weights.values())):
            raise FieldComplaint("weights", "the weights do not sum to a number")
        return self

    def target(self) -> AliasTarget:
        if self.version is not None:
            return AliasTarget.to_version(self.version)
        weights = {int(version): share for version, share in (self.weights or {}).items()}
        return AliasTarget(tuple(sorted(weights.items())))


def adapter_body(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.id,
        "object": "adapter",
        "name": adapter.name,
        "created_at": int(adapter.created_at),
        "versions": [_version_body(version) for version in adapter.versions],
        "aliases": {alias: target.to_json() for alias, target in adapter.aliases.items()},
    }


def alias_body(change: AliasChange) -> dict[str, Any]:
    return {
        "adapter": change.adapter,
        "alias": change.alias,
        "target": change.target.to_json() if change.target else None,
        "previous": change.previous.to_json() if change.previous else None,
    }


def _version_body(version: AdapterVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "digest": version.digest,
        "rank": version.rank,
        "target_modules": list(version.target_modules),
        "size_bytes": version.size_bytes,
        "status": version.status,
        "created_at": int(version.created_at),
    }
