"""Runs the batches of all tenants that this gateway has claimed.

    tick, each second:   look at the claimed batches: cancelled? expired? lost? ──► claim batches that nobody runs
    each claimed batch:  check the input ──► answer the lines, some at a time ──► stop ──► write the files ──► ended

Owns the tasks of the claimed batches, and when each of them stops. All state is in the database, so a gateway that
starts, or any other one, goes on where a gateway has died. Never decides what is stored: BatchClaims does.
Invariants: a line takes a place of LineSlots before anything is done for it, and only tenants' own limits and the
engine's lowest tier let it in. What is answered for a batch that another gateway has claimed is dropped.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from graftwork.api.batches.line_answers import Later, LineAnswers
from graftwork.api.batches.line_work import AnswerLine
from graftwork.api.batches.slots import LineSlots
from graftwork.api.deps.background import Pause
from graftwork.platform.batches.batch import Batch, BatchStatus, LineOutcome, LineProblem
from graftwork.platform.batches.claims import BatchClaims, ClaimLost, scope_of
from graftwork.platform.batches.files import FileKeeper
from graftwork.platform.batches.input_lines import InputLine, LineRequest, check_input, lines_of, read_request
from graftwork.platform.batches.output import OutputWriter, ParseOf
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, NotFound, NotPermitted, Unavailable
from graftwork.platform.ids import TenantId
from graftwork.platform.quotas.quota import Quota
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.key_standing import KeyStanding
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.held_account import HeldAccount

TICK_S = 1.0
"""Seconds between two calls of `tick`."""
MAX_CLAIMED = 64
"""The most batches that one gateway runs at the same time."""
_SUSPENDED_S = 5.0
_REST_S = 5.0
"""Seconds for which this gateway leaves a batch alone that it could not go on with."""
_STORE_AGAIN_S = 1.0

_log = logging.getLogger("graftwork.batches")


@dataclass(frozen=True, slots=True)
class RunnerServices:
    """What the runner needs of the gateway."""

    claims: BatchClaims
    files: FileKeeper
    output: OutputWriter
    standing: KeyStanding
    answer: AnswerLine
    quota_of: Callable[[TenantId], Awaitable[Quota]]
    parse: ParseOf
    clock: Clock
    telemetry: Telemetry
    pause: Pause = asyncio.sleep


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """How much the runner does at the same time."""

    lines: int
    """The lines of all batches."""
    tenant_lines: int
    """The lines of one tenant's batches."""
    max_lines: int
    """The most lines of a batch."""


@dataclass(eq=False)
class _Run:
    """One batch that this gateway runs."""

    batch: Batch
    answers: LineAnswers
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Is set when no more lines are to be begun."""
    ending: BatchStatus = BatchStatus.COMPLETED
    problem: LineProblem | None = None

    def end(self, ending: BatchStatus, problem: LineProblem | None = None) -> None:
        if not self.stop.is_set():
            self.ending, self.problem = ending, problem
            self.stop.set()


class BatchRunner:
    """Runs batches on one gateway."""

    def __init__(self, services: RunnerServices, limits: RunnerLimits) -> None:
        self._services = services
        self._limits = limits
        self._slots = LineSlots(limits.lines, limits.tenant_lines)
        self._runs: dict[str, tuple[_Run, asyncio.Task[None]]] = {}
        self._resting: dict[str, float] = {}
        """Batches that could not go on, with the time on the monotonic clock until which they are left alone."""

    async def tick(self) -> None:
        """Notices what has become of the claimed batches, and begins with others. Call it every second."""
        services = self._services
        states = await services.claims.look(self._runs.keys())
        for batch_id, (run, task) in list(self._runs.items()):
            self._notice(run, task, states.get(batch_id))
        await self._slots.wake()
        now = services.clock.monotonic()
        self._resting = {batch_id: until for batch_id, until in self._resting.items() if until > now}
        for batch in await services.claims.claim_some(MAX_CLAIMED - len(self._runs), self._resting.keys()):
            self._begin(batch)
        services.telemetry.show_batches(len(self._runs))

    async def close(self) -> None:
        """Ends the work on all batches at once, and lets other gateways go on with them."""
        runs = list(self._runs.values())
        for _, task in runs:
            task.cancel()
        await asyncio.gather(*(task for _, task in runs), return_exceptions=True)
        for run, _ in runs:  # also those whose tasks had not begun
            await self._release(run.batch)

    async def drained(self) -> None:
        """Waits until the batches that this gateway has claimed by now have ended, or are left alone."""
        await asyncio.gather(*(task for _, task in list(self._runs.values())), return_exceptions=True)

    def _begin(self, batch: Batch) -> None:
        run = _Run(batch, LineAnswers(batch, self._services.answer))
        task = asyncio.create_task(self._run(run), name=f"batch {batch.id}")
        self._runs[batch.id] = (run, task)
        task.add_done_callback(lambda _: self._runs.pop(batch.id, None))

    def _notice(self, run: _Run, task: "asyncio.Task[None]", now: Batch | None) -> None:
        if now is None or now.epoch != run.batch.epoch:
            task.cancel()
        elif now.status is BatchStatus.CANCELLING:
            run.end(BatchStatus.CANCELLED)
        elif self._services.clock.now() >= now.expires_at:
            run.end(BatchStatus.EXPIRED)

    async def _run(self, run: _Run) -> None:
        """Runs a batch to its end. If that does not work now, lets any gateway try again after a while."""
        batch = run.batch
        try:
            await self._drive(run)
            return
        except ClaimLost:
            _log.warning("batch_claim_lost", extra={"batch_id": batch.id})
        except Exception as error:  # noqa: BLE001 - the outermost loop of a batch: any gateway tries again
            is_known = isinstance(error, GraftworkError)
            _log.warning("batch_interrupted", extra={"batch_id": batch.id}, exc_info=None if is_known else error)
        finally:
            self._resting[batch.id] = self._services.clock.monotonic() + _REST_S
            await self._release(batch)

    async def _release(self, batch: Batch) -> None:
        with suppress(Unavailable):  # then the claim ends with this gateway's lease
            await self._services.claims.release(batch)

    async def _drive(self, run: _Run) -> None:
        services, batch = self._services, run.batch
        if self._services.clock.now() >= batch.expires_at:
            run.end(BatchStatus.EXPIRED)
        try:
            if batch.ending is None:
                if batch.in_progress_at is None and not await self._check(run):
                    return
                await self._answer_lines(run)
                batch = await services.claims.stop(batch, run.ending, run.problem)
            await services.output.end(batch)
        except NotFound as error:
            if services.clock.now() < batch.expires_at:
                raise Unavailable(f"The input of {batch.id} is not here: {error.message}") from error
            lost = LineProblem("input_file_lost", "The server has lost the input file of this batch.")
            await services.claims.fail(batch, [lost])
            services.telemetry.count_batch(BatchStatus.FAILED)
            return
        services.telemetry.count_batch(batch.ending or run.ending)

    async def _check(self, run: _Run) -> bool:
        """Validates the input, and begins with its lines. Returns False if the batch has failed."""
        services, batch = self._services, run.batch
        with await services.files.open(scope_of(batch), batch.input_file_id) as file:
            checked = await check_input(
                file, batch.endpoint, self._limits.max_lines, partial(services.parse, batch.tenant_id)
            )
        if checked.problems:
            await services.claims.fail(batch, checked.problems)
            services.telemetry.count_batch(BatchStatus.FAILED)
            return False
        await services.claims.start(batch, checked)
        return True

    async def _answer_lines(self, run: _Run) -> None:
        """Answers the lines that have no answer, until there is none or the batch is to stop."""
        services, batch = self._services, run.batch
        answered = await services.claims.answered_lines(batch)
        async with AsyncExitStack() as stack:
            file = stack.enter_context(await services.files.open(scope_of(batch), batch.input_file_id))
            lines = await stack.enter_async_context(aclosing(lines_of(file)))
            queue = _LineQueue(lines, answered)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._limits.tenant_lines):
                        group.create_task(self._work(run, queue))
            except BaseExceptionGroup as errors:
                failure = errors.exceptions[0]
            else:
                return
        raise failure

    async def _work(self, run: _Run, queue: "_LineQueue") -> None:
        """Answers one line after another."""
        while not run.stop.is_set() and (line := await queue.next()) is not None:
            later: Later | None = Later(0.0)
            while later is not None and not run.stop.is_set():
                later = await self._try(run, line)
                if later is not None:
                    await self._rest(run, later.after_s)

    async def _try(self, run: _Run, line: InputLine) -> Later | None:
        """Answers a line in a place of its own. Returns when to try again; None if the line has its answer."""
        batch, services = run.batch, self._services
        try:
            principal = await services.standing.principal_of(batch.tenant_id, batch.key_id)
            quota = None if principal is None else await services.quota_of(batch.tenant_id)
        except NotPermitted as error:
            if error.code != "access_ended":  # suspended since a moment ago
                return Later(_SUSPENDED_S)
            run.end(BatchStatus.FAILED, LineProblem("access_ended", error.message))
            return None
        if principal is None or quota is None:
            return Later(_SUSPENDED_S)
        if not await self._slots.take(batch.tenant_id, _share_of(quota), run.stop):
            return None
        try:
            return await self._answer(run, line, principal)
        finally:
            await self._slots.give_back(batch.tenant_id)

    async def _answer(self, run: _Run, line: InputLine, principal: Principal) -> Later | None:
        parse = partial(self._services.parse, run.batch.tenant_id)
        request = await read_request(line, run.batch.endpoint, parse)
        assert isinstance(request, LineRequest), "the input was validated before"
        held = HeldAccount(run.batch.id)
        try:
            outcome = await run.answers.of(request, principal, held)
            if isinstance(outcome, Later):
                return outcome
            await self._store(run, outcome, held)
        finally:
            await held.drop()
        return None

    async def _store(self, run: _Run, outcome: LineOutcome, held: HeldAccount) -> None:
        """Stores an answer with its usage record. While the database does not answer, tries again."""
        services = self._services
        while True:
            try:
                await services.claims.answer(run.batch, outcome, held.row())
            except Unavailable:
                await services.pause(_STORE_AGAIN_S)
            else:
                break
        await held.stored()
        services.telemetry.count_batch_line(run.batch.tenant_id, is_error=outcome.is_error)

    async def _rest(self, run: _Run, seconds: float) -> None:
        """Waits, but no longer than until the batch is to stop."""
        waits = {asyncio.ensure_future(self._services.pause(seconds)), asyncio.ensure_future(run.stop.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


class _LineQueue:
    """The lines of a batch that have no answer, for several that answer them."""

    def __init__(self, lines: AsyncGenerator[InputLine], answered: AbstractSet[int]) -> None:
        self._lines = lines
        self._answered = answered
        self._reading = asyncio.Lock()

    async def next(self) -> InputLine | None:
        async with self._reading:
            async for line in self._lines:
                if line.number not in self._answered:
                    return line
        return None


def _share_of(quota: Quota) -> int | None:
    """Returns how many lines of a tenant may run at once: half of its concurrent requests, so that others fit beside."""
    most = quota.max_concurrent_requests
    return None if most is None else max(1, most // 2)
