"""Defines the JSON answers of the routes under `/v1/adapters`."""

from typing import Any, Literal

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


class Provenance(TypedDict):
    """Where a version comes from, as whoever pushed it says."""

    pushed_by: str | None
    """The id of the API key that pushed it."""
    run: str | None
    """The training run."""
    parent: str | None
    """The version from which it was trained, such as `support@3`."""
    data_digest: str | None
    """The digest of the training data."""
    source: str | None
    """Where the server fetched the files; null if a client sent them."""


class AdapterVersion(Answer):
    """One version of an adapter. Its weights never change. `digest` is a hash that identifies the weights."""

    version: int
    digest: str
    rank: int
    target_modules: tuple[str, ...]
    size_bytes: int
    status: str
    """`ready`, or `deleted` while the version can be restored."""
    held: bool
    """Whether the adapter's plain name passes this version over, because it was pushed without being promoted."""
    created_at: int
    base: str
    """The fingerprint of the base model for which the version was made."""
    provenance: Provenance


class Adapter(Answer):
    """An adapter with its versions. `aliases` maps the name of an alias, such as "prod", to its target."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    created_at: int
    versions: tuple[AdapterVersion, ...]
    aliases: dict[str, AliasTarget]
    tags: tuple[str, ...]
    defaults: dict[str, Any]
    """What requests have unless they say otherwise: `system`, `sampling`, `response_format`, `tools`."""
    deleted_versions: tuple[AdapterVersion, ...]
    """The versions that were deleted and can be restored. No request gets them."""

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


class AliasEvent(Answer):
    """One change in the history of an alias."""

    id: str
    """The number of the change among those of the alias."""
    object: Literal["adapter.alias_event"] = "adapter.alias_event"
    target: AliasTarget | None
    """The new target, or null if the alias was removed."""
    reason: str
    """`set`, `removed` or `rollback`, or what a roll-out did."""
    actor: str
    """The id of the API key that made the change, or the operator."""
    at: int


class RolloutStep(TypedDict):
    """A step of a roll-out."""

    weight: float
    """The share of the new version in percent, above 0 and below 100."""
    seconds: float
    """How long the step lasts at least."""


class RolloutLimits(TypedDict):
    """By how much a new version may be worse than the stable one. Null sets no limit."""

    min_requests: int
    error_rate: float | None
    refusal_rate: float | None
    first_token_ratio: float | None


class VersionFigures(TypedDict):
    """What all gateways have counted of one version in the present step of a roll-out."""

    requests: int
    errors: int
    refusals: int
    first_token_s: float | None
    """The median of the seconds to the first token."""


class Rollout(Answer):
    """A roll-out: a new version that takes over an alias step by step, or is rolled back."""

    id: str
    object: Literal["adapter.rollout"] = "adapter.rollout"
    adapter: str
    alias: str
    version: int
    stable: int
    """The version that the alias led to before."""
    steps: tuple[RolloutStep, ...]
    limits: RolloutLimits
    state: str
    """`running`, `completed`, `rolled_back` or `cancelled`."""
    step: int
    """The index of the step that runs, or that ran last."""
    step_began_at: int
    created_at: int
    ended_at: int | None
    reason: str | None
    """Why the roll-out was rolled back or cancelled."""
    figures: dict[str, VersionFigures]
    """The figures of the present step, by version number."""


class UploadError(TypedDict):
    """Why an upload has failed."""

    code: str
    message: str
    param: str | None
    """The field or tensor at fault."""


class VersionUpload(Answer):
    """A version that is not there yet: the client sends its weights in parts, or the server fetches its files."""

    id: str
    object: Literal["adapter.upload"] = "adapter.upload"
    name: str
    """The name of the adapter."""
    status: str
    """`receiving`, `fetching`, `inspecting`, `ready` or `failed`."""
    source: str | None
    """Where the server fetches the files, without the query of a URL; null if the client sends them."""
    size_bytes: int | None
    """The length of the weights. Null while a source has not said it."""
    received_bytes: int | None
    """How many of them have arrived: the offset of the next part. Null if this gateway does not have them."""
    digest: str | None
    """`sha256:…` of the files, one after the other."""
    version: int | None
    """The version that a ready upload has become."""
    error: UploadError | None
    created_at: int
    expires_at: int


class UploadCancelled(Answer):
    """The result of cancelling an upload."""

    id: str
    object: Literal["adapter.upload.deleted"] = "adapter.upload.deleted"
    deleted: Literal[True] = True


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
