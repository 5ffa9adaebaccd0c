"""Conversations of the Responses API: a thin face on sessions.

A conversation is a session whose head its responses move, one after another. Deleting it leaves the responses that
were given in it, which can still be read and continued; with the last of them goes what it said.
"""

from collections.abc import Mapping, Sequence

from graftwork.platform.errors import NotFound
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, SessionKind
from graftwork.sessions.responses.input import check_outputs
from graftwork.sessions.service import NewSession, SessionService


class ConversationService:
    """Conversations of all tenants."""

    def __init__(self, sessions: SessionService) -> None:
        self._sessions = sessions

    async def create(
        self, principal: Principal, metadata: Mapping[str, str], items: Sequence[Item] = ()
    ) -> AgentSession:
        """A conversation that begins with these items; each response in it names its own model.

        Raises ValidationFailed where a call among them is not answered.
        """
        check_outputs(items, (), "items")
        kind = SessionKind.CONVERSATION
        new = NewSession(self._sessions.base_name, metadata=metadata, kind=kind, items=tuple(items))
        return await self._sessions.create(principal, new)

    async def get(self, principal: Principal, conversation_id: str) -> AgentSession:
        """Raises NotFound."""
        return await find_conversation(self._sessions, principal, conversation_id)

    async def change(self, principal: Principal, conversation_id: str, metadata: Mapping[str, str]) -> AgentSession:
        """Replace the metadata. Raises NotFound."""
        session = await self.get(principal, conversation_id)
        return (await self._sessions.change(principal, session.session_id, metadata=metadata)).session

    async def delete(self, principal: Principal, conversation_id: str) -> None:
        """Cancel what runs in it, and forget it. Raises NotFound."""
        session = await self.get(principal, conversation_id)
        await self._sessions.hide(principal, session.session_id)

    async def items(self, principal: Principal, conversation_id: str, page: PageRequest) -> Page[Item]:
        """One page of what was said. Raises NotFound."""
        session = await self.get(principal, conversation_id)
        return await self._sessions.items(principal, session.session_id, page)


async def find_conversation(sessions: SessionService, principal: Principal, conversation_id: str) -> AgentSession:
    """A conversation's session. Raises NotFound."""
    unknown = NotFound(
        f"The conversation {conversation_id!r} does not exist.", param="conversation", code="conversation_not_found"
    )
    try:
        session = await sessions.get(principal, conversation_id)
    except NotFound:
        raise unknown from None
    if session.kind is not SessionKind.CONVERSATION:
        raise unknown
    return session
