"""A history that a session begins with and no model made: items without tokens.

The first turn encodes them, behind whatever it opens with.
"""

from collections.abc import Sequence

from graftwork.platform.ids import CheckpointId, TurnId, new_id
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.session import AgentSession, Turn, TurnStatus
from graftwork.sessions.core.transcript import UNENCODED, Checkpoint


def unencoded(session: AgentSession, items: Sequence[Item]) -> Checkpoint:
    """Where a session stands that begins with items: they have no tokens before it is known what stands in front."""
    return Checkpoint(
        checkpoint_id=CheckpointId(new_id("ckp")),
        session_id=session.session_id,
        parent_id=None,
        turn_id=TurnId(new_id("turn")),
        depth=1,
        num_items=len(items),
        num_answer_items=0,
        num_tokens=0,
        token_ids=(),
        closed=True,
        awaits_tools=False,
        created_at=session.created_at,
        opening=UNENCODED,
    )


def turn_without_events(checkpoint: Checkpoint, items: Sequence[Item]) -> Turn:
    """What a checkpoint that no model made stands for in the log of turns."""
    return Turn(
        turn_id=checkpoint.turn_id,
        session_id=checkpoint.session_id,
        status=TurnStatus.COMPLETED,
        parent_id=None,
        first_seq=1,
        input=tuple(items),
        created_at=checkpoint.created_at,
        checkpoint_id=checkpoint.checkpoint_id,
        finished_at=checkpoint.created_at,
    )
