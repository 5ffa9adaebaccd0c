"""What the yardstick and one engine say to each other, a line of JSON each: nothing here needs more than Python.

The engine's process says that it is ready, then answers every task with a result until its input ends. Standard output
belongs to this conversation; whatever the engine itself prints goes to standard error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """Greedy continuations, all submitted at once; end-of-sequence tokens are ignored."""

    prompts: list[list[int]]
    adapters: list[int | None]
    """The adapter's index for each prompt; None is the base model."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """From the submission of the first prompt to the last token of the last."""

    token_ids: list[list[int]]
    seconds: float
    cpu_seconds: float
    """Processor time of the engine's process: near `seconds` if it had its core for itself and kept to one thread."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an engine is started with."""

    model: Path
    """A `YardstickModel`'s folder: base/ in Hugging Face form, adapters/00 and on in PEFT's."""
    dtype: str
    """`bfloat16` or `float32`."""

    @property
    def base(self) -> Path:
        return self.model / "base"

    @property
    def adapters(self) -> list[Path]:
        return sorted((self.model / "adapters").iterdir())


class PeerEngine(Protocol):
    """One engine with the base model and all adapters loaded."""

    @property
    def version(self) -> str: ...

    def generate(self, task: Task) -> list[list[int]]:
        """The new tokens of each prompt, in order."""
        ...


def serve(open_engine: Callable[[Opening], PeerEngine]) -> None:
    """The life of an engine's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = open_engine(Opening(options.model, options.dtype))
    print(json.dumps({"version": engine.version}), file=answers)
    for line in sys.stdin:
        result = _timed(engine, Task(**json.loads(line)))
        print(json.dumps(asdict(result)), file=answers)


def _timed(engine: PeerEngine, task: Task) -> Result:
    start, cpu_start = time.perf_counter(), time.process_time()
    token_ids = engine.generate(task)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Result(token_ids, seconds, cpu_seconds)
