"""Creates, reads, changes and deletes the conversations of the Responses API.

A conversation is stored as a session, and each response in the conversation is a turn of this session.
Never runs a response. After a conversation is deleted, clients can still read and continue its responses. The rows of
the conversation are deleted with its last response.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from graftwork.platform.errors import NotFound
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, SessionKind
from graftwork.sessions.responses.input import check_outputs
from graftwork.sessions.responses.references import InputEntry, resolve_references
from graftwork.sessions.service import NewSession, SessionService
from graftwork.sessions.turns.running import may_be_id


class ConversationService:
    """Creates, reads, changes and deletes conversations, for all tenants."""

    def __init__(self, sessions: SessionService) -> None:
        self._sessions = sessions

    async def create(
        self, principal: Principal, metadata: Mapping[str, str], items: Sequence[InputEntry] = ()
    ) -> AgentSession:
        """Creates a conversation whose history starts with `items`. References become copies of the stored items.

        The conversation has no model of its own: each request for a response in the conversation names a model.
        A request with items counts in the tenant's limits of requests.
        Raises ValidationFailed if a tool call in `items` has no output, NotFound if a reference leads to no item,
        LimitExceeded, and PayloadTooLarge if the items are too many or too long.
        """
        async with self._counted(principal, items):
            first_items = await resolve_references(self._sessions.store, principal.scope(), items)
            check_outputs(first_items, (), "items")
            kind = SessionKind.CONVERSATION
            new = NewSession(self._sessions.base_name, metadata=metadata, kind=kind, items=first_items)
            return await self._sessions.create(principal, new)

    async def get(self, principal: Principal, conversation_id: str) -> AgentSession:
        """Returns the session that stores a conversation. Raises NotFound if the conversation does not exist."""
        return await find_conversation(self._sessions, principal, conversation_id)

    async def change(self, principal: Principal, conversation_id: str, metadata: Mapping[str, str]) -> AgentSession:
        """Replaces the metadata of a conversation. Raises NotFound if the conversation does not exist."""
        session = await self.get(principal, conversation_id)
        return (await self._sessions.change(principal, session.session_id, metadata=metadata)).session

    async def delete(self, principal: Principal, conversation_id: str) -> None:
        """Cancels the response that runs in a conversation, and deletes the conversation.

        Raises NotFound if the conversation does not exist.
        """
        session = await self.get(principal, conversation_id)
        await self._sessions.hide(principal, session.session_id)

    async def add_items(
        self, principal: Principal, conversation_id: str, entries: Sequence[InputEntry]
    ) -> tuple[Item, ...]:
        """Adds items to the end of a conversation, and returns them with their ids.

        The next response in the conversation encodes the whole history again. The request counts in the tenant's limits
        of requests.
        Raises Conflict while a response runs, ValidationFailed if a tool call has no output, NotFound, LimitExceeded, and
        PayloadTooLarge if the conversation would have too many items or too long ones.
        """
        conversation = await self.get(principal, conversation_id)
        conversation.check_at_rest()
        async with self._counted(principal, entries):
            items = await resolve_references(self._sessions.store, principal.scope(), entries)
            check_outputs(items, [call.call_id for call in conversation.ledger], "items")
            await self._sessions.store.add_items(principal.scope(), conversation, items)
        return items

    def _counted(self, principal: Principal, entries: Sequence[InputEntry]) -> AbstractAsyncContextManager[None]:
        """Counts a request that stores items in the tenant's limits of requests."""
        return self._sessions.counted(principal) if entries else nullcontext()

    async def item(self, principal: Principal, conversation_id: str, item_id: str) -> Item:
        """Reads one item of a conversation. Raises NotFound if the conversation has no item with this id."""
        conversation = await self.get(principal, conversation_id)
        found = None
        if may_be_id(item_id):
            found = await self._sessions.store.find_item(principal.scope(), conversation, item_id)
        if found is None:
            raise _no_item(item_id)
        return found

    async def delete_item(self, principal: Principal, conversation_id: str, item_id: str) -> AgentSession:
        """Takes an item out of a conversation: out of its later prompts and its lists. Returns the conversation.

        A tool call and its output go together. Responses that exist already keep the item, and so do the responses that
        continue them. Does nothing if the item is deleted already.
        Raises Conflict while a response runs, and NotFound if the conversation never had the item.
        """
        conversation = await self.get(principal, conversation_id)
        if not may_be_id(item_id):
            raise _no_item(item_id)
        return await self._sessions.store.hide_item(principal.scope(), conversation.session_id, item_id)

    async def items(self, principal: Principal, conversation_id: str, page: PageRequest) -> Page[Item]:
        """Reads one page of a conversation's items. Raises NotFound if the conversation does not exist."""
        session = await self.get(principal, conversation_id)
        return await self._sessions.items(principal, session.session_id, page)


async def find_conversation(sessions: SessionService, principal: Principal, conversation_id: str) -> AgentSession:
    """Returns the session that stores a conversation. Raises NotFound if the conversation does not exist."""
    unknown = NotFound(
        f"The conversation {conversation_id!r} does not exist.", param="conversation", code="conversation_not_found"
    )
    try:
        session = await sessions.loader.load(principal.scope(), conversation_id)
    except NotFound:
        raise unknown from None
    if session.kind is not SessionKind.CONVERSATION:
        raise unknown
    return session


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"The conversation has no item {item_id!r}.", param="item_id", code="item_not_found")
