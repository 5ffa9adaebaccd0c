"""Tests of stored token ids, and of what a turn adds to them."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.ids import CallId, CheckpointId, SessionId, TurnId
from graftwork.sessions.core.items import function_call, function_call_output, message
from graftwork.sessions.core.transcript import (
    EMPTY_TRANSCRIPT,
    Checkpoint,
    Opening,
    Transcript,
    join_chain,
    pack_token_ids,
    unpack_token_ids,
)
from graftwork.sessions.text.encoding import encode_with_template
from graftwork.sessions.text.messages import Message, ToolCall
from tests.sessions.tokenizer_and_templates import prompt_encoder

TOOL = {"type": "function", "function": {"name": "f"}}
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def checkpoint(*added: int, num_answer_items: int = 1, closed: bool = True) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=CheckpointId("ckp_1"),
        session_id=SessionId("ses_1"),
        parent_id=None,
        turn_id=TurnId("turn_1"),
        depth=1,
        num_items=3,
        num_answer_items=num_answer_items,
        num_tokens=len(added),
        token_ids=added,
        closed=closed,
        awaits_tools=False,
        created_at=0.0,
    )


@given(token_ids)
def test_packing_loses_nothing(ids: list[int]) -> None:
    """Packed ids are unpacked without a loss."""
    assert unpack_token_ids(pack_token_ids(ids)) == tuple(ids)


def test_packed_form_is_fixed() -> None:
    """Ids are packed as little-endian int32."""
    assert pack_token_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@given(st.lists(token_ids, max_size=5))
def test_chain_is_joined_in_order(parts: list[list[int]]) -> None:
    """A history's ids are the ids of its checkpoints in order."""
    assert list(join_chain(checkpoint(*part) for part in parts)) == [token for part in parts for token in part]


def test_first_prompt_has_instructions_and_tools() -> None:
    """The first turn encodes the instructions and tools."""
    opening = Opening("Be brief.", (TOOL,))

    ids = encode_with_template(prompt_encoder(), EMPTY_TRANSCRIPT.next_prompt(opening, [message("user", "Hi")]))

    assert ids == prompt_encoder().encode_messages([Message("system", "Be brief."), Message("user", "Hi")], [TOOL])


def test_delta_is_told_the_models_own_message_alone() -> None:
    """An assistant message in a turn's input is not taken for the turn's answer."""
    call_id = CallId("call_1")
    given_items = (message("user", "Hi"), message("assistant", "You said hello before."))
    answer = function_call(call_id, "f", "{}")
    transcript = Transcript((1, 2), checkpoint(1, 2, num_answer_items=1, closed=False), (*given_items, answer))

    ids = encode_with_template(
        prompt_encoder(), transcript.next_prompt(Opening(None, (TOOL,)), [function_call_output(call_id, "done")])
    )

    assistant = Message("assistant", "", (ToolCall(call_id, "f", "{}"),))
    tool = Message("tool", "done", tool_call_id=call_id, name="f")
    assert ids == prompt_encoder().encode_delta(assistant, [tool], closed=False)
