"""One phase while it runs: what it is told, the time that it has left, and the rows that it has measured.

The rows are written to a file after each one, so that a phase that is killed leaves what it had.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a random model of the Llama architecture, as in its config.json."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_tokens: int
    device_bytes: int
    """Bytes of KV and adapters on the device."""
    prompt_tokens: int
    """Tokens of each request of a measured step."""


SHAPES = {
    "llama-8b": ModelShape("llama-8b", 32, 4096, 14_336, 32, 8, 128_256, 131_072, 40 * 2**30, 1024),
    "tiny": ModelShape("tiny", 2, 64, 128, 4, 2, 8192, 4096, 32 * 2**20, 32),
}


class PhaseRun:
    """Collects the rows of one phase in tables, and writes them to a file."""

    def __init__(self, path: Path, seconds: float, shape: ModelShape, *, is_dry: bool) -> None:
        self.shape = shape
        self.is_dry = is_dry
        """Whether there is no GPU, so that only the host's side can run."""
        self._path = path
        self._ends_at = time.monotonic() + seconds
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._skipped: list[str] = []
        self._write()

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Adds one measured row to a table, and writes all tables."""
        self._tables.setdefault(table, []).append(row)
        self._write()

    def while_time(self, items: Iterable[T], name: Callable[[T], str] = str) -> Iterable[T]:
        """Yields the items until the phase's time is over. The names of the others are reported as skipped."""
        for item in items:
            if time.monotonic() < self._ends_at:
                yield item
            else:
                self._skipped.append(name(item))
                self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps({"tables": self._tables, "skipped": self._skipped}))
