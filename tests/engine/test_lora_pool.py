"""The LoRA pool: bytes, pins, loads and failures."""

import threading
from queue import SimpleQueue

import pytest
import torch

from graftwork.engine.adapter_weights import AdapterWeights, LoraPair
from graftwork.engine.lora_pool import AdapterLoaded, LoraPool
from graftwork.platform.errors import CapacityAbsent, NotFound, ValidationFailed

WIDTHS = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8, "gate_proj": 8, "up_proj": 8, "down_proj": 8}
RANK_BYTES = (8 + 8) * 4 + 4
"""One rank of o_proj in fp32: a row of A, a column of B, a scale."""


def weights(digest: str, rank: int) -> AdapterWeights:
    return AdapterWeights(digest, {(0, "o_proj"): LoraPair(torch.ones(rank, 8), torch.ones(8, rank), 2.0)})


class CountingSource:
    """Knows adapters called `sha256:<rank>…`; a gate can hold its loads back."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def load(self, digest: str) -> AdapterWeights:
        self.gate.wait(10)
        self.loads.append(digest)
        if digest == "sha256:missing":
            raise NotFound("There is no such adapter.")
        if digest == "sha256:broken":
            raise OSError("disk on fire")
        return weights(digest, int(digest.split(":")[1].split("-")[0]))


class Bench:
    """A pool of a given number of ranks, and the inbox its loads come back to."""

    def __init__(self, ranks: int) -> None:
        self.source = CountingSource()
        self.inbox: SimpleQueue[AdapterLoaded] = SimpleQueue()
        self.pool = LoraPool(
            self.source,
            WIDTHS,
            budget_bytes=ranks * RANK_BYTES,
            device=torch.device("cpu"),
            dtype=torch.float32,
            deliver=self.inbox.put,
        )

    def load(self, digest: str) -> object:
        if self.pool.is_ready(digest):
            return None
        error = self.pool.absorb(self.inbox.get(timeout=10))
        self.pool.check_integrity()
        return error


def test_bytes_are_counted_at_real_rank() -> None:
    """An adapter of rank 2 costs two ranks beside one of rank 8."""
    bench = Bench(ranks=16)
    bench.load("sha256:2")
    bench.load("sha256:8")

    assert bench.pool.num_bytes == 10 * RANK_BYTES


def test_the_least_recently_used_makes_room_and_pinned_ones_do_not() -> None:
    """Of three adapters the pinned one stays although it is the oldest."""
    bench = Bench(ranks=12)
    for digest in ("sha256:4-old", "sha256:4-mid", "sha256:4-new"):
        bench.load(digest)
    bench.pool.pin("sha256:4-old")

    bench.load("sha256:4-more")

    assert set(bench.pool.resident_digests) == {"sha256:4-old", "sha256:4-new", "sha256:4-more"}


def test_an_adapter_without_room_is_placed_when_a_pin_goes() -> None:
    """It is not read again: its weights wait on the host."""
    bench = Bench(ranks=8)
    bench.load("sha256:8-a")
    bench.pool.pin("sha256:8-a")
    bench.load("sha256:8-b")
    assert not bench.pool.is_ready("sha256:8-b")

    bench.pool.unpin("sha256:8-a")

    assert bench.pool.is_ready("sha256:8-b")
    assert bench.source.loads == ["sha256:8-a", "sha256:8-b"]


def test_many_first_uses_read_once() -> None:
    """A hundred askers while the load is under way cause one read."""
    bench = Bench(ranks=8)
    bench.source.gate.clear()
    answers = [bench.pool.is_ready("sha256:4") for _ in range(100)]
    bench.source.gate.set()
    bench.pool.absorb(bench.inbox.get(timeout=10))

    assert not any(answers)
    assert bench.pool.is_ready("sha256:4")
    assert bench.source.loads == ["sha256:4"]


@pytest.mark.parametrize(
    ("digest", "error"),
    [("sha256:missing", NotFound), ("sha256:broken", Exception), ("sha256:99", ValidationFailed)],
)
def test_a_failed_load_is_an_error_for_those_who_wait(digest: str, error: type[Exception]) -> None:
    """Not found, unreadable, or larger than the whole pool; the pool goes on."""
    bench = Bench(ranks=8)

    assert isinstance(bench.load(digest), error)
    assert bench.load("sha256:4") is None
    assert not isinstance(bench.load("sha256:4"), CapacityAbsent)


def test_forgetting_waits_for_the_last_user() -> None:
    """A pinned adapter is freed when its pin goes, an idle one at once."""
    bench = Bench(ranks=8)
    bench.load("sha256:4-a")
    bench.load("sha256:4-b")
    bench.pool.pin("sha256:4-a")

    bench.pool.forget("sha256:4-a")
    bench.pool.forget("sha256:4-b")
    assert list(bench.pool.resident_digests) == ["sha256:4-a"]
    bench.pool.unpin("sha256:4-a")

    assert not bench.pool.resident_digests
    assert bench.pool.num_bytes == 0
