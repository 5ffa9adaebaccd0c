"""Follows the engines of a fleet: which there are, which answer, and what load they report.

    MemberSource ──(each second)──► members ──(four times a second)──► a look at each: describe, then read the load,
                                       │                   unless the engine has just sent it with its tokens
                                       └─(each tick while a question is open)──► silent ones hand their requests over

Owns the members and the looks at them. Never sends a request. One timer serves all engines, and ticks (silence.py) pass
only while an engine owes an answer, because each wake-up of a gateway costs it as much as several tokens. For the same
reason, a load that came with tokens is read when a request is placed, or else at the timer, with those of the others.
Invariant: nothing here waits for the source when a request is placed: the members are those that were read last.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from graftwork.engine.core.load import EngineLoad, LoadReport
from graftwork.engine.core.progress import DEFAULT_FREEZE_LIMITS
from graftwork.engine.core.reports import NO_REPORTS, RequestReports
from graftwork.engine.fleet.members import (
    Connect,
    Member,
    MemberAddress,
    MemberSource,
    ReplicaCounters,
    version_of,
)
from graftwork.engine.fleet.prefix_map import PrefixMap
from graftwork.engine.fleet.silence import TICK_S, SilenceMonitor
from graftwork.engine.fleet.speed import STALLED_AFTER_S, SpeedMonitor
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Conflict, GraftworkError, Unavailable
from graftwork.platform.replicas.lease import ServedVersion

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
"""Seconds between two questions to an engine for its load."""
_HEARD_S = 0.2
"""An engine that has sent its load with its tokens within so many seconds is not asked for it: a question costs the
gateway as much as ten tokens.
"""
_LOOKS_PER_REFRESH = 4
_ANSWER_WITHIN_S = 1.0
"""Seconds for an answer to a question for the load. An engine that takes longer gets no new requests."""
_MAX_COUNTERS = 1000
_KV_TIERS = 4
"""The KV of all tiers, as a multiple of the device's, that the prefix map expects an engine to keep."""


class Membership:
    """The members of one fleet."""

    def __init__(
        self,
        source: MemberSource,
        connect: Connect,
        clock: Clock,
        look_every_s: float = LOOK_EVERY_S,
        silence_s: float = DEFAULT_FREEZE_LIMITS.silence_s,
    ) -> None:
        """`silence_s` is the longest silence of an engine whose answers are always late."""
        self._source = source
        self._connect = connect
        self._clock = clock
        self._look_every_s = look_every_s
        self.members: dict[str, Member] = {}
        """By replica id."""
        self.counters: dict[str, ReplicaCounters] = {}
        """By replica id, also of those that have left, up to `_MAX_COUNTERS` of them."""
        self.prefixes = PrefixMap()
        self.speeds = SpeedMonitor()
        self.silences = SilenceMonitor(silence_s)
        self.on_draining: Callable[[Member], None] = lambda member: None
        """Is called when the source says that a member drains."""
        self.may_hand_over: Callable[[int], bool] = lambda requests: True
        """Says whether so many requests may move at once, because their engine is silent."""
        self._reports: RequestReports = NO_REPORTS
        self._next_ready = asyncio.Event()
        """Is set when a member becomes ready. A new event then replaces it."""
        self._looks: dict[str, asyncio.Task[None]] = {}
        """By replica id, the look at a member that is under way or was the last."""
        self._refreshing: asyncio.Task[None] | None = None
        self._has_asked = asyncio.Event()
        """Is set while an engine may owe an answer."""
        self._following: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the list of engines, asks all of them once, and follows them from then on. A second call does nothing.

        Raises Unavailable if the list cannot be read.
        """
        if self._following is not None:
            return
        self._following = asyncio.create_task(self._follow(), name="fleet-members")
        try:
            await self._set_members(await self._source.addresses())
        except BaseException:
            self._following.cancel()
            self._following = None
            raise
        await asyncio.gather(*(self._look(member) for member in self.members.values()))
        self._listening = asyncio.create_task(self._listen(), name="fleet-silence")

    def report_to(self, reports: RequestReports) -> None:
        """Lets all members, and those that come, note what their engines report."""
        self._reports = reports
        for member in self.members.values():
            member.report_to(reports)

    def count(self, replica_id: str) -> ReplicaCounters:
        """Returns the counters of a replica, to add to them."""
        counted = self.counters.get(replica_id)
        if counted is None:
            if len(self.counters) >= _MAX_COUNTERS:
                gone = next((one for one in self.counters if one not in self.members), replica_id)
                self.counters.pop(gone, None)
            counted = self.counters[replica_id] = ReplicaCounters()
        return counted

    @property
    def ready(self) -> list[Member]:
        """The members that may get new requests, by all that they have reported."""
        self.read_reports()
        return [member for member in self.members.values() if member.is_ready]

    async def wait_for_ready(self, served: ServedVersion | None = None) -> None:
        """Waits until a member may get new requests, one that serves `served` if that is given."""
        while not any(member.serves(served) for member in self.ready):
            await self._next_ready.wait()

    def note_lost(self, member: Member, reason: str) -> None:
        """Notes that a member's engine was lost. It gets no requests until it has described itself again."""
        if member.description is not None:
            _log.warning("replica_lost", extra={"replica": member.replica_id, "reason": reason})
        member.note_lost(reason)
        self._forget(member.replica_id)

    async def close(self) -> None:
        own = (self._following, self._listening, self._refreshing, *self._looks.values())
        tasks = [task for task in own if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.close() for member in self.members.values()))

    async def refresh(self) -> None:
        """Reads the list of engines again. Raises Unavailable if it cannot be read; the members then stay."""
        await self._set_members(await self._source.addresses())

    async def _follow(self) -> None:
        """Begins the looks at the engines, and reads their list each fourth time. Waits for neither."""
        for number in count(1):
            await asyncio.sleep(self._look_every_s)
            self.read_reports()
            if not number % _LOOKS_PER_REFRESH and (self._refreshing is None or self._refreshing.done()):
                self._refreshing = asyncio.create_task(self._refresh(), name="fleet-list")
            for replica_id, member in self.members.items():
                last = self._looks.get(replica_id)
                if (last is None or last.done()) and not self._was_heard(member):
                    self._looks[replica_id] = asyncio.create_task(self._look(member), name=f"fleet-look-{replica_id}")

    async def _refresh(self) -> None:
        try:
            await self.refresh()
        except GraftworkError as error:
            _log.warning("fleet_list_unknown", extra={"reason": error.message})

    def _was_heard(self, member: Member) -> bool:
        """Returns whether an engine has just sent its load with its tokens, so that it need not be asked."""
        return member.description is not None and self._clock.monotonic() - member.heard_at < _HEARD_S

    async def _set_members(self, addresses: Sequence[MemberAddress]) -> None:
        wanted = {place.replica_id: place for place in addresses}
        for replica_id, member in [*self.members.items()]:
            place = wanted.get(replica_id)
            if place is None or (place.address, place.epoch) != (member.place.address, member.place.epoch):
                await self._remove(member)
            elif place != member.place:
                member.place = place
                self._note_draining(member)
        for replica_id, place in wanted.items():
            if replica_id not in self.members:
                member = self.members[replica_id] = Member(place, self._connect)
                member.client.follow_load(partial(self._note_pushed, member))
                member.report_to(self._reports)

    def _note_draining(self, member: Member) -> None:
        member.is_draining = member.place.is_draining
        if member.is_draining:
            self.on_draining(member)

    async def _remove(self, member: Member) -> None:
        """Forgets a member. Its requests at this gateway lose their engine, and go on elsewhere."""
        del self.members[member.replica_id]
        look = self._looks.pop(member.replica_id, None)
        if look is not None:
            look.cancel()
        self._forget(member.replica_id)
        member.note_lost("The engine has left the fleet.")
        await member.close()

    def _note_pushed(self, member: Member, report: LoadReport) -> None:
        """Keeps the load that an engine has sent with its tokens, for `read_reports`."""
        if self.members.get(member.replica_id) is not member or member.description is None or member.is_silent:
            return  # it is gone, or must answer a question first
        member.heard_at, member.report = self._clock.monotonic(), report

    def read_reports(self) -> None:
        """Reads the loads that engines have sent with their tokens since the last call."""
        for member in self.members.values():
            report, member.report = member.report, None
            if report is not None:
                self._read_report(member, report)

    def _read_report(self, member: Member, report: LoadReport) -> None:
        try:
            load = report.read()
            member.note_load(load)
        except Conflict as error:
            self._refuse(member, error)
        except Unavailable as error:
            member.problem = error.message
        else:
            self.silences.ask(member.replica_id)
            self.silences.note_answer(member.replica_id)
            self._take(member, load, member.heard_at)

    async def _look(self, member: Member) -> None:
        """Asks a member's engine how it is."""
        try:
            if member.description is None:
                await self._admit(member)
            self.silences.ask(member.replica_id)
            self._has_asked.set()
            load = await member.client.read_load(_ANSWER_WITHIN_S)
            self.silences.note_answer(member.replica_id)
            member.note_load(load)
        except Conflict as error:
            self._refuse(member, error)
        except Unavailable as error:
            member.problem = error.message  # its requests end when the connection does, or they get through
        else:
            self._take(member, load, self._clock.monotonic())

    def _take(self, member: Member, load: EngineLoad, said_at: float) -> None:
        self.speeds.note(member.replica_id, load, said_at)
        self._judge(member)

    def _refuse(self, member: Member, error: Conflict) -> None:
        if member.problem != error.message:
            _log.error("replica_refused", extra={"replica": member.replica_id, "reason": error.message})
        self.note_lost(member, error.message)

    async def _listen(self) -> None:
        while True:
            await self._has_asked.wait()
            self.silences.start(self._clock.monotonic())
            for member in self.members.values():
                member.has_spoken = False
            while self.silences.has_questions:
                await asyncio.sleep(TICK_S)
                self.check_silences()
            self._has_asked.clear()

    def check_silences(self) -> None:
        """Lets the requests of engines that have fallen silent go on elsewhere. Is called at each tick."""
        self.read_reports()
        self.silences.tick(self._clock.monotonic())
        for member in [*self.members.values()]:
            if member.has_spoken:
                member.has_spoken = False
                self.silences.note_sign(member.replica_id)
            elif member.num_requests and not member.is_silent:
                self._check_silence(member)

    def _check_silence(self, member: Member) -> None:
        """Hands the requests of a silent engine over, if another engine answers at this moment."""
        silent_s = self.silences.silent_s(member.replica_id)
        served = None if member.description is None else version_of(member.description)
        others = [one for one in self.ready if one is not member and one.serves(served)]
        if (
            not silent_s
            or not any(self.silences.answers(one.replica_id) for one in others)
            or not self.may_hand_over(member.num_requests)
        ):
            return
        extra = {"replica": member.replica_id, "silent_s": round(silent_s, 2), "requests": member.num_requests}
        _log.warning("replica_silent", extra=extra)
        member.is_silent = True
        member.problem = f"The engine has not answered for {silent_s:.1f} s."
        member.hand_over()

    async def _admit(self, member: Member) -> None:
        description = await member.verify(self.members.values())
        pages = description.device_pages * _KV_TIERS
        self.prefixes.set_room(member.replica_id, pages * description.page_tokens)
        member.description = description
        _log.info("replica_ready", extra={"replica": member.replica_id, "epoch": description.epoch})

    def _judge(self, member: Member) -> None:
        """Decides, by an engine's reports, whether it gets requests."""
        stalled_s = self.speeds.stalled_s(member.replica_id)
        was_ready = member.is_ready
        member.problem = None
        if stalled_s > STALLED_AFTER_S:
            member.problem = f"The engine has made no step for {stalled_s:.1f} s."
        if member.is_ready and not was_ready:
            self._next_ready.set()
            self._next_ready = asyncio.Event()

    def _forget(self, replica_id: str) -> None:
        self.prefixes.forget(replica_id)
        self.speeds.forget(replica_id)
        self.silences.forget(replica_id)
