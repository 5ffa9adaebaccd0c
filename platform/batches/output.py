"""Writes the output and error files of a batch that ends: one line for each line of its input.

    the lines of the input file ──► the stored answer, or an error that says why there is none ──► one of the two files

Owns which line goes to which file. Never knows the form of a line: the caller passes what writes the missing ones.
Invariant: each `custom_id` of the input is in the output exactly once. If the gateway dies, the next one writes both
files anew, because nobody has seen them before `BatchClaims.finish`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from graftwork.platform.batches.batch import Batch, LineOutcome
from graftwork.platform.batches.claims import BatchClaims, ClaimLost, OutputFiles, WrittenOutput, scope_of
from graftwork.platform.batches.file_folder import NewContent
from graftwork.platform.batches.file_vault import FileVault, finished
from graftwork.platform.batches.files import FileKeeper
from graftwork.platform.batches.input_lines import LineRequest, lines_of, read_request

_ANSWERS_PER_QUERY = 200
_BYTES_PER_WRITE = 1024 * 1024

MissingLine = Callable[[Batch, LineRequest], bytes]
"""A function that makes the line of the error file for a request that was never answered."""

ParseOf = Callable[[str, bytes], Awaitable[Any]]
"""Parses long JSON of a tenant in another process."""


class OutputWriter:
    """Writes the files of batches that end."""

    def __init__(self, claims: BatchClaims, files: FileKeeper, missing: MissingLine, parse: ParseOf) -> None:
        self._claims = claims
        self._files = files
        self._missing = missing
        self._parse = parse

    async def end(self, batch: Batch) -> None:
        """Writes the files of a batch after `BatchClaims.stop`, and ends it. Raises ClaimLost, and Unavailable if the
        files cannot be written now.
        """
        files = await self._claims.begin_files(batch)
        try:
            written = await self._write(batch, files)
        except BaseException:
            await self._remove(batch, files)
            raise
        try:
            await self._claims.finish(batch, files, written)
        except ClaimLost:  # after any other error, the batch may have ended with these files
            await self._remove(batch, files)
            raise

    async def _remove(self, batch: Batch, files: OutputFiles) -> None:
        for file in files.all:
            await self._files.remove(scope_of(batch), file.id)

    async def _write(self, batch: Batch, files: OutputFiles) -> WrittenOutput:
        num_errors = 0
        sizes = {file.id: 0 for file in files.all}
        errors = files.errors or files.output
        async with AsyncExitStack() as stack:
            out = {
                file.id: await stack.enter_async_context(_open(self._files.vault, batch, file.id)) for file in files.all
            }
            outcomes = await stack.enter_async_context(aclosing(self._outcomes(batch)))
            async for outcome in outcomes:
                num_errors += outcome.is_error
                file_id = errors.id if outcome.is_error else files.output.id
                sizes[file_id] += await out[file_id].add(outcome.body + b"\n")
        return WrittenOutput(sizes, num_errors)

    async def _outcomes(self, batch: Batch) -> AsyncGenerator[LineOutcome]:
        """Yields the outcome of each line of the input, in their order."""
        async with AsyncExitStack() as stack:
            answers = await stack.enter_async_context(aclosing(self._answers(batch)))
            file = stack.enter_context(await self._files.open(scope_of(batch), batch.input_file_id))
            lines = await stack.enter_async_context(aclosing(lines_of(file)))
            answer = await anext(answers, None)
            async for line in lines:
                if answer is not None and answer.line == line.number:
                    yield answer
                    answer = await anext(answers, None)
                    continue
                request = await read_request(line, batch.endpoint, partial(self._parse, batch.tenant_id))
                assert isinstance(request, LineRequest), "the input was validated before"
                yield LineOutcome(line.number, True, self._missing(batch, request))

    async def _answers(self, batch: Batch) -> AsyncGenerator[LineOutcome]:
        last = 0
        while found := await self._claims.answers_after(batch, last, _ANSWERS_PER_QUERY):
            for answer in found:
                yield answer
            last = found[-1].line


class _BufferedFile:
    """A new file that is written in large pieces on other threads."""

    def __init__(self, content: NewContent) -> None:
        self._content = content
        self._waiting = bytearray()

    async def add(self, line: bytes) -> int:
        """Writes a line, now or later. Returns its bytes."""
        self._waiting += line
        if len(self._waiting) >= _BYTES_PER_WRITE:
            await self._flush()
        return len(line)

    async def complete(self) -> None:
        await self._flush()
        await finished(asyncio.to_thread(self._content.complete))

    async def _flush(self) -> None:
        piece, self._waiting = bytes(self._waiting), bytearray()
        await finished(asyncio.to_thread(self._content.write, piece))


@asynccontextmanager
async def _open(vault: FileVault, batch: Batch, file_id: str) -> AsyncGenerator[_BufferedFile]:
    """Opens a new file of a batch. The end of the block completes it; an error discards it."""
    content = await vault.create(scope_of(batch), file_id)
    try:
        buffered = _BufferedFile(content)
        yield buffered
        await buffered.complete()
    except BaseException:
        await asyncio.to_thread(content.discard)
        raise
