"""What the yardstick measures: cells of (rows, distinct adapters), and the prompts of each."""

import random
from dataclasses import dataclass

from yardstick_model import VOCAB_SIZE

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """`batch` requests at once, over `adapters` distinct adapters; 0 is the base model."""

    batch: int
    adapters: int

    def __str__(self) -> str:
        return f"b{self.batch}:{self.adapters}"

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """`b32:16`. Raises ValueError."""
        batch, colon, adapters = text.strip().removeprefix("b").partition(":")
        if not colon or not batch.isdecimal() or not adapters.isdecimal():
            raise ValueError(f"{text!r} is no cell: write b<rows>:<distinct adapters>, as in b32:16.")
        cell = cls(int(batch), int(adapters))
        if not 1 <= cell.batch <= 32 or not 0 <= cell.adapters <= min(16, cell.batch):
            raise ValueError(f"{text!r}: 1 to 32 rows, and 0 to 16 distinct adapters but not more than rows.")
        return cell

    @property
    def adapter_of_row(self) -> list[int | None]:
        """Row by row, in turn: neighbours in the order of arrival have different adapters."""
        return [row % self.adapters if self.adapters else None for row in range(self.batch)]

    def prompts(self, seed: int) -> list[list[int]]:
        """Random tokens, no two rows alike.  # [batch][PROMPT_TOKENS]"""
        source = random.Random(f"{self} {seed}")
        return [[source.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(self.batch)]


ALL_CELLS = tuple(Cell(batch, adapters) for batch in (1, 8, 32) for adapters in (0, 1, 8, 16) if adapters <= batch)
QUICK_CELLS = (Cell(1, 1), Cell(8, 8), Cell(32, 0), Cell(32, 16))
