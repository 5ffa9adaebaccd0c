"""Defines the routes for a tenant's files, in OpenAI's form."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, Depends, File, Form, Query, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import WithJsonSchema
from starlette.types import Receive, Scope, Send

from graftwork.api.batches.views import file_answer
from graftwork.api.deps.resources import ForBatches, InferenceKey, ReadingKey
from graftwork.api.deps.route_classes import OpenAiRoute, UploadRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.files import FileDeleted, FileObject
from graftwork.platform.batches.file_folder import PIECE_BYTES
from graftwork.platform.batches.files import NewFile, copy_from
from graftwork.platform.batches.stored_file import FilePurpose
from graftwork.platform.errors import InvalidRequest, PayloadTooLarge

CONTENT = "application/octet-stream"
_SHORTEST_S, _LONGEST_S = 3600, 2_592_000


class FileUploadRoute(UploadRoute, OpenAiRoute):
    """A route of OpenAI's API that receives files. POST requests support `Idempotency-Key`."""

    is_idempotent = True


router = APIRouter(prefix="/v1/files", tags=["batches"], route_class=OpenAiRoute)
uploads_router = APIRouter(prefix="/v1/files", tags=["batches"], route_class=FileUploadRoute)


async def _life(
    anchor: Annotated[
        Literal["created_at"] | None,
        WithJsonSchema({"type": "string", "pattern": "^created_at$"}),  # generated clients send no constant in a form
        Form(alias="expires_after[anchor]", description="The time from which the seconds count."),
    ] = None,
    seconds: Annotated[
        int | None,
        Form(
            alias="expires_after[seconds]",
            ge=_SHORTEST_S,
            le=_LONGEST_S,
            description="The seconds after which the file expires. The server may delete it earlier, by its own setting.",
        ),
    ] = None,
) -> float | None:
    if (anchor is None) != (seconds is None):
        raise InvalidRequest("expires_after needs both anchor and seconds, or neither.", param="expires_after")
    return seconds


@uploads_router.post("", responses=also(408, 429))
async def create_file(
    file: Annotated[UploadFile, File(description="The requests of a batch: one in JSON a line.")],
    purpose: Annotated[Literal["batch"], Form(description="What the file is for.")],
    resources: ForBatches,
    principal: InferenceKey,
    lives_s: Annotated[float | None, Depends(_life)],
) -> FileObject:
    """Upload a file with the requests of a batch. The server checks the requests when the batch is created."""
    size_bytes = file.size or 0
    if size_bytes > resources.max_file_bytes:
        raise PayloadTooLarge(
            f"The file has {size_bytes} bytes, and a file may have {resources.max_file_bytes}: split it.", param="file"
        )
    new = NewFile(FilePurpose(purpose), file.filename or "upload", lives_s)
    return file_answer(await resources.files.upload(principal.scope(), new, size_bytes, copy_from(file.file)))


@router.get("")
async def list_files(
    resources: ForBatches,
    principal: ReadingKey,
    page: PageQuery,
    purpose: Annotated[Literal["batch", "batch_output"] | None, Query()] = None,
) -> Page[FileObject]:
    """List the files of the tenant: those that were uploaded, and the output of batches."""
    wanted = None if purpose is None else FilePurpose(purpose)
    return page_answer(await resources.files.list(principal.scope(), page, wanted), file_answer)


@router.get("/{file_id}")
async def get_file(file_id: str, resources: ForBatches, principal: ReadingKey) -> FileObject:
    return file_answer(await resources.files.get(principal.scope(), file_id))


@router.delete("/{file_id}", responses=also(409))
async def delete_file(file_id: str, resources: ForBatches, principal: InferenceKey) -> FileDeleted:
    """Delete a file. A file that an unfinished batch reads cannot be deleted."""
    await resources.files.delete(principal.scope(), file_id)
    return FileDeleted(id=file_id)


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {CONTENT: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_file_content(file_id: str, resources: ForBatches, principal: ReadingKey) -> StreamingResponse:
    """Download a file."""
    scope = principal.scope()
    file = await resources.files.get(scope, file_id)
    return content_response(await resources.files.open(scope, file.id), file.size_bytes, CONTENT)


def content_response(file: BinaryIO, size_bytes: int, media_type: str) -> StreamingResponse:
    """Returns a response that sends an open file piece by piece, and then closes it."""
    return _FileResponse(file, size_bytes, media_type)


class _FileResponse(StreamingResponse):
    """A response with an open file, which it closes in any case, also if its client leaves before the first byte."""

    def __init__(self, file: BinaryIO, size_bytes: int, media_type: str) -> None:
        super().__init__(_pieces(file), media_type=media_type, headers={"content-length": str(size_bytes)})
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece
