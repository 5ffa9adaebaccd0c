"""A session's history as the model sees it: an append-only chain of checkpoints with exact token ids.

Owns the arithmetic of a prompt: the stored ids of the head, then the ids of what is new.
Never renders or tokenises history again under the same opening, and never stores anything.
Invariant: the ids of the chain, concatenated from the last checkpoint with another opening than its parent's, are bit
for bit the prompt and the answer that made the head.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graftwork.platform.ids import CheckpointId, SessionId, TurnId
from graftwork.sessions.core.items import Item, prompt_messages
from graftwork.sessions.text.messages import Message

ToolDefinition = dict[str, Any]
"""A tool in chat.completions' form."""


class TurnEncoder(Protocol):
    """What a session needs of the prompt encoder."""

    template_digest: str
    tokenizer_digest: str

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """A whole conversation, up to where the assistant speaks next."""
        ...

    def encode_delta(self, assistant: Message, new: Sequence[Message], *, closed: bool) -> tuple[int, ...]:
        """What new messages add behind a generated one; `closed` if its tokens end with the model's own stop."""
        ...

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether the model itself ended the message that these tokens are."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed point of a history. `token_ids` is what its turn added: new prompt ids, then generated ids.

    A turn with another opening than its parent's adds the whole history, encoded anew behind that opening.
    """

    checkpoint_id: CheckpointId
    session_id: SessionId
    """The session that made it; forks share it."""
    parent_id: CheckpointId | None
    turn_id: TurnId
    depth: int
    """Turns from the start of the history, 1 for the first."""
    num_items: int
    """Items from the start of the history."""
    num_answer_items: int
    """How many items at its own end the model made: at most one text, then its calls."""
    num_tokens: int
    """Tokens from the start of the history."""
    token_ids: tuple[int, ...]
    closed: bool
    """Whether the answer ended with the model's own end-of-sequence token."""
    awaits_tools: bool
    created_at: float
    opening: str | None = None
    """The digest of what its ids begin with; None for those made before it was noted, which never changed it."""


UNENCODED = "unencoded"
"""In place of a digest: the checkpoint has items and no ids, whatever its history opens with."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What stands before the first message of a session."""

    instructions: str | None
    tools: tuple[ToolDefinition, ...]

    @property
    def digest(self) -> str:
        """The same for openings that say the same."""
        said = json.dumps([self.instructions, self.tools], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Transcript:
    """The history that ends in `head`, oldest checkpoint first; empty when there is none."""

    token_ids: tuple[int, ...]
    head: Checkpoint | None
    head_items: tuple[Item, ...]
    """The items of the head checkpoint alone: its turn's input, then the model's answer.

    Of the whole history where that is encoded anew."""
    opening: str | None = None
    """The digest that the next checkpoint carries."""
    is_anew: bool = False
    """Whether the next turn stands behind another opening: the stored ids are of no use to it."""

    def encode_next(self, encoder: TurnEncoder, opening: Opening, new_items: Sequence[Item]) -> tuple[int, ...]:
        """The ids that `new_items` and the opening of the next answer add to this history."""
        if self.head is None or self.is_anew:
            instructions = (Message("system", opening.instructions),) if opening.instructions is not None else ()
            return encoder.encode_messages(
                (*instructions, *prompt_messages((*self.head_items, *new_items))), opening.tools or None
            )
        answer_items = self.head_items[-self.head.num_answer_items :]
        answer, *new_messages = prompt_messages((*answer_items, *new_items))
        return encoder.encode_delta(answer, new_messages, closed=self.head.closed)


EMPTY_TRANSCRIPT = Transcript(token_ids=(), head=None, head_items=())


def join_chain(chain: Iterable[Checkpoint]) -> tuple[int, ...]:
    """The token ids that a chain of checkpoints, oldest first, stands for: all since its opening last changed."""
    token_ids: list[int] = []
    opening: str | None = None
    for checkpoint in chain:
        if checkpoint.opening != opening:
            token_ids, opening = [], checkpoint.opening
        token_ids += checkpoint.token_ids
    return tuple(token_ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32, whatever this machine's own order is."""
    packed = array("i", token_ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_token_ids`."""
    token_ids = array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return tuple(token_ids)
