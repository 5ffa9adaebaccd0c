"""Tests of the rules for actions on a session."""

from dataclasses import replace

import pytest

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.errors import Conflict
from graftwork.platform.ids import CallId, CheckpointId, SessionId, TenantId, TurnId
from graftwork.sessions.core.session import (
    AgentSession,
    LedgerCall,
    SessionSettings,
    SessionStatus,
    ToolOutput,
    new_outputs,
)

ONE, TWO = CallId("call_1"), CallId("call_2")


def session(status: SessionStatus, *ledger: LedgerCall) -> AgentSession:
    return AgentSession(
        session_id=SessionId("ses_1"),
        tenant_id=TenantId("ten_1"),
        status=status,
        model=ResolvedModel("tiny", None),
        settings=SessionSettings(),
        metadata={},
        created_at=0.0,
        updated_at=0.0,
        head_id=CheckpointId("ckp_1"),
        running_turn_id=TurnId("turn_1") if status is SessionStatus.RUNNING else None,
        ledger=ledger,
    )


def ledger_call(call_id: CallId, position: int, output: str | None = None) -> LedgerCall:
    return LedgerCall(CheckpointId("ckp_1"), position, call_id, "f", "{}", output)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SessionStatus.IDLE, None),
        (SessionStatus.SUSPENDED, None),
        (SessionStatus.RUNNING, "turn_running"),
        (SessionStatus.CLOSED, "session_closed"),
    ],
)
def test_who_takes_a_turn(status: SessionStatus, code: str | None) -> None:
    """A session takes a turn unless it runs or is closed."""
    if code is None:
        session(status).check_takes_turn("ckp_1")
        return
    with pytest.raises(Conflict) as caught:
        session(status).check_takes_turn(None)
    assert caught.value.code == code


@pytest.mark.parametrize("status", [SessionStatus.AWAITING_TOOL, SessionStatus.SUSPENDED])
def test_awaited_calls_keep_users_out(status: SessionStatus) -> None:
    """A session with unanswered calls, suspended or not, refuses a user's turn and names the calls."""
    waiting = session(status, ledger_call(ONE, 0, "done"), ledger_call(TWO, 1))

    with pytest.raises(Conflict) as caught:
        waiting.check_takes_turn(None)

    assert waiting.awaited_call_ids == (TWO,)
    assert TWO in caught.value.message
    assert ONE not in caught.value.message


def test_resting_status_follows_from_the_head() -> None:
    """A session refuses a user's turn while the head's calls are answered but not used by a turn."""
    assert session(SessionStatus.RUNNING).resting_status is SessionStatus.IDLE
    assert session(SessionStatus.RUNNING, ledger_call(ONE, 0, "done")).resting_status is SessionStatus.AWAITING_TOOL


def test_outputs_are_new_once() -> None:
    """Only the first of several equal outputs is new, and none if it is stored already."""
    given = [ToolOutput(ONE, "a"), ToolOutput(ONE, "a"), ToolOutput(TWO, "b")]

    assert new_outputs({ONE: None, TWO: "b"}, given) == (ToolOutput(ONE, "a"),)


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ({ONE: "a"}, [ToolOutput(ONE, "b")]),
        ({ONE: None}, [ToolOutput(ONE, "a"), ToolOutput(ONE, "b")]),
        ({ONE: ""}, [ToolOutput(ONE, "b")]),
    ],
)
def test_outputs_that_differ(stored: dict[CallId, str | None], given: list[ToolOutput]) -> None:
    """A second, different output of a call is a conflict, even after an empty one."""
    with pytest.raises(Conflict):
        new_outputs(stored, given)


@pytest.mark.parametrize(
    ("status", "closed_at", "retention_s", "over_at"),
    [
        (SessionStatus.CLOSED, 10.0, None, 110.0),
        (SessionStatus.CLOSED, 10.0, 5.0, 15.0),
        (SessionStatus.CLOSED, 10.0, 0.0, 10.0),
        (SessionStatus.IDLE, None, 5.0, 25.0),
        (SessionStatus.AWAITING_TOOL, None, 5.0, 25.0),
        (SessionStatus.SUSPENDED, None, 5.0, 25.0),
        (SessionStatus.IDLE, None, None, None),
        (SessionStatus.IDLE, None, 0.0, None),
        (SessionStatus.RUNNING, None, 5.0, None),
        (SessionStatus.EXPIRED, None, None, 0.0),
    ],
)
def test_when_a_session_is_over(
    status: SessionStatus, closed_at: float | None, retention_s: float | None, over_at: float | None
) -> None:
    """A time to live counts from the close, or from the last change (20) if open, and never while a turn runs."""
    found = replace(session(status), closed_at=closed_at, retention_s=retention_s, updated_at=20.0)

    if over_at is None:
        assert not found.is_over(1e12, retention_s=100.0)
        return
    assert found.is_over(over_at, retention_s=100.0)
    assert over_at == 0.0 or not found.is_over(over_at - 0.001, retention_s=100.0)
