"""Defines a session's history as token ids: a chain of checkpoints, each with the ids that its turn added.

Owns how a prompt is built: the stored ids of the history, then the ids of the new items. Never stores anything. A
stored history is encoded again only if the opening of the prompt (the instructions and tools) has changed.
Invariant: after each turn, the ids that `join_chain` returns for the history are exactly the tokens of that turn's
prompt and answer.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graftwork.platform.ids import CheckpointId, SessionId, TurnId
from graftwork.sessions.core.items import Item, prompt_messages
from graftwork.sessions.text.encoding import ContinuationPrompt, ConversationPrompt
from graftwork.sessions.text.messages import Message

ToolDefinition = dict[str, Any]
"""A tool in the form of OpenAI's chat completions."""


class TurnEncoder(Protocol):
    """The interface of the prompt encoder that sessions use. `PromptEncoding` encodes the prompts themselves."""

    template_digest: str
    tokenizer_digest: str

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last token of an answer is an end-of-sequence token."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The stored state of a history after one turn.

    `token_ids` holds the ids that the turn added: prompt ids, then generated ids. If the instructions or tools of the
    turn differ from those of the checkpoint before it, `token_ids` holds the whole history, encoded again.
    """

    checkpoint_id: CheckpointId
    session_id: SessionId
    """The session whose turn made the checkpoint. Forks of the session share the checkpoint."""
    parent_id: CheckpointId | None
    turn_id: TurnId
    depth: int
    """The number of the checkpoint's turn in the history, from 1."""
    num_items: int
    """The number of items from the start of the history up to this checkpoint."""
    num_answer_items: int
    """How many of the checkpoint's last items the model generated: at most one message, then the answer's tool calls.
"""
    num_tokens: int
    """The number of tokens from the start of the history up to this checkpoint."""
    token_ids: tuple[int, ...]
    closed: bool
    """Whether the answer ended with an end-of-sequence token from the model."""
    awaits_tools: bool
    created_at: float
    opening: str | None = None
    """The digest of the instructions and tools of the turn.

    It is None for checkpoints of an older server version, in which a session could not change its instructions and
    tools.
    """


UNENCODED = "unencoded"
"""The value of `Checkpoint.opening` for a checkpoint that has items but no token ids."""


def truncated_opening(turn_id: TurnId) -> str:
    """Returns the value of `Checkpoint.opening` for a turn whose prompt left out the oldest items of the history.

    It is one of a kind, so that the next turn encodes the whole history again.
    """
    return f"truncated_{turn_id}"


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a session's prompt, before the first message: the instructions and the tools."""

    instructions: str | None
    tools: tuple[ToolDefinition, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the instructions and tools, in hexadecimal."""
        text = json.dumps([self.instructions, self.tools], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Transcript:
    """A session's history, which ends at the checkpoint `head`.

    If the session is new, `head` is None and the history is empty.
    """

    token_ids: tuple[int, ...]
    head: Checkpoint | None
    head_items: tuple[Item, ...]
    """The items of the last turn: its input, then the answer.

    If `must_encode_all` is True, these are the items of the whole history.
    """
    opening: str | None = None
    """The digest of the instructions and tools that the next checkpoint stores."""
    must_encode_all: bool = False
    """Whether the instructions or tools have changed, so that the whole history must be encoded again."""

    def next_prompt(self, opening: Opening, new_items: Sequence[Item]) -> ConversationPrompt | ContinuationPrompt:
        """Returns the prompt of the text that the next turn adds to this history.

        This text is `new_items` and the start of the next answer. If the history is empty, or if `must_encode_all` is
        True, returns the whole prompt instead.
        """
        if self.head is None or self.must_encode_all:
            instructions = (Message("system", opening.instructions),) if opening.instructions is not None else ()
            messages = (*instructions, *prompt_messages((*self.head_items, *new_items)))
            return ConversationPrompt(messages, opening.tools or None, param="input")
        answer_items = self.head_items[-self.head.num_answer_items :]
        answer, *new_messages = prompt_messages((*answer_items, *new_items))
        return ContinuationPrompt(answer, tuple(new_messages), closed=self.head.closed)


EMPTY_TRANSCRIPT = Transcript(token_ids=(), head=None, head_items=())


def join_chain(chain: Iterable[Checkpoint]) -> tuple[int, ...]:
    """Joins the token ids of the checkpoints of one history. The checkpoints must come oldest first.

    When the instructions or tools change, the next checkpoint has the token ids of the whole history, encoded again. So
    the ids of all checkpoints before the last such change are left out.
    """
    token_ids: list[int] = []
    opening: str | None = None
    for checkpoint in chain:
        if checkpoint.opening != opening:
            token_ids, opening = [], checkpoint.opening
        token_ids += checkpoint.token_ids
    return tuple(token_ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as bytes, in little-endian int32."""
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """Returns the token ids that `pack_token_ids` has packed into bytes."""
    token_ids = array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return tuple(token_ids)
