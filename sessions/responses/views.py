"""Makes the JSON bodies of responses and conversations.

Owns the shapes of these bodies, and the status that a response has after its turn. Never computes new figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.platform.answers.responses import Conversation
from graftwork.sessions.core.session import AgentSession, Turn, TurnStatus
from graftwork.sessions.responses.record import ResponseRecord

QUEUED, IN_PROGRESS = "queued", "in_progress"
_CUT = {"reason": "max_output_tokens"}


def response_body(
    record: ResponseRecord, status: str, output: Sequence[Mapping[str, Any]] = (), turn: Turn | None = None
) -> dict[str, Any]:
    """Returns the JSON body that describes a response to clients.

    `output` has the items of the answer so far. `turn` is None until the turn of the response has ended.
    """
    return {
        "id": record.response_id,
        "object": "response",
        "created_at": int(record.created_at),
        "completed_at": _completed_at(turn, status),
        "status": status,
        "error": None if turn is None else _error_body(turn),
        "incomplete_details": _CUT if status == "incomplete" else None,
        **record.echo,
        "output": list(output),
        "usage": None if turn is None or turn.usage is None else _usage_body(turn.usage),
    }


def final_status(turn: Turn) -> str:
    """Returns the status of a response whose turn has ended: `failed`, `cancelled`, `incomplete` or `completed`.

    A response is `incomplete` if its answer reached the token limit. A response that waits for tool outputs is
    `completed`.
    """
    if turn.status in (TurnStatus.FAILED, TurnStatus.CANCELLED):
        return turn.status.value
    return "incomplete" if turn.finish_reason == "length" else "completed"


def conversation_answer(session: AgentSession) -> Conversation:
    """Returns the JSON body that describes a conversation to clients."""
    return Conversation(id=session.session_id, created_at=int(session.created_at), metadata=dict(session.metadata))


def _completed_at(turn: Turn | None, status: str) -> int | None:
    if turn is None or turn.finished_at is None or status != "completed":
        return None
    return int(turn.finished_at)


def _usage_body(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a usage. Cache writes are 0, because they do not exist here."""
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }


def _error_body(turn: Turn) -> dict[str, Any] | None:
    """Returns the body of an error. Only two codes of the Responses API fit, so the message has the details."""
    if turn.error is None:
        return None
    code = "rate_limit_exceeded" if turn.error["type"] == "rate_limit_error" else "server_error"
    return {"code": code, "message": turn.error["message"]}
