"""Defines what rank 0 tells the other ranks, what they report, and how both are written into a pipe.

A message is a JSON object, and an array of 32-bit numbers for what is long: the tokens and pages of a step. Nothing in
it is code, and the pipes belong to the two processes alone.

Commands are carried out in the order in which they were sent. Numbers of pages, frames and loads are those of rank 0:
they are the same on all ranks.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.disk.shared import TierStore
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.transfer.plan import PageMove, TransferKind, TransferPlan
from graftwork.platform.ids import RequestId

_HEADER = struct.Struct("<II")  # bytes of the JSON text, count of the numbers
_SLICE_FIELDS = 10
_NO_NUMBERS = np.zeros(0, np.int32)
_UNSAMPLED = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=0)
"""Stands for each sample of a slice: only rank 0 samples, but the number of samples decides the shape of a step."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message between two ranks: its kind, its JSON values, and its numbers."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    numbers: NDArray[np.int32] = field(default_factory=lambda: _NO_NUMBERS)

    def encoded(self) -> bytes:
        text = json.dumps([self.kind, self.values]).encode()
        return _HEADER.pack(len(text), len(self.numbers)) + text + self.numbers.tobytes()


def receive(stream: IO[bytes]) -> Envelope | None:
    """Reads the next message. Returns None at the end of the stream, also in the middle of a message."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    text_bytes, count = _HEADER.unpack(header)
    content = stream.read(text_bytes + 4 * count)
    if len(content) < text_bytes + 4 * count:
        return None
    kind, values = json.loads(content[:text_bytes])
    return Envelope(kind, values, np.frombuffer(content, np.int32, count, text_bytes))


# ---- steps ----------------------------------------------------------------------------------------------------------


def step_command(plan: StepPlan, loads: Sequence[int]) -> Envelope:
    """Returns the command to compute a step. `loads` are the running loads of KV that the step waits for."""
    mixes = list(dict.fromkeys(piece.adapters for piece in plan.slices))
    numbers: list[int] = []
    for piece in plan.slices:
        counts = (len(piece.token_ids), len(piece.pages), len(piece.samples))
        window = piece.rolling_window
        rolling = (False, 0, 0) if window is None else (True, window.sinks, window.window)
        numbers += (piece.start, *counts, piece.awaits_token, mixes.index(piece.adapters), piece.num_given_up, *rolling)
        numbers += piece.token_ids
        numbers += piece.pages
    uses = [[[use.digest, use.weight] for use in mix] for mix in mixes]
    return Envelope("step", {"loads": list(loads), "mixes": uses}, np.array(numbers, np.int32))


def step_of(command: Envelope) -> StepPlan:
    """Returns the plan of a step command. It has no request ids and no parameters of sampling."""
    mixes = [tuple(AdapterUse(digest, weight) for digest, weight in mix) for mix in command.values["mixes"]]
    numbers = command.numbers.tolist()
    slices: list[RequestSlice] = []
    at = 0
    while at < len(numbers):
        start, num_tokens, num_pages, num_samples, awaits, mix, *rolling = numbers[at : at + _SLICE_FIELDS]
        num_given_up, has_window, sinks, window = rolling
        pages_at = at + _SLICE_FIELDS + num_tokens
        slices.append(
            RequestSlice(
                request_id=RequestId(str(len(slices))),
                token_ids=tuple(numbers[at + _SLICE_FIELDS : pages_at]),
                start=start,
                pages=tuple(map(PageId, numbers[pages_at : pages_at + num_pages])),
                adapters=mixes[mix],
                samples=(_UNSAMPLED,) * num_samples,
                awaits_token=bool(awaits),
                rolling_window=RollingWindow(sinks, window) if has_window else None,
                num_given_up=num_given_up,
            )
        )
        at = pages_at + num_pages
    return StepPlan(tuple(slices))


# ---- transfers of pages ---------------------------------------------------------------------------------------------


def transfer_command(number: int, plan: TransferPlan) -> Envelope:
    """Returns the command to carry out a transfer on the rank's own tiers."""
    moves = [[move.key.hex(), move.source, move.target] for move in plan.moves]
    nodes = plan.nodes if plan.kind is TransferKind.STORE else ()
    before = (None, *nodes)
    above = [
        None if before_it is not None and node.parent is before_it else _path_above(node)
        for before_it, node in zip(before, nodes, strict=False)
    ]
    values = {"number": number, "transfer": plan.kind, "domain": plan.domain.hex(), "moves": moves}
    return Envelope("transfer", values | {"above": above, "domains": [node.domain.hex() for node in nodes]})


def transfer_of(command: Envelope) -> TransferPlan:
    """Returns the plan of a transfer command. Its nodes are there only for a transfer to the disk, which needs them."""
    values = command.values
    moves = tuple(
        PageMove(PageKey(bytes.fromhex(key)), *(None if page is None else PageId(page) for page in pages))
        for key, *pages in values["moves"]
    )
    nodes: list[Node] = []
    for move, path, domain in zip(moves, values["above"], values["domains"], strict=False):
        parent = nodes[-1] if path is None else _chain(path, bytes.fromhex(domain))
        nodes.append(_node(parent, move.key, bytes.fromhex(domain)))
    return TransferPlan(TransferKind(values["transfer"]), bytes.fromhex(values["domain"]), moves, tuple(nodes))


def _path_above(node: Node) -> list[str]:
    """Returns the keys of all pages before a page, first page first."""
    path: list[str] = []
    while node.parent is not None:
        node = node.parent
        path.append(node.key.hex())
    return path[::-1]


def _chain(path: Sequence[str], domain: bytes) -> Node | None:
    node: Node | None = None
    for key in path:
        node = _node(node, PageKey(bytes.fromhex(key)), domain)
    return node


def _node(parent: Node | None, key: PageKey, domain: bytes) -> Node:
    depth = 0 if parent is None else parent.depth + 1
    return Node(parent, key, depth, domain, last_used=0)


# ---- reports --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskReport:
    """What a rank says about its own part of the disk tier. The fields are those of DiskStore and DiskCounters."""

    bytes_used: int = 0
    corrupt: int = 0
    foreign: int = 0
    failed: int = 0


def disk_report(disk: TierStore | None) -> dict[str, Any]:
    """Returns the values with which a report tells about a rank's disk; none without a disk."""
    if disk is None:
        return {}
    counters = disk.counters
    return {"disk": asdict(DiskReport(disk.bytes_used, counters.corrupt, counters.foreign, counters.failed))}


def disk_report_of(values: dict[str, Any]) -> DiskReport:
    """Returns what a report tells about a rank's disk."""
    return DiskReport(**values.get("disk", {}))
