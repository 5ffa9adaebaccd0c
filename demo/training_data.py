"""Batches for training: rendered conversations, their assistant tokens marked, in rows of like length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from graftwork.demo.chat_tokenizer import END, START, render
from graftwork.demo.conversations import Conversation

POOL_SIZE = 96  # conversations that are sorted by length together


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation as tokens; `spoken[i]` is true where token i is the assistant's, its end token included."""

    token_ids: list[int]
    spoken: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids` and `spoken` are [num_rows, num_tokens], padded on the right with `padding`."""

    token_ids: Tensor
    spoken: Tensor
    padding: Tensor


class RowMaker:
    """Tokenises conversations and finds what the assistant says in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.prompt = self.encode(f"{START}assistant\n")
        self.end_id = tokenizer.convert_tokens_to_ids(END)
        self.pad_id = tokenizer.pad_token_id

    def row(self, conversation: Conversation, max_tokens: int) -> Row:
        text = render(self.tokenizer, conversation)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False, truncation=True, max_length=max_tokens)
        spoken = [False] * len(token_ids)
        position = 0
        while position < len(token_ids):
            if token_ids[position : position + len(self.prompt)] == self.prompt:
                position = self.mark_speech(token_ids, spoken, position + len(self.prompt))
            else:
                position += 1
        return Row(token_ids, spoken)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def mark_speech(self, token_ids: list[int], spoken: list[bool], start: int) -> int:
        for position in range(start, len(token_ids)):
            spoken[position] = True
            if token_ids[position] == self.end_id:
                return position + 1
        return len(token_ids)

    def batch(self, rows: list[Row]) -> Batch:
        width = max(len(row.token_ids) for row in rows)
        token_ids = torch.full((len(rows), width), self.pad_id)
        spoken = torch.zeros((len(rows), width), dtype=torch.bool)
        padding = torch.ones((len(rows), width), dtype=torch.bool)
        for index, row in enumerate(rows):
            size = len(row.token_ids)
            token_ids[index, :size] = torch.tensor(row.token_ids)
            spoken[index, :size] = torch.tensor(row.spoken)
            padding[index, :size] = False
        return Batch(token_ids, spoken, padding)


@dataclass(slots=True)
class BatchStream:
    """Batches of at most `batch_tokens` tokens without end."""

    maker: RowMaker
    random: Random
    batch_tokens: int
    waiting: list[Batch] = field(default_factory=list)

    def next(self, draw: Callable[[], Row]) -> Batch:
        """One batch; when none is waiting, a pool of rows is drawn."""
        if not self.waiting:
            pool = [draw() for _ in range(POOL_SIZE)]
            pool = [row for row in pool if any(row.spoken)]
            pool.sort(key=lambda row: len(row.token_ids))
            self.waiting = [self.maker.batch(rows) for rows in self.group(pool)]
            self.random.shuffle(self.waiting)
        return self.waiting.pop()

    def group(self, rows: list[Row]) -> Iterator[list[Row]]:
        group: list[Row] = []
        for row in rows:
            if group and len(row.token_ids) * (len(group) + 1) > self.batch_tokens:
                yield group
                group = []
            group.append(row)
        yield group


class Mixture:
    """Batches from several streams, each of which gives its share of them."""

    def __init__(self, maker: RowMaker, random: Random, batch_tokens: int, shares: Sequence[float]) -> None:
        self.random, self.shares = random, shares
        self.streams = [BatchStream(maker, random, batch_tokens) for _ in shares]

    def next(self, draws: Sequence[Callable[[], Row]]) -> Batch:
        """`draws` has one source of rows for every share."""
        pairs = list(zip(self.streams, draws, strict=True))
        stream, draw = self.random.choices(pairs, self.shares)[0]
        return stream.next(draw)
