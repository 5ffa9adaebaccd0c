"""Lets one gateway at a time run a batch, and stores what becomes of the batch.

    claim_some ──► start, or fail ──► answer, for each line ──► stop ──► finish

Each claim begins a new epoch of its batch. Owns these transitions. Never answers a line, and never writes a file.
Invariants: each change checks, in its transaction, that no other gateway has claimed the batch since. The answer to a
line, its usage record and its count are stored in one transaction, and never after `stop`. So each line has at most one
answer and one usage record, wherever a gateway dies.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.platform.batches import batch_rows, file_rows
from graftwork.platform.batches.batch import Batch, BatchForm, BatchStatus, LineOutcome, LineProblem
from graftwork.platform.batches.files import FileKeeper, NewFile
from graftwork.platform.batches.input_lines import CheckedInput
from graftwork.platform.batches.stored_file import FilePurpose, StoredFile
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database, WriteSession
from graftwork.platform.errors import Conflict
from graftwork.platform.gateways.lease import GatewayLease
from graftwork.platform.ledger.repository import add_usage
from graftwork.platform.ledger.usage import UsageEvent
from graftwork.platform.tenancy.principals import AdminPrincipal, TenantScope, scope_of_tenant


class ClaimLost(Conflict):
    """Raised if another gateway has claimed the batch, or if it is gone. The caller must do no more for it."""

    default_code = "batch_claim_lost"

    def __init__(self) -> None:
        super().__init__("Another gateway runs this batch now, or it was deleted.")


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files of a batch that ends, while they are written."""

    output: StoredFile
    errors: StoredFile | None
    """None for a batch in Anthropic's form, whose output file has the errors too."""

    @property
    def all(self) -> tuple[StoredFile, ...]:
        return (self.output,) if self.errors is None else (self.output, self.errors)


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """What was written into the files of a batch."""

    size_by_file: dict[str, int]
    """The bytes of each file, by its id. An empty file is deleted again."""
    num_errors: int
    """The lines with an error, also those that were never answered."""


def scope_of(batch: Batch) -> TenantScope:
    """Returns the permission to act for the tenant of a batch that this gateway runs."""
    return scope_of_tenant(AdminPrincipal(), batch.tenant_id)


class BatchClaims:
    """The batches that one gateway runs."""

    def __init__(self, database: Database, files: FileKeeper, lease: GatewayLease, clock: Clock) -> None:
        """`lease` is the lease of this gateway, which somebody else renews."""
        self._database = database
        self._files = files
        self._lease = lease
        self._clock = clock

    async def claim_some(self, limit: int, but: Collection[str] = ()) -> list[Batch]:
        """Claims up to `limit` batches that no living gateway runs, the oldest first, without those in `but`."""
        if limit <= 0:
            return []
        async with self._database.read() as session:
            free = await batch_rows.find_free(session, self._lease, limit + len(but))
        claimed = list[Batch]()
        for batch_id in [one for one in free if one not in but][:limit]:
            async with self._database.write() as session:
                if (batch := await batch_rows.claim(session, self._lease, batch_id)) is not None:
                    claimed.append(batch)
        return claimed

    async def look(self, batch_ids: Collection[str]) -> dict[str, Batch]:
        """Returns the present state of batches, by id. A batch that was deleted is left out."""
        if not batch_ids:
            return {}
        async with self._database.read() as session:
            return await batch_rows.find_claimed(session, batch_ids)

    async def release(self, batch: Batch) -> None:
        """Lets other gateways run the batch."""
        async with self._database.write() as session:
            await batch_rows.release(session, batch)

    async def start(self, batch: Batch, checked: CheckedInput) -> Batch:
        """Begins with the lines of a batch whose input is right. Returns its new state. Raises ClaimLost.

        A batch that was cancelled meanwhile stays so.
        """
        values: dict[str, Any] = {"total": checked.num_lines, "model": checked.model}
        async with self._database.write() as session:
            now = await self._held(session, batch)
            if now.status is BatchStatus.VALIDATING:
                values |= {"status": BatchStatus.IN_PROGRESS, "in_progress_at": self._clock.now()}
            await batch_rows.change(session, scope_of(batch), batch.id, values)
        return (await self.look([batch.id])).get(batch.id, batch)

    async def fail(self, batch: Batch, problems: Sequence[LineProblem]) -> None:
        """Ends a batch whose input is wrong or lost, without any output. Raises ClaimLost."""
        values = {
            "status": BatchStatus.FAILED,
            "ended_at": self._clock.now(),
            "errors": [one.as_json() for one in problems],
            "gateway": None,
        }
        async with self._database.write() as session:
            await self._held(session, batch)
            await batch_rows.change(session, scope_of(batch), batch.id, values)
            await batch_rows.delete_answers(session, batch)

    async def answered_lines(self, batch: Batch) -> set[int]:
        """Returns the numbers of the lines that have an answer."""
        async with self._database.read() as session:
            return await batch_rows.answered_lines(session, batch)

    async def answer(self, batch: Batch, outcome: LineOutcome, usage: UsageEvent | None) -> bool:
        """Stores the answer to a line, with its usage record if it used anything.

        Returns False and changes nothing if the line has an answer. Raises ClaimLost, also after `stop`. If it raises
        Unavailable, the answer may be stored or not: call it again.
        """
        async with self._database.write() as session:
            now = await self._held(session, batch)
            if now.ending is not None:
                raise ClaimLost
            if not await batch_rows.add_answer(session, batch, outcome):
                return False
            if usage is not None:
                await add_usage(session, usage)
        return True

    async def stop(self, batch: Batch, ending: BatchStatus, problem: LineProblem | None = None) -> Batch:
        """Decides how a batch ends: from now on no line is answered. Returns its new state. Raises ClaimLost.

        A batch that a tenant has cancelled meanwhile ends as cancelled.
        """
        async with self._database.write() as session:
            now = await self._held(session, batch)
            if now.ending is None:
                values: dict[str, Any] = {"ending": ending, "finalizing_at": self._clock.now()}
                if now.status is BatchStatus.CANCELLING:
                    values["ending"] = BatchStatus.CANCELLED
                else:
                    values["status"] = BatchStatus.FINALIZING
                if problem is not None:
                    values["errors"] = [problem.as_json()]
                await batch_rows.change(session, scope_of(batch), batch.id, values)
        found = (await self.look([batch.id])).get(batch.id)
        if found is None or found.epoch != batch.epoch:
            raise ClaimLost
        return found

    async def answers_after(self, batch: Batch, line: int, limit: int) -> list[LineOutcome]:
        """Returns answers of the batch to lines after the number `line`, in the order of the lines."""
        async with self._database.read() as session:
            return await batch_rows.answers_after(session, batch, line, limit)

    async def begin_files(self, batch: Batch) -> OutputFiles:
        """Adds the files of a batch that ends. Raises ClaimLost."""
        scope, lives_s = scope_of(batch), batch.output_lives_s
        async with self._database.write() as session:
            await self._held(session, batch)
            if batch.form is BatchForm.ANTHROPIC:
                new = NewFile(FilePurpose.MESSAGE_BATCH, f"{batch.id}_results.jsonl")
                return OutputFiles(await self._files.begin(session, scope, new), None)
            output, errors = [
                await self._files.begin(
                    session, scope, NewFile(FilePurpose.BATCH_OUTPUT, f"{batch.id}_{kind}.jsonl", lives_s)
                )
                for kind in ("output", "error")
            ]
            return OutputFiles(output, errors)

    async def finish(self, batch: Batch, files: OutputFiles, written: WrittenOutput) -> None:
        """Ends a batch whose files are complete: shows the files, and deletes the answers. Raises ClaimLost."""
        scope = scope_of(batch)
        shown = {file.id for file in files.all if written.size_by_file[file.id]}
        output, errors = files.output.id, None if files.errors is None else files.errors.id
        values: dict[str, Any] = {
            "status": batch.ending,
            "ended_at": self._clock.now(),
            "output_file_id": output if output in shown else None,
            "error_file_id": errors if errors in shown else None,
            "gateway": None,
        }
        if batch.form is BatchForm.OPENAI:  # which knows no other lines than those with an answer and with an error
            values["errored"] = written.num_errors
        async with self._database.write() as session:
            await self._held(session, batch)
            for file_id in shown:
                if not await file_rows.make_ready(session, scope, file_id, written.size_by_file[file_id]):
                    raise ClaimLost  # the tenant was erased
            await batch_rows.change(session, scope, batch.id, values)
            await batch_rows.delete_answers(session, batch)
        for file in files.all:
            if file.id not in shown:
                await self._files.remove(scope, file.id)

    async def _held(self, session: WriteSession, batch: Batch) -> Batch:
        found = await batch_rows.hold(session, batch)
        if found is None or found.has_ended:
            raise ClaimLost
        return found
