"""Defines `client.exports`, `client.admin.exports` and `client.admin.retention`: archives of everything that a tenant has,
and for how many days its data is kept.

export = client.exports.wait(client.exports.create().id)
client.exports.download(export.id, "everything.zip")
"""

import hashlib
from pathlib import Path
from typing import Unpack

from typing_extensions import TypedDict

from graftwork.api.sdk.limits import tenant_path
from graftwork.api.sdk.transport.effects import Call, CloseStream, Connection, ReadStream, Sleep, Steps
from graftwork.api.sdk.transport.errors import APIConnectionError, ConfigurationError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.transport.retries import RetryPolicy, open_stream, send
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.data_rights import Export, TenantRetention

_EXPORTS = "/v1/exports"
_POLL_S = 1.0
_ENDED = ("completed", "failed")


class Exports(Resource[R]):
    """Makes and downloads archives of everything that the tenant has. Sends requests to `/v1/exports`."""

    @operation
    def create(self) -> Steps[Export]:
        """Creates an export, which the server makes in the background."""
        return (yield from self._read(Export, Call("POST", _EXPORTS, creates=True)))

    @operation
    def list(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[Export]]:
        return (yield from self._page(Export, Call("GET", _EXPORTS, query={"limit": limit, "after": after})))

    @operation
    def get(self, export_id: str) -> Steps[Export]:
        return (yield from self._read(Export, Call("GET", f"{_EXPORTS}/{path_segment(export_id)}")))

    @operation
    def wait(self, export_id: str) -> Steps[Export]:
        """Waits until an export has ended: its `status` is then `completed` or `failed`."""
        return (yield from _wait(Call("GET", f"{_EXPORTS}/{path_segment(export_id)}"), self._runtime.policy))

    @operation
    def download(self, export_id: str, path: str | Path) -> Steps[Export]:
        """Writes the archive of a completed export into a new file, and checks its digest.

        Raises ConfigurationError if the file exists, and APIConnectionError if what has arrived is not what was made.
        """
        return (
            yield from _download(Call("GET", f"{_EXPORTS}/{path_segment(export_id)}"), Path(path), self._runtime.policy)
        )

    @operation
    def delete(self, export_id: str) -> Steps[Deleted]:
        return (yield from self._read(Deleted, Call("DELETE", f"{_EXPORTS}/{path_segment(export_id)}")))


class TenantExports(Resource[R]):
    """Makes and downloads archives of everything that a tenant has, for an operator.

    Sends requests to `/v1/admin/tenants/{id}/exports`.
    """

    @operation
    def create(self, tenant_id: str) -> Steps[Export]:
        """Creates an export, which the server makes in the background."""
        return (yield from self._read(Export, Call("POST", _exports_of(tenant_id), admin=True, creates=True)))

    @operation
    def list(self, tenant_id: str, *, limit: int | None = None, after: str | None = None) -> Steps[Page[Export]]:
        call = Call("GET", _exports_of(tenant_id), query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(Export, call))

    @operation
    def get(self, tenant_id: str, export_id: str) -> Steps[Export]:
        return (yield from self._read(Export, Call("GET", _export_of(tenant_id, export_id), admin=True)))

    @operation
    def wait(self, tenant_id: str, export_id: str) -> Steps[Export]:
        """Waits until an export has ended: its `status` is then `completed` or `failed`."""
        return (yield from _wait(Call("GET", _export_of(tenant_id, export_id), admin=True), self._runtime.policy))

    @operation
    def download(self, tenant_id: str, export_id: str, path: str | Path) -> Steps[Export]:
        """Writes the archive of a completed export into a new file, as `client.exports.download` does."""
        return (
            yield from _download(
                Call("GET", _export_of(tenant_id, export_id), admin=True), Path(path), self._runtime.policy
            )
        )

    @operation
    def delete(self, tenant_id: str, export_id: str) -> Steps[Deleted]:
        return (yield from self._read(Deleted, Call("DELETE", _export_of(tenant_id, export_id), admin=True)))


class Days(TypedDict, total=False):
    """For how many days each kind of data is kept. A kind that is missing is kept for as long as the tenant exists."""

    session_days: int | None
    response_days: int | None
    file_days: int | None
    usage_days: int | None


class TenantRetentions(Resource[R]):
    """Reads and sets for how many days tenants' data is kept. Sends requests to `/v1/admin/tenants/{id}/retention`."""

    @operation
    def get(self, tenant_id: str) -> Steps[TenantRetention]:
        call = Call("GET", f"{tenant_path(tenant_id)}/retention", admin=True)
        return (yield from self._read(TenantRetention, call))

    @operation
    def set(self, tenant_id: str, **days: Unpack[Days]) -> Steps[TenantRetention]:
        """Replaces the retention of a tenant. What is older is deleted within minutes, for good."""
        call = Call("PUT", f"{tenant_path(tenant_id)}/retention", json=dict(days), admin=True)
        return (yield from self._read(TenantRetention, call))


class OwnRetention(Resource[R]):
    """Reads for how many days the server keeps the tenant's data. Sends requests to `/v1/retention`."""

    @operation
    def get(self) -> Steps[TenantRetention]:
        return (yield from self._read(TenantRetention, Call("GET", "/v1/retention")))


def _exports_of(tenant_id: str) -> str:
    return f"{tenant_path(tenant_id)}/exports"


def _export_of(tenant_id: str, export_id: str) -> str:
    return f"{_exports_of(tenant_id)}/{path_segment(export_id)}"


def _wait(call: Call, policy: RetryPolicy) -> Steps[Export]:
    while True:
        export = Export.read((yield from send(call, policy)).json())
        if export.status in _ENDED:
            return export
        yield Sleep(_POLL_S)


def _download(call: Call, path: Path, policy: RetryPolicy) -> Steps[Export]:
    """Downloads to `<path>.part` first, so that a file with the name `path` is complete and has the right digest."""
    if path.exists():
        raise ConfigurationError(f"{path} exists: give a new file, so that nothing is overwritten.")
    export = Export.read((yield from send(call, policy)).json())
    part = path.with_name(path.name + ".part")
    connection = Connection()
    content = Call("GET", f"{call.path}/content", admin=call.admin)
    yield from open_stream(content, connection, policy)
    sha256 = hashlib.sha256()
    try:
        with part.open("wb") as file:
            while (piece := (yield ReadStream(connection))) is not None:
                file.write(piece)
                sha256.update(piece)
        if sha256.hexdigest() != export.sha256:
            raise APIConnectionError(
                "What has arrived is not the archive that the server made: download it again.", code="wrong_digest"
            )
        part.replace(path)
    except Exception:
        part.unlink(missing_ok=True)
        yield CloseStream(connection)
        raise
    return export
