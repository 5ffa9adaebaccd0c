"""Defines the body of the route that begins an upload in parts or a fetch, and converts uploads to bodies of answers."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from graftwork.adapters.format.lora_config import MAX_CONFIG_BYTES
from graftwork.adapters.format.specs import Provenance
from graftwork.adapters.inspection.upload import Push
from graftwork.adapters.sources.source import parse_source
from graftwork.adapters.uploads.pending_upload import PendingUpload, UploadStatus
from graftwork.adapters.uploads.uploads import NewFetch, NewUpload
from graftwork.api.schemas.base import FieldError, NativeBody
from graftwork.api.schemas.shapes import exactly_one, given, never
from graftwork.platform.answers import adapters as answers
from graftwork.platform.quotas.limits import end_user_id
from graftwork.platform.tenancy.limit_book import MAX_USER_CHARACTERS
from graftwork.platform.tenancy.principals import Principal

Digest = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class UploadBody(NativeBody):
    """A version whose weights the client sends in parts, or whose files the server fetches."""

    model_config = ConfigDict(
        json_schema_extra=exactly_one("source", "size_bytes")
        | never([given("size_bytes"), {"not": given("digest")}], [given("source"), given("config")])
    )

    name: Annotated[str, Field(json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"})]
    """The name of the adapter. An existing adapter with this name gets a new version."""
    source: Annotated[str | None, Field(min_length=1, max_length=2000)] = None
    """Where the server fetches the files: `hf:ORGANISATION/NAME@REVISION`, `s3://BUCKET/PREFIX` or `https://…`."""
    size_bytes: Annotated[int | None, Field(ge=1, lt=2**53)] = None
    """The length of the weights, if the client sends them."""
    config: Annotated[str | None, Field(max_length=MAX_CONFIG_BYTES)] = None
    """The text of adapter_config.json, if the client sends the weights. Null for a GGUF file, which has its own."""
    digest: Digest | None = None
    """`sha256:…` of the configuration and the weights, one after the other. An `https://` source and an upload need it."""
    promote: bool = True
    """False keeps the version from being what the adapter's plain name stands for."""
    run: Annotated[str | None, Field(max_length=200)] = None
    """The training run that made the version, as an id or an address."""
    parent: Annotated[str | None, Field(max_length=80)] = None
    """The version from which it was trained, such as `support@3`."""
    data_digest: Digest | None = None
    """The digest of the training data."""
    user: Annotated[str | None, Field(min_length=1, max_length=MAX_USER_CHARACTERS)] = None
    """The end user in whose limit of adapters a new adapter counts."""

    @model_validator(mode="after")
    def require_one_of_both(self) -> Self:
        if (self.source is None) == (self.size_bytes is None):
            raise ValueError("send either source or size_bytes")
        if self.size_bytes is not None and self.digest is None:
            raise FieldError("digest", "an upload needs the digest of its files")
        if self.source is not None and self.config is not None:
            raise FieldError("config", "a source has its own configuration")
        return self

    def fetch(self, principal: Principal) -> NewFetch | None:
        """Returns the fetch; None if the client sends the weights. Raises ValidationFailed for a wrong source."""
        if self.source is None:
            return None
        return NewFetch(self.name, parse_source(self.source), self.digest, self._push(principal))

    def upload(self, principal: Principal) -> NewUpload:
        assert self.size_bytes is not None
        assert self.digest is not None
        config = None if self.config is None else self.config.encode()
        return NewUpload(self.name, config, self.size_bytes, self.digest, self._push(principal))

    def _push(self, principal: Principal) -> Push:
        origin = Provenance(None, self.run or None, self.parent or None, self.data_digest)
        end_user = end_user_id(principal.tenant_id, self.user)
        return Push(principal.key_id, not self.promote, origin, key_id=principal.limits_id, end_user_id=end_user)


def upload_answer(upload: PendingUpload, received_bytes: int | None, max_bytes: int) -> answers.VersionUpload:
    """Converts an upload to the body of an answer. `received_bytes` says how much of its weights has arrived.

    A fetch has the length `max_bytes` as long as its source has not said another.
    """
    is_known = upload.status is not UploadStatus.FETCHING or upload.size_bytes < max_bytes
    error = upload.error
    return answers.VersionUpload(
        id=upload.id,
        name=upload.name,
        status=upload.status,
        source=None if upload.source is None else upload.source.shown,
        size_bytes=upload.size_bytes if is_known else None,
        received_bytes=received_bytes,
        digest=upload.digest,
        version=upload.version,
        error=None if error is None else {"code": error["code"], "message": error["message"], "param": error["param"]},
        created_at=int(upload.created_at),
        expires_at=int(upload.expires_at),
    )
