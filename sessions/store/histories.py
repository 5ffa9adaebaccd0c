"""Changes the history of a session without a turn of the model: adds items of a client, and hides items.

Also finds the checkpoints of a session, and starts the ledger of a session that comes to rest at a checkpoint.
Runs in the caller's transaction, which has locked the session; never opens or commits one. Never stores the session
itself: the caller does.
Invariant: a stored checkpoint or item never changes. A new checkpoint at the end adds items or hides them, so that
histories that share the earlier checkpoints stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graftwork.platform.database import ReadSession, WriteSession
from graftwork.platform.errors import NotFound, PayloadTooLarge
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.items import Item, with_counterpart
from graftwork.sessions.core.session import AgentSession, LedgerCall, given_history
from graftwork.sessions.core.transcript import Checkpoint
from graftwork.sessions.store import session_rows, turn_rows
from graftwork.sessions.store.turn_outcome import ledger_of


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """The most that clients may add to a history without a response. Items that are hidden count too, because the
    database keeps them.
    """

    num_items: int = 10_000
    num_characters: int = 16 * 1024 * 1024
    """Of the items' JSON."""


DEFAULT_LIMITS = HistoryLimits()


async def add_items(
    database: WriteSession,
    scope: TenantScope,
    session: AgentSession,
    parent: Checkpoint | None,
    items: Sequence[Item],
    now: float,
    limits: HistoryLimits,
) -> AgentSession:
    """Adds items to the end of the history that ends at the checkpoint `parent`. Returns the session with its new head.

    If `parent` is None, the history is empty. `now` is in Unix seconds. Raises PayloadTooLarge if the history would
    exceed a limit; the caller then rolls the transaction back.
    """
    turn, checkpoint = given_history(session, items, parent, now)
    await turn_rows.insert_turn(database, scope, turn)
    if checkpoint.num_items > limits.num_items:
        raise _too_long(f"{checkpoint.num_items} items", f"{limits.num_items}")
    await turn_rows.insert_checkpoint(database, scope, checkpoint, items)
    num_characters = await turn_rows.count_characters(database, scope, checkpoint.checkpoint_id)
    if num_characters > limits.num_characters:
        raise _too_long(f"{num_characters} characters of JSON", f"{limits.num_characters}")
    return replace(session, head_id=checkpoint.checkpoint_id)


async def hide_item(
    database: WriteSession, scope: TenantScope, session: AgentSession, item_id: str, now: float
) -> AgentSession:
    """Hides an item of the session's history. Returns the session with its new head and a higher epoch.

    A tool call and its output are hidden together, so that neither is in a prompt without the other. A hidden call is
    no longer in the ledger. If the item is hidden already, returns the session unchanged. Raises NotFound if the history
    never had the item. `now` is in Unix seconds.
    """
    parent = await own_checkpoint(database, scope, session, session.head_id)
    if parent is None or await _find_item(database, scope, parent, item_id) is None:
        raise NotFound(f"The conversation has no item {item_id!r}.", param="item_id", code="item_not_found")
    hidden = with_counterpart(await turn_rows.find_all_items(database, scope, parent.checkpoint_id), item_id)
    if not hidden:
        return session
    gone = {item.call_id for item in hidden if item.is_call}
    waiting = [call for call in session.ledger if call.call_id not in gone]
    turn, checkpoint = given_history(replace(session, ledger=tuple(waiting)), (), parent, now)
    await turn_rows.insert_turn(database, scope, turn)
    await turn_rows.insert_checkpoint(database, scope, checkpoint, ())
    await turn_rows.hide_items(database, scope, checkpoint, hidden)
    ledger = tuple(
        replace(call, checkpoint_id=checkpoint.checkpoint_id, position=position)
        for position, call in enumerate(waiting)
    )
    await session_rows.insert_ledger(database, scope, session.session_id, ledger)
    return replace(session, head_id=checkpoint.checkpoint_id, epoch=session.epoch + 1, ledger=ledger)


async def open_ledger(
    database: WriteSession,
    scope: TenantScope,
    checkpoint: Checkpoint | None,
    sessions: Sequence[AgentSession],
) -> tuple[LedgerCall, ...]:
    """Stores the tool calls at the end of the checkpoint for each session, all without outputs.

    Returns these calls.
    """
    if checkpoint is None or not checkpoint.awaits_tools:
        return ()
    items = await turn_rows.find_items(database, scope, checkpoint.checkpoint_id)
    if not items:  # the checkpoint only hides items: the calls are in an earlier one
        items = await turn_rows.find_all_items(database, scope, checkpoint.checkpoint_id)
    ledger = ledger_of(checkpoint, items)
    for session in sessions:
        await session_rows.insert_ledger(database, scope, session.session_id, ledger)
    return ledger


async def own_checkpoint(
    database: ReadSession, scope: TenantScope, session: AgentSession, checkpoint_id: str | None
) -> Checkpoint | None:
    """Finds a checkpoint that the session made, or that it shares with the session from which it was forked.

    Returns None if `checkpoint_id` is None. Raises NotFound for any other checkpoint.
    """
    if checkpoint_id is None:
        return None
    found = await turn_rows.find_checkpoint(database, scope, checkpoint_id)
    if found is not None:
        if found.session_id == session.session_id:
            return found
        if session.origin_id and await turn_rows.is_in_chain(database, scope, session.origin_id, checkpoint_id):
            return found
    raise NotFound(f"The checkpoint {checkpoint_id} does not exist in this session.", code="checkpoint_not_found")


def _too_long(would_have: str, most: str) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"items: the conversation would have {would_have}, with deleted items, and may have {most}: begin another "
        "conversation.",
        param="items",
        code="conversation_too_long",
    )


async def _find_item(database: ReadSession, scope: TenantScope, head: Checkpoint, item_id: str) -> Item | None:
    return await turn_rows.find_item_in(database, scope, head.checkpoint_id, item_id, or_hidden=True)
