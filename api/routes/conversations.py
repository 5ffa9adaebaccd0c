"""Conversations of the Responses API: where responses are given one after another."""

from typing import Any

from fastapi import APIRouter

from graftwork.api.deps.dependencies import AppResources, InferenceKey
from graftwork.api.formats.responses import ResponsesRoute
from graftwork.api.http.pagination import AskedPage, list_body
from graftwork.api.schemas.responses import ConversationBody, ConversationPatch
from graftwork.sessions.responses.views import conversation_body

router = APIRouter(prefix="/v1/conversations", tags=["responses"], route_class=ResponsesRoute)


@router.post("")
async def create_conversation(
    body: ConversationBody, resources: AppResources, principal: InferenceKey
) -> dict[str, Any]:
    """A conversation, empty or beginning with what was said elsewhere."""
    made = await resources.conversations.create(principal, body.metadata or {}, body.first_items())
    return conversation_body(made)


@router.get("/{conversation_id}")
async def get_conversation(conversation_id: str, resources: AppResources, principal: InferenceKey) -> dict[str, Any]:
    return conversation_body(await resources.conversations.get(principal, conversation_id))


@router.post("/{conversation_id}")
async def change_conversation(
    conversation_id: str, body: ConversationPatch, resources: AppResources, principal: InferenceKey
) -> dict[str, Any]:
    """Other metadata."""
    return conversation_body(await resources.conversations.change(principal, conversation_id, body.metadata))


@router.delete("/{conversation_id}")
async def delete_conversation(conversation_id: str, resources: AppResources, principal: InferenceKey) -> dict[str, Any]:
    """Forget a conversation; the responses that were given in it stay."""
    await resources.conversations.delete(principal, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get("/{conversation_id}/items")
async def list_conversation_items(
    conversation_id: str, resources: AppResources, principal: InferenceKey, page: AskedPage
) -> dict[str, Any]:
    """What was said, newest first unless asked otherwise."""
    return list_body(await resources.conversations.items(principal, conversation_id, page), lambda item: item.body)
