"""Engines of a fleet that say what they are told to, and a list of them that a test changes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from graftwork.engine.core.client import ENGINE_UNAVAILABLE
from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.events import (
    CacheReport,
    EngineEvent,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    TokensGenerated,
)
from graftwork.engine.core.load import NO_LOAD, EngineLoad, LoadReport
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory
from graftwork.engine.core.stats import EngineDescription, EngineStats
from graftwork.engine.fleet.members import MemberAddress
from graftwork.platform.errors import CapacityContended, GraftworkError, Unavailable
from graftwork.platform.ids import IsolationDomain
from tests.adapters.adapter_files import DESCRIPTION


def lost() -> Unavailable:
    return Unavailable("The engine is gone.", code=ENGINE_UNAVAILABLE, retry_after_s=1.0)


def token_at(request: EngineRequest, place: int) -> int:
    """The token that every engine generates at this place of the answer."""
    return (sum(request.prompt_token_ids) + 7 * place + (request.sampling.seed or 0)) % 1000


@dataclass
class FakeMember:
    """Implements MemberClient: goes on after the tokens that a request has, one token a step."""

    description: EngineDescription = DESCRIPTION
    load: EngineLoad = NO_LOAD
    is_absent: bool = False
    dies_after: int | None = None
    """Tokens of a request after which the engine is lost, and absent from then on."""
    refusal: GraftworkError | None = None
    late_below_s: float = 0.0
    """Deadlines shorter than this cannot be met, and can after the difference."""
    holds_after: int | None = None
    """Tokens of a request after which it waits until `release` is set."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[EngineRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    commands: list[SessionCommand] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: bool = False
    """Whether it answers no question, as a stopped process."""
    note_report: Callable[[LoadReport], None] = lambda report: None
    """Sends the report of a load as if with tokens."""
    num_questions: int = 0
    """Questions for the load that were answered."""
    losing: asyncio.Event = field(default_factory=asyncio.Event)
    """Is set when the requests that run are lost. A new event then replaces it."""

    def _check(self) -> None:
        if self.is_absent:
            raise lost()

    async def describe(self) -> EngineDescription:
        self._check()
        return self.description

    async def read_load(self, within_s: float) -> EngineLoad:
        self._check()
        if self.is_stopped:
            await asyncio.Event().wait()
        self.num_questions += 1
        return replace(self.load, epoch=self.description.epoch)

    def follow_load(self, note: Callable[[LoadReport], None]) -> None:
        self.note_report = note

    def note_load(self, load: EngineLoad) -> None:
        """Sends a load as if with tokens."""
        self.note_report(LoadReport(lambda: load))

    def lose_requests(self) -> None:
        self.losing.set()
        self.losing = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self._check()
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        has_ended = False
        try:
            yield PromptAdmitted(CacheReport(recomputed_tokens=len(request.prompt_token_ids)))
            first = len(request.emitted_token_ids)
            for place in range(first, request.sampling.max_tokens):
                if place - first == self.dies_after:
                    self.is_absent = True
                    raise lost()
                if place - first == self.holds_after:
                    await self._hold()
                yield TokensGenerated((token_at(request, place),))
            if request.sampling.max_tokens - first == self.dies_after:
                self.is_absent = True
                raise lost()
            has_ended = True
            yield RequestFinished(FinishReason.LENGTH, request.sampling.max_tokens)
        except GraftworkError:
            has_ended = True
            raise
        finally:
            if not has_ended:
                self.cancelled.append(request.request_id)

    async def _hold(self) -> None:
        self.held.set()
        losing = self.losing
        waits = [asyncio.create_task(event.wait()) for event in (self.release, self.closed, losing)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.closed.is_set() or losing.is_set():
            raise lost()

    async def stalled_s(self) -> float:
        self._check()
        return 0.0

    async def run_session_command(self, command: SessionCommand) -> SessionMemory:
        self._check()
        self.commands.append(command)
        return SessionMemory(device_tokens=len(command.token_ids))

    async def stats(self) -> EngineStats:
        self._check()
        return EngineStats(running_requests=1, steps=10, kv_usage_ratio=0.5, resident_adapters=("a",))

    def refuse_early(self, newcomer: Newcomer) -> None:
        if newcomer.deadline_s is not None and newcomer.deadline_s < self.late_below_s:
            raise CapacityContended("The queue is long.", retry_after_s=self.late_below_s - newcomer.deadline_s)

    async def probe_adapter(self, digest: str) -> None:
        self._check()
        self.probed.append(digest)

    async def forget_adapter(self, digest: str) -> None:
        self._check()
        self.forgotten.append(digest)

    async def forget_domain(self, domain: IsolationDomain) -> None:
        self._check()
        self.forgotten.append(domain.hex())

    async def close(self) -> None:
        self.closed.set()


class ChangingMembers:
    """Implements MemberSource with a list that a test changes."""

    def __init__(self, addresses: Sequence[MemberAddress]) -> None:
        self.places = list(addresses)
        self.is_absent = False

    async def addresses(self) -> Sequence[MemberAddress]:
        if self.is_absent:
            raise Unavailable("The database does not answer.")
        return [*self.places]


def places(*names: str) -> ChangingMembers:
    """Engines whose addresses are their ids."""
    return ChangingMembers([MemberAddress(name, name) for name in names])
