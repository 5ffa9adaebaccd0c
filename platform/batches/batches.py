"""Creates, finds, cancels and deletes the batches of tenants.

Owns what a tenant may do with a batch. Never answers a line: a gateway that has claimed the batch does (`claims.py`).
Invariant: a batch that has not ended has its input file, because neither a tenant nor the sweep can delete the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graftwork.platform.batches import batch_rows, file_rows
from graftwork.platform.batches.batch import (
    CANCELLABLE,
    COMPLETION_WINDOW_S,
    Batch,
    BatchForm,
    BatchStatus,
    unknown_batch,
)
from graftwork.platform.batches.file_folder import NewContent
from graftwork.platform.batches.files import FileKeeper, NewFile
from graftwork.platform.batches.stored_file import FilePurpose, StoredFile, unknown_file
from graftwork.platform.clock import Clock
from graftwork.platform.database import Database
from graftwork.platform.errors import BudgetSpent, Conflict, InvalidRequest, NotFound, NotPermitted
from graftwork.platform.ids import TenantId, new_id
from graftwork.platform.pagination import Page, PageRequest
from graftwork.platform.tenancy.principals import AdminPrincipal, Principal, TenantScope, scope_of_tenant
from graftwork.platform.tenancy.repository import hold_tenant

_SWEPT_PER_QUERY = 100


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a tenant may have in batches."""

    max_lines: int
    """The most requests of one batch."""
    max_open: int
    """The most batches of a tenant that have not ended."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to be created from an uploaded file."""

    endpoint: str
    input_file_id: str
    client_metadata: Mapping[str, str] | None = None
    output_lives_s: float | None = None
    form: BatchForm = BatchForm.OPENAI


class BatchKeeper:
    """The batches of all tenants, for the routes."""

    def __init__(self, database: Database, files: FileKeeper, clock: Clock, limits: BatchLimits) -> None:
        self._database = database
        self._clock = clock
        self.files = files
        self.limits = limits

    async def create(self, principal: Principal, new: NewBatch) -> Batch:
        """Creates a batch. A gateway begins with it within a second.

        Raises NotFound for an unknown file, InvalidRequest for one that was not uploaded for batches, and BudgetSpent if
        the tenant has too many batches that have not ended.
        """
        scope = principal.scope()
        file = await self.files.get(scope, new.input_file_id, "input_file_id")
        if file.purpose is not FilePurpose.BATCH:
            raise InvalidRequest(
                f"The file {file.id} has the purpose {file.purpose}: upload the requests with the purpose batch.",
                param="input_file_id",
            )
        return await self._add(principal, new)

    async def create_messages(self, principal: Principal, endpoint: str, lines: Sequence[bytes]) -> Batch:
        """Creates a batch in Anthropic's form, whose requests are these lines of an input file."""

        def write(out: NewContent) -> None:
            for line in lines:
                out.write(line + b"\n")

        scope = principal.scope()
        await self._check_room(scope)
        name = NewFile(FilePurpose.MESSAGE_BATCH, "requests.jsonl")
        size_bytes = sum(map(len, lines)) + len(lines)
        file = await self.files.upload(scope, name, size_bytes, write)
        try:
            return await self._add(principal, NewBatch(endpoint, file.id, form=BatchForm.ANTHROPIC), total=len(lines))
        except BaseException:
            await self.files.remove(scope, file.id)
            raise

    async def get(self, scope: TenantScope, batch_id: str, form: BatchForm) -> Batch:
        """Returns a batch. Raises NotFound, also for a batch of the other form."""
        async with self._database.read() as session:
            return _existing(await batch_rows.find(session, scope, batch_id), batch_id, form)

    async def list(self, scope: TenantScope, form: BatchForm, page: PageRequest) -> Page[Batch]:
        async with self._database.read() as session:
            return await batch_rows.page(session, scope, form, page)

    async def cancel(self, scope: TenantScope, batch_id: str, form: BatchForm) -> Batch:
        """Cancels a batch: the lines that run are still answered, and no others. Returns its new state.

        Does nothing for a batch that is being cancelled or finalized. Raises Conflict if it has ended.
        """
        async with self._database.write() as session:
            batch = _existing(await batch_rows.find(session, scope, batch_id, lock=True), batch_id, form)
            if batch.has_ended:
                raise Conflict(f"Cannot cancel a batch with status '{batch.status}': it has ended.", param="batch_id")
            if batch.status not in CANCELLABLE:
                return batch
            cancelled = replace(batch, status=BatchStatus.CANCELLING, cancelling_at=self._clock.now())
            values = {"status": cancelled.status, "cancelling_at": cancelled.cancelling_at}
            await batch_rows.change(session, scope, batch_id, values)
        return cancelled

    async def delete(self, scope: TenantScope, batch_id: str, form: BatchForm) -> None:
        """Deletes a batch with its files. Raises Conflict if it has not ended."""
        batch = await self.get(scope, batch_id, form)
        if not batch.has_ended:
            raise Conflict("The batch has not ended: cancel it first, and delete it after its end.", param="batch_id")
        await self._delete(batch)

    async def results(self, scope: TenantScope, batch_id: str, form: BatchForm) -> StoredFile:
        """Returns the output file of a batch that has ended. Raises NotFound if the batch has no results."""
        batch = await self.get(scope, batch_id, form)
        async with self._database.read() as session:
            found = None
            if batch.output_file_id is not None:
                found = await file_rows.find(session, scope, batch.output_file_id)
        if found is None:
            raise _no_results(batch)
        return found

    async def sweep(self) -> int:
        """Deletes the batches of all tenants that ended longer ago than files are kept. Returns how many."""
        num_deleted = 0
        while True:
            before = self._clock.now() - self.files.limits.retention_s
            async with self._database.read() as session:
                old = await batch_rows.find_old(session, before, _SWEPT_PER_QUERY)
            for batch in old:
                await self._delete(batch)
            num_deleted += len(old)
            if len(old) < _SWEPT_PER_QUERY:
                return num_deleted

    async def delete_older(self, scope: TenantScope, before: float) -> int:
        """Deletes a tenant's batches that ended before a time in Unix seconds, and its files from before it. Returns how
        many files and batches.
        """
        num_deleted = 0
        while True:
            async with self._database.read() as session:
                old = await batch_rows.find_ended(session, scope, before, _SWEPT_PER_QUERY)
            for batch in old:
                await self._delete(batch)
            num_deleted += len(old)
            if len(old) < _SWEPT_PER_QUERY:
                return num_deleted + await self.files.delete_older(scope, before)

    async def erase(self, scope: TenantScope) -> bool:
        """Erases all batches and files of a deleted tenant. Returns True."""
        async with self._database.write() as session:
            await batch_rows.erase(session, scope)
        return await self.files.erase(scope)

    async def _add(self, principal: Principal, new: NewBatch, total: int = 0) -> Batch:
        now = self._clock.now()
        batch = Batch(
            id=new_id(new.form.id_prefix),
            tenant_id=TenantId(principal.tenant_id),
            key_id=principal.key_id,
            form=new.form,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            client_metadata=new.client_metadata,
            status=BatchStatus.VALIDATING,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
            total=total,
            output_lives_s=new.output_lives_s,
        )
        scope = principal.scope()
        await self._check_room(scope)
        async with self._database.write() as session:
            if await hold_tenant(session, scope) is None:
                raise NotPermitted("This tenant is deleted; ask the operator.", code="tenant_deleted")
            if await file_rows.find(session, scope, new.input_file_id) is None:
                raise unknown_file(new.input_file_id, "input_file_id")  # it was deleted meanwhile
            await batch_rows.add(session, batch)
        return batch

    async def _check_room(self, scope: TenantScope) -> None:
        most = self.limits.max_open
        async with self._database.read() as session:
            num_open = await batch_rows.count_open(session, scope, most)
        if num_open >= most:
            raise BudgetSpent(
                f"{most} of your batches have not ended, and no more may be open: wait for the end of one, or cancel one.",
                code="max_batches_exceeded",
                details={"limit": "max_open_batches"},
            )

    async def _delete(self, batch: Batch) -> None:
        """Deletes an ended batch; in Anthropic's form with its files, which nobody could find without it."""
        scope = scope_of_tenant(AdminPrincipal(), batch.tenant_id)
        hidden = [batch.input_file_id, batch.output_file_id] if batch.form is BatchForm.ANTHROPIC else []
        for file_id in hidden:
            if file_id is not None:
                await self.files.remove(scope, file_id)
        async with self._database.write() as session:
            await batch_rows.delete_batch(session, scope, batch.id)


def _no_results(batch: Batch) -> NotFound:
    when = "has no results any more" if batch.has_ended else "has no results before it has ended"
    return NotFound(f"The batch {batch.id} {when}.", code="no_results")


def _existing(batch: Batch | None, batch_id: str, form: BatchForm) -> Batch:
    if batch is None or batch.form is not form:
        raise unknown_batch(batch_id)
    return batch
