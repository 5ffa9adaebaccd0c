"""Defines the body of the route that changes an alias, and converts adapters and aliases to bodies of answers.

Never changes an adapter: the registry does.
"""

import math
from typing import Annotated, Self, cast

from pydantic import ConfigDict, Field, model_validator

from graftwork.adapters.format.defaults import AdapterDefaults
from graftwork.adapters.format.specs import Adapter, AdapterVersion, AliasChange, AliasEvent, AliasTarget
from graftwork.adapters.registry.details import MAX_TAGS, AdapterChange
from graftwork.api.schemas.base import FieldError, NativeBody, ToolList
from graftwork.api.schemas.shapes import ResponseFormatJson, SamplingJson, exactly_one
from graftwork.platform.answers import adapters as answers
from graftwork.sessions.turns.settings import read_sampling

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


TAG = "^[a-z0-9][a-z0-9._:/-]{0,62}$"
TagText = Annotated[str, Field(pattern=TAG)]
_MAX_SYSTEM = 32_768


class DefaultsBody(NativeBody):
    """What requests to an adapter have unless they say otherwise."""

    system: Annotated[str | None, Field(max_length=_MAX_SYSTEM)] = None
    """The system prompt of a conversation that has none."""
    sampling: SamplingJson = None
    response_format: ResponseFormatJson = None
    tools: ToolList | None = None
    """The tools of a request that names none. A request with an empty list has none."""

    def defaults(self) -> AdapterDefaults:
        """Returns the defaults. Raises ValidationFailed for a wrong sampling field."""
        read_sampling(self.sampling or {})
        tools = tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())
        return AdapterDefaults(self.system or None, self.sampling or {}, self.response_format, tools)


class AdapterPatch(NativeBody):
    """The body of a request that changes an adapter. A missing field changes nothing."""

    tags: Annotated[list[TagText] | None, Field(max_length=MAX_TAGS)] = None
    """The new tags."""
    defaults: DefaultsBody | None = None
    """The new defaults. An empty object removes them."""

    def change(self) -> AdapterChange:
        defaults = None if self.defaults is None else self.defaults.defaults()
        return AdapterChange(None if self.tags is None else tuple(self.tags), defaults)


def adapter_answer(adapter: Adapter) -> answers.Adapter:
    """Converts an adapter, with its versions and aliases, to the body of an answer."""
    return answers.Adapter(
        id=adapter.id,
        name=adapter.name,
        created_at=int(adapter.created_at),
        versions=tuple(_version_answer(version) for version in adapter.versions),
        aliases={alias: _target_answer(target) for alias, target in adapter.aliases.items()},
        tags=adapter.tags,
        defaults=adapter.defaults.to_json(),
        deleted_versions=tuple(_version_answer(version) for version in adapter.deleted_versions),
    )


def alias_answer(change: AliasChange) -> answers.AliasChange:
    """Converts the change of an alias to the body of an answer, which has the new and the old target of the alias."""
    return answers.AliasChange(
        adapter=change.adapter,
        alias=change.alias,
        target=None if change.target is None else _target_answer(change.target),
        previous=None if change.previous is None else _target_answer(change.previous),
    )


def event_answer(event: AliasEvent) -> answers.AliasEvent:
    """Converts one change in an alias's history to the body of an answer."""
    return answers.AliasEvent(
        id=event.id,
        target=None if event.target is None else _target_answer(event.target),
        reason=event.reason,
        actor=event.actor,
        at=int(event.at),
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
        held=version.is_held,
        base=version.base,
        provenance=answers.Provenance(
            pushed_by=version.provenance.pushed_by,
            run=version.provenance.run,
            parent=version.provenance.parent,
            data_digest=version.provenance.data_digest,
            source=version.provenance.source,
        ),
        created_at=int(version.created_at),
    )
