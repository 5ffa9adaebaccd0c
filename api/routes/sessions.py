"""Defines the routes that create, list, change, fork, rewind and close sessions."""

from fastapi import APIRouter

from graftwork.api.deps.resources import ForSessions, InferenceKey, ReadingKey
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.http.pagination import PageQuery, list_answer, page_answer
from graftwork.api.openapi.declare import also
from graftwork.api.schemas.sessions import ForkBody, RewindBody, SessionBody, SessionPatch
from graftwork.api.schemas.usage import totals_answer
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.sessions import ChangedSession, Prefetch, SessionState
from graftwork.sessions.core.views import prefetch_answer, session_answer, session_change_answer

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=NativeRoute)


@router.post("", status_code=201, responses=also(404, 429))
async def create_session(body: SessionBody, resources: ForSessions, principal: InferenceKey) -> SessionState:
    """Create a session. The session keeps the adapter version to which `model` points now."""
    session = await resources.sessions.create(principal, body.new_session())
    return session_answer(session, resources.base_name)


@router.get("")
async def list_sessions(resources: ForSessions, principal: ReadingKey, page: PageQuery) -> Page[SessionState]:
    found = await resources.sessions.list_sessions(principal, page)
    used = await resources.meter.of_sessions(principal.tenant_id, [session.session_id for session in found.items])
    return page_answer(
        found,
        lambda session: session_answer(session, resources.base_name, totals_answer(used.get(session.session_id))),
    )


@router.get("/{session_id}")
async def get_session(session_id: str, resources: ForSessions, principal: ReadingKey) -> SessionState:
    session = await resources.sessions.loader.load(principal.scope(), session_id)
    used = await resources.meter.of_sessions(principal.tenant_id, [session.session_id])
    return session_answer(session, resources.base_name, totals_answer(used.get(session.session_id)))


@router.patch("/{session_id}", responses=also(409))
async def change_session(
    session_id: str, body: SessionPatch, resources: ForSessions, principal: InferenceKey
) -> ChangedSession:
    """Replace the session's metadata, or move the session to another adapter version.

    A new adapter version drops the session's cached KV.
    """
    changed = await resources.sessions.change(principal, session_id, model=body.model, metadata=body.metadata)
    return session_change_answer(changed.session, resources.base_name, changed.given_up_tokens, changed.given_up_bytes)


@router.delete("/{session_id}", responses=also(409))
async def close_session(session_id: str, resources: ForSessions, principal: InferenceKey) -> SessionState:
    """Close a session, and cancel its running turn. A client can still read the session until its retention ends."""
    return session_answer(await resources.sessions.close_session(principal, session_id), resources.base_name)


@router.post("/{session_id}/fork", status_code=201, responses=also(429))
async def fork_session(
    session_id: str, body: ForkBody, resources: ForSessions, principal: InferenceKey
) -> Page[SessionState]:
    """Create sessions that share this session's history up to the checkpoint `at`, by default the latest one."""
    forks = await resources.sessions.fork(principal, session_id, body.at, body.count)
    return list_answer([session_answer(fork, resources.base_name) for fork in forks])


@router.post("/{session_id}/rewind")
async def rewind_session(
    session_id: str, body: RewindBody, resources: ForSessions, principal: InferenceKey
) -> SessionState:
    """Move the session back to an earlier checkpoint. A client can still move it to a later checkpoint afterwards."""
    return session_answer(await resources.sessions.rewind(principal, session_id, body.to), resources.base_name)


@router.post("/{session_id}/cancel")
async def cancel_session(session_id: str, resources: ForSessions, principal: InferenceKey) -> SessionState:
    """Cancel the session's running turn. Do nothing if no turn runs."""
    return session_answer(await resources.sessions.cancel(principal, session_id), resources.base_name)


@router.post("/{session_id}/suspend")
async def suspend_session(session_id: str, resources: ForSessions, principal: InferenceKey) -> SessionState:
    """Suspend the session, so that its cached KV leaves the device.

    The next turn or tool output resumes the session.
    """
    return session_answer(await resources.sessions.suspend(principal, session_id), resources.base_name)


@router.post("/{session_id}/prefetch")
async def prefetch_session(session_id: str, resources: ForSessions, principal: InferenceKey) -> Prefetch:
    """Load the session's cached KV to the device before its next turn."""
    found = await resources.sessions.prefetch(principal, session_id)
    return prefetch_answer(found.session, found.history_tokens, found.memory)
