"""Defines the routes for conversations of the Responses API.

A conversation is a stored list of items. Clients add responses to it, one after another.
"""

from fastapi import APIRouter

from graftwork.api.deps.resources import ForSessions, InferenceKey, ReadingKey
from graftwork.api.formats.responses import ResponsesRoute
from graftwork.api.http.pagination import PageQuery, list_answer, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.responses import ConversationBody, ConversationItemsBody, ConversationPatch
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.responses import Conversation, ConversationDeleted
from graftwork.platform.answers.sessions import Item
from graftwork.sessions.core.views import item_answer
from graftwork.sessions.responses.input import read_input
from graftwork.sessions.responses.views import conversation_answer

router = APIRouter(prefix="/v1/conversations", tags=["responses"], route_class=ResponsesRoute)


@router.post("", responses=also(429))
async def create_conversation(body: ConversationBody, resources: ForSessions, principal: InferenceKey) -> Conversation:
    """Create a conversation. It starts with the items of the request, or empty.

    A request with items counts in the tenant's limits of requests.
    """
    made = await resources.conversations.create(principal, body.metadata or {}, body.first_items())
    return conversation_answer(made)


@router.get("/{conversation_id}")
async def get_conversation(conversation_id: str, resources: ForSessions, principal: ReadingKey) -> Conversation:
    return conversation_answer(await resources.conversations.get(principal, conversation_id))


@router.post("/{conversation_id}", responses=also(409))
async def change_conversation(
    conversation_id: str, body: ConversationPatch, resources: ForSessions, principal: InferenceKey
) -> Conversation:
    """Replace the metadata of a conversation."""
    return conversation_answer(await resources.conversations.change(principal, conversation_id, body.metadata))


@router.delete("/{conversation_id}")
async def delete_conversation(
    conversation_id: str, resources: ForSessions, principal: InferenceKey
) -> ConversationDeleted:
    """Delete a conversation. The server keeps its responses."""
    await resources.conversations.delete(principal, conversation_id)
    return ConversationDeleted(id=conversation_id)


@router.get("/{conversation_id}/items")
async def list_conversation_items(
    conversation_id: str, resources: ForSessions, principal: ReadingKey, page: PageQuery
) -> Page[Item]:
    """List the items of a conversation. By default the newest item comes first."""
    return page_answer(await resources.conversations.items(principal, conversation_id, page), item_answer)


@router.post("/{conversation_id}/items", responses=also(409, 429))
async def create_conversation_items(
    conversation_id: str, body: ConversationItemsBody, resources: ForSessions, principal: InferenceKey
) -> Page[Item]:
    """Add items to the end of a conversation, for example what was said elsewhere.

    The request counts in the tenant's limits of requests. A conversation may have 10,000 items, and 16 MiB of them.
    """
    entries = read_input(body.items, "items")
    added = await resources.conversations.add_items(principal, conversation_id, entries)
    return list_answer([item_answer(item) for item in added])


@router.get("/{conversation_id}/items/{item_id}")
async def get_conversation_item(
    conversation_id: str, item_id: str, resources: ForSessions, principal: ReadingKey
) -> Item:
    """Get one item of a conversation."""
    return item_answer(await resources.conversations.item(principal, conversation_id, item_id))


@router.delete("/{conversation_id}/items/{item_id}", responses=also(409))
async def delete_conversation_item(
    conversation_id: str, item_id: str, resources: ForSessions, principal: InferenceKey
) -> Conversation:
    """Delete an item of a conversation, and with a tool call its output, with an output its call.

    Later responses in the conversation do not see the item. The answer is the conversation.
    """
    return conversation_answer(await resources.conversations.delete_item(principal, conversation_id, item_id))
