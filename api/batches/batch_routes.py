"""Defines the routes for batches in OpenAI's form."""

from fastapi import APIRouter

from graftwork.api.batches.bodies import BatchBody
from graftwork.api.batches.views import batch_answer
from graftwork.api.deps.resources import ForBatches, InferenceKey, ReadingKey
from graftwork.api.deps.route_classes import OpenAiRoute
from graftwork.api.http.pagination import PageQuery, page_answer
from graftwork.api.openapi.declare import also
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.files import Batch
from graftwork.platform.batches.batch import BatchForm
from graftwork.platform.batches.batches import NewBatch


class BatchRoute(OpenAiRoute):
    """A route for batches. POST requests support `Idempotency-Key`, because they create something."""

    is_idempotent = True


router = APIRouter(prefix="/v1/batches", tags=["batches"], route_class=BatchRoute)


@router.post("", responses=also(404, 429))
async def create_batch(body: BatchBody, resources: ForBatches, principal: InferenceKey) -> Batch:
    """Create a batch of the requests in an uploaded file. They run when nothing else does, within 24 hours."""
    life = body.output_expires_after
    new = NewBatch(
        endpoint=body.checked_endpoint(),
        input_file_id=body.input_file_id,
        client_metadata=body.metadata,
        output_lives_s=None if life is None else life.seconds,
    )
    return batch_answer(await resources.batches.create(principal, new))


@router.get("")
async def list_batches(resources: ForBatches, principal: ReadingKey, page: PageQuery) -> Page[Batch]:
    """List the batches of the tenant. By default the newest comes first."""
    return page_answer(await resources.batches.list(principal.scope(), BatchForm.OPENAI, page), batch_answer)


@router.get("/{batch_id}")
async def get_batch(batch_id: str, resources: ForBatches, principal: ReadingKey) -> Batch:
    return batch_answer(await resources.batches.get(principal.scope(), batch_id, BatchForm.OPENAI))


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, resources: ForBatches, principal: InferenceKey) -> Batch:
    """Cancel a batch. Requests that run are still answered, and the others are not begun."""
    return batch_answer(await resources.batches.cancel(principal.scope(), batch_id, BatchForm.OPENAI))
