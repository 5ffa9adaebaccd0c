"""Defines a member of a fleet: one engine as this gateway sees it, and where the list of engines comes from.

Owns a member's connection, and what its engine last said of itself. Never chooses between members.
Invariant: a member gets no request before its engine has described itself, with the epoch and the weights that the
fleet expects of its generation. After a lost connection it must do so again, because another engine may answer at the
address now.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from graftwork.engine.core.client import EngineClient
from graftwork.engine.core.load import NO_LOAD, EngineLoad, LoadReport
from graftwork.engine.core.reports import ReportingClient, RequestReports
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import Conflict, Unavailable
from graftwork.platform.ids import FIRST_GENERATION
from graftwork.platform.replicas.lease import FENCED, MISMATCH, ServedVersion


class MemberClient(EngineClient, Protocol):
    """A connection to one engine that also reports its load."""

    async def read_load(self, within_s: float) -> EngineLoad:
        """Returns the latest load of the engine. Raises Unavailable if it does not answer in `within_s` seconds."""
        ...

    def follow_load(self, note: Callable[[LoadReport], None]) -> None:
        """Calls `note` with each load that the engine sends with its tokens. Call this before the first request."""
        ...

    def lose_requests(self) -> None:
        """Ends all running requests with the error of a lost engine, and cancels them there. The connection stays."""
        ...


Connect = Callable[[str], MemberClient]
"""Opens a connection to the engine at a gRPC address."""


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """Where one engine of the fleet answers."""

    replica_id: str
    address: str
    """A gRPC target: `unix:/path/engine.sock` or `host:port`."""
    epoch: int | None = None
    """The epoch that the engine must have; None takes any."""
    is_draining: bool = False
    """Whether an operator has asked the engine to finish its requests and to take no new ones."""


class MemberSource(Protocol):
    """Knows which engines belong to the fleet."""

    async def addresses(self) -> Sequence[MemberAddress]:
        """Returns all engines of the fleet. Raises Unavailable if that cannot be found out now."""
        ...


class StaticMembers:
    """Implements MemberSource with a fixed list."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """The engines get the ids `engine-0`, `engine-1`, … in the order of `addresses`."""
        self._addresses = [MemberAddress(f"engine-{number}", address) for number, address in enumerate(addresses)]

    async def addresses(self) -> Sequence[MemberAddress]:
        return self._addresses


@dataclass(slots=True)
class ReplicaCounters:
    """What this gateway has counted of one replica, over all starts of its engine."""

    requests: int = 0
    hand_overs: int = 0
    hedges: int = 0


class Member:
    """One engine of a fleet."""

    def __init__(self, place: MemberAddress, connect: Connect) -> None:
        self.place = place
        self.client = connect(place.address)
        self.description: EngineDescription | None = None
        """What the engine has said of itself; None while it must say it again."""
        self.load: EngineLoad = NO_LOAD
        self.problem: str | None = "The engine has not answered yet."
        """Why the engine gets no requests; None if it gets some."""
        self.is_draining = place.is_draining
        self.is_silent = False
        """Whether its requests were handed over because it does not answer. It ends with the next answer."""
        self.heard_at = float("-inf")
        """When the engine last sent its load with its tokens, on the monotonic clock."""
        self.report: LoadReport | None = None
        """The load that the engine has sent with its tokens, if it is newer than `load` and nobody has read it yet."""
        self.has_spoken = False
        """Whether an event of a request has come since the last tick, or since ticks have begun."""
        self.knows_deletions = False
        """Whether the engine was told, since it has described itself, which tenants are deleted."""
        self.num_requests = 0
        """Requests of this gateway that the engine works on."""
        self.sent_tokens = 0
        """Uncached prompt tokens that were sent since the engine's last report of its load."""
        self.sent_requests = 0
        self.idle = asyncio.Event()
        """Is set while the engine works on no request of this gateway."""
        self.idle.set()

    def report_to(self, reports: RequestReports) -> None:
        """Notes what the engine reports about requests that are sent from now on."""
        if isinstance(self.client, ReportingClient):
            self.client.report_to(reports)

    @property
    def replica_id(self) -> str:
        return self.place.replica_id

    @property
    def generation(self) -> int:
        """The generation of what the engine serves, as it has said itself."""
        return FIRST_GENERATION if self.description is None else self.description.generation

    @property
    def is_ready(self) -> bool:
        """Whether the engine may get new requests."""
        return self.description is not None and self.problem is None and not self.is_draining

    def enter(self, uncached_tokens: int) -> None:
        """Notes that a request was sent to the engine. Each call needs one of `leave`."""
        self.num_requests += 1
        self.sent_tokens += uncached_tokens
        self.sent_requests += 1
        self.idle.clear()

    def leave(self) -> None:
        self.num_requests -= 1
        if not self.num_requests:
            self.idle.set()

    def note_load(self, load: EngineLoad) -> None:
        """Records a report of the engine. Raises Conflict if it comes from another epoch."""
        self.check_epoch(load.epoch)
        self.is_silent, self.report = False, None
        self.load, self.sent_tokens, self.sent_requests = load, 0, 0

    def note_lost(self, reason: str) -> None:
        """Notes that the engine does not answer. It gets requests again after it has described itself."""
        self.description, self.problem, self.is_silent = None, reason, False
        self.knows_deletions, self.report = False, None
        self.load, self.sent_tokens, self.sent_requests = NO_LOAD, 0, 0

    async def verify(self, others: Iterable["Member"]) -> EngineDescription:
        """Asks the engine to describe itself, and returns the description.

        Raises Unavailable if it does not answer, and Conflict if it has another epoch than its lease says, if it serves
        another model name than `others`, or if one of them in its generation has other weights or another version.
        Engines that drain do not count.
        """
        description = await self.client.describe()
        self.check_epoch(description.epoch)
        own = version_of(description)
        for other in others:
            if other is self or other.description is None or other.is_draining:
                continue
            served, generation = version_of(other.description), other.description.generation
            if served.model == own.model and (served == own or generation != description.generation):
                continue
            raise Conflict(
                f"The fleet serves {served.model!r} with {served}; the engine {self.replica_id} has {own.model!r} with "
                f"{own}. Start it with the same model folder and version, or with another --generation.",
                code=MISMATCH,
            )
        return description

    def check_epoch(self, epoch: int | None) -> None:
        """Raises Conflict if the engine has another epoch than its lease says."""
        if self.place.epoch is None or epoch == self.place.epoch:
            return
        said = "no epoch" if epoch is None else f"epoch {epoch}"
        raise Conflict(
            f"The engine at the address of {self.replica_id} has {said}, and epoch {self.place.epoch} is expected there.",
            code=FENCED,
        )

    def serves(self, served: ServedVersion | None) -> bool:
        """Returns whether the engine has exactly these weights and this version; None means any."""
        return served is None or (self.description is not None and version_of(self.description) == served)

    def hand_over(self) -> None:
        """Ends the requests of this gateway at the engine, so that they go on elsewhere. New ones may follow."""
        self.client.lose_requests()

    async def close(self) -> None:
        await self.client.close()


def version_of(description: EngineDescription) -> ServedVersion:
    """Returns what an engine serves, in the form in which all engines of a generation must agree."""
    return ServedVersion(description.model_name, description.fingerprint, description.version)


def no_engine(reason: str, retry_after_s: float = 1.0) -> Unavailable:
    """Returns the error for a request that no engine can take now."""
    return Unavailable(
        f"No engine of the fleet can take the request: {reason} Try again shortly.",
        code="no_engine",
        retry_after_s=retry_after_s,
    )
