"""Draws a session with its turns and its forks as a tree: tokens, and the cache tiers that had the KV of each prompt.

    ses_01h…  idle  pirate@1  2 turns, 96 tokens, kept: device 96
    ├─ turn 1  completed      prompt 40 = recomputed 40          answer 12
    ├─ turn 2  awaiting_tool  prompt 80 = device 48, recomputed 32  answer 16
    └─ ses_01j…  idle  pirate@1  …

Reads sessions and their events; never changes one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graftwork.platform.answers.session_events import (
    SessionEvent,
    TurnAwaitingTool,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnFailed,
)
from graftwork.platform.answers.sessions import SessionCache, SessionState
from graftwork.platform.answers.usage import PromptTokensDetails

if TYPE_CHECKING:
    from graftwork.api.sdk.client import Graftwork

_PAGE = 100
TIERS = ("device", "host", "disk", "recomputed")
_ENDS = (TurnCompleted, TurnAwaitingTool, TurnFailed, TurnCancelled)


@dataclass(slots=True)
class TurnLine:
    """What is shown of one turn."""

    status: str = "running"
    prompt: PromptTokensDetails | None = None
    """None while the prompt waits, and for a turn that the engine has not admitted."""
    miss_reason: str | None = None
    answer_tokens: int | None = None


@dataclass(slots=True)
class Branch:
    """One session with its turns and forks."""

    state: SessionState
    turns: Sequence[TurnLine] = ()
    cache: SessionCache | None = None
    forks: "list[Branch]" = field(default_factory=list)


def read_tree(client: "Graftwork", session_id: str) -> Branch:
    """Reads the session with all its forks, and their forks. Raises NotFoundError for an unknown session."""
    root = Branch(client.sessions.get(session_id).state)
    branches = {session_id: root}
    newer = [state for state in _states(client) if state.created_at >= root.state.created_at]
    for state in sorted(newer, key=lambda one: (one.created_at, one.id)):
        parent = branches.get(state.forked_from or "")
        if parent is not None and state.id not in branches:
            branches[state.id] = Branch(state)
            parent.forks.append(branches[state.id])
    for branch in branches.values():
        session = client.sessions.get(branch.state.id)
        branch.cache = session.cache()
        if branch.state.last_seq:
            with session.events() as events:
                branch.turns = turns_of(_until(events, branch.state.last_seq))
    return root


def _states(client: "Graftwork") -> Iterator[SessionState]:
    page = client.sessions.list(limit=_PAGE)
    yield from page
    while page.has_more:
        page = client.sessions.list(limit=_PAGE, after=page.last_id)
        yield from page


def _until(events: Iterable[SessionEvent], last_seq: int) -> Iterator[SessionEvent]:
    for event in events:
        yield event
        if event.seq >= last_seq:
            return


def turns_of(events: Iterable[SessionEvent]) -> list[TurnLine]:
    """Returns the turns that the events of a session tell of, the oldest first."""
    turns: dict[str, TurnLine] = {}
    for event in events:
        turn = turns.setdefault(event.turn_id, TurnLine())
        if isinstance(event, TurnCreated) and event.cache is not None:
            turn.prompt, turn.miss_reason = event.cache, event.cache.miss_reason
        elif isinstance(event, _ENDS):
            turn.status = event.type.removeprefix("turn.")
            if isinstance(event, TurnCompleted | TurnAwaitingTool) and event.usage is not None:
                turn.prompt, turn.answer_tokens = event.usage.prompt_tokens_details, event.usage.completion_tokens
    return [*turns.values()]


def tree_lines(branch: Branch) -> list[str]:
    """Returns the lines of the tree."""
    turns = [_turn_text(number, turn) for number, turn in enumerate(branch.turns, start=1)]
    children = [[text] for text in turns] + [tree_lines(fork) for fork in branch.forks]
    lines = [_head(branch)]
    for place, child in enumerate(children, start=1):
        is_last = place == len(children)
        lines.append(("└─ " if is_last else "├─ ") + child[0])
        lines += [("   " if is_last else "│  ") + text for text in child[1:]]
    return lines


def tree_body(branch: Branch) -> dict[str, object]:
    """Returns the tree as an object that JSON can hold."""
    return {
        **branch.state.raw,
        "cache": None if branch.cache is None else branch.cache.raw,
        "turns": [
            {
                "status": turn.status,
                "prompt_tokens_by_tier": _by_tier(turn),
                "miss_reason": turn.miss_reason,
                "completion_tokens": turn.answer_tokens,
            }
            for turn in branch.turns
        ],
        "forks": [tree_body(fork) for fork in branch.forks],
    }


def _by_tier(turn: TurnLine) -> dict[str, int]:
    return {} if turn.prompt is None else {tier: getattr(turn.prompt, f"{tier}_tokens") for tier in TIERS}


def _head(branch: Branch) -> str:
    state, cache = branch.state, branch.cache
    model = state.model.name + (f"@{state.model.version}" if state.model.version else "")
    parts = [state.id, state.status, model, _count(len(branch.turns), "turn")]
    if cache is not None:
        tiers = {name: use.tokens for name, use in cache.tiers.items()} | {"nowhere": cache.missing_tokens or 0}
        kept = ", ".join(f"{name} {tokens}" for name, tokens in tiers.items() if tokens)
        parts.append(f"{_count(sum(tiers.values()), 'token')}" + (f": {kept}" if kept else ""))
    return "  ".join(parts)


def _turn_text(number: int, turn: TurnLine) -> str:
    shown = [f"turn {number}", turn.status]
    if turn.prompt is not None:
        tiers = _by_tier(turn)
        parts = ", ".join(f"{tier} {tokens}" for tier, tokens in tiers.items() if tokens)
        shown.append(f"prompt {sum(tiers.values())}" + (f" = {parts}" if parts else ""))
    if turn.answer_tokens is not None:
        shown.append(f"answer {turn.answer_tokens}")
    if turn.miss_reason is not None:
        shown.append(f"({turn.miss_reason})")
    return "  ".join(shown)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
