"""Defines the route that receives the parts of an upload: raw bytes, from an offset on.

    PATCH /v1/adapter_uploads/upl_…     upload-offset: 8388608     content-type: application/octet-stream

A connection that breaks loses nothing that has arrived: the client asks for the offset, and goes on there.
"""

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from graftwork.api.deps.direct_calls import Handler
from graftwork.api.deps.resources import AdapterKey, ForAccounts, resources_of
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.http.request import BoundedRequest, PartRequest
from graftwork.api.openapi.declare import also
from graftwork.api.uploads.bodies import upload_answer
from graftwork.api.uploads.upload_routes import own_upload
from graftwork.platform.answers.adapters import VersionUpload

PART = "application/octet-stream"
_BODY = {"requestBody": {"required": True, "content": {PART: {"schema": {"type": "string", "format": "binary"}}}}}


class PartRoute(NativeRoute):
    """A route that receives bytes as they are. Holds one of the gateway's places for uploads while they arrive."""

    is_idempotent = False

    def bounded(self, request: Request) -> BoundedRequest:
        return PartRequest(request.scope, request.receive, resources_of(request).server.settings.max_upload_bytes)

    async def run(self, request: BoundedRequest, handle: Handler) -> Response:
        assert isinstance(request, PartRequest)
        with resources_of(request).account.uploads.place(request.state.principal.tenant_id) as place:
            request.hold(place)
            return await super().run(request, handle)


router = APIRouter(prefix="/v1/adapter_uploads", tags=["adapters"], route_class=PartRoute)


@router.patch("/{upload_id}", responses=also(408, 409, 413, 429), openapi_extra=_BODY)
async def append_to_upload(
    upload_id: str,
    request: Request,
    offset: Annotated[
        int,
        Header(alias="upload-offset", ge=0, lt=2**53, description="How many bytes the upload has before this part."),
    ],
    resources: ForAccounts,
    principal: AdapterKey,
) -> VersionUpload:
    """Send a part of an upload's weights: the bytes from the offset on. A wrong offset is a 409, whose `offset` is right."""
    upload = await own_upload(upload_id, resources, principal)
    uploads = resources.pending_uploads
    received = await uploads.append(principal.scope(), upload_id, offset, request.stream())
    return upload_answer(upload, received, uploads.limits.max_bytes)
