"""One inference request being generated, by a task that the server owns.

The route reads the events; when its client leaves it calls `abandon`, which cancels the engine's work at once.
However the job ends, its reservation is settled and its usage row written, with what the engine really did.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from graftwork.api.deps.background import ServerTasks
from graftwork.api.http.channel import Channel
from graftwork.api.http.errors import internal_failure
from graftwork.api.inference.usage import UsageFigures
from graftwork.platform.errors import CapacityAbsent, GraftworkError
from graftwork.platform.ids import RequestId
from graftwork.sessions.generation.generator import GenerationEvent, GenerationFinished, GenerationRequest, Generator
from graftwork.sessions.generation.usage import TallyingEngine

Settle = Callable[[UsageFigures | None, str], Awaitable[None]]
"""Told what was used (None if nothing ever left the engine's queue) and the outcome, as the ledger calls it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer to be made."""

    request: GenerationRequest
    generator: Generator
    tally: TallyingEngine
    """The engine under `generator`, which counts."""


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What happened to one of the answers."""

    choice: int
    event: GenerationEvent


class InferenceJob:
    """Owns the running generations of one request."""

    def __init__(
        self,
        request_id: RequestId,
        generations: Sequence[Generation],
        choices_per_prompt: int,
        settle: Settle,
        headers: Mapping[str, str],
    ) -> None:
        self._request_id = request_id
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._settle = settle
        self._channel: Channel[ChoiceEvent] = Channel()
        self._task: asyncio.Task[None] | None = None
        self._is_abandoned = False
        self.headers = headers
        """What the answer's headers say about limits and the model that was served."""

    @property
    def usage(self) -> UsageFigures:
        """Up to now."""
        tallies = [generation.tally for generation in self._generations]
        return UsageFigures.of(tallies, self._choices_per_prompt)

    def start(self, tasks: ServerTasks) -> None:
        self._task = tasks.start(self._run(), f"inference {self._request_id}")
        self._task.add_done_callback(self._finish)

    async def admitted(self) -> None:
        """Return when the first answer has left the engine's queue. Raises the error if the request was refused."""
        await self._channel.wait_for_first()

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Everything that happens, the answers' events interleaved; leaving early abandons the job."""
        try:
            while (item := await self._channel.get()) is not None:
                yield item
        finally:
            self.abandon()

    async def answers(self) -> list[GenerationFinished]:
        """How every choice ended, by its index. Raises the job's error."""
        finished: dict[int, GenerationFinished] = {}
        async with aclosing(self.events()) as events:
            async for item in events:
                if isinstance(item.event, GenerationFinished):
                    finished[item.choice] = item.event
        return [finished[choice] for choice in sorted(finished)]

    def abandon(self) -> None:
        """Nobody reads on: cancel what still runs, once: a second cancel would break off the settling. Never waits."""
        if self._task is not None and not self._is_abandoned:
            self._is_abandoned = True
            self._task.cancel()

    async def _run(self) -> None:
        failure: GraftworkError | None = None
        outcome = "cancelled"
        try:
            await self._generate_all()
            outcome = "completed"
        except GraftworkError as error:
            failure, outcome = error, "failed"
        finally:
            was_admitted = any(generation.tally.cache is not None for generation in self._generations)
            await self._settle(self.usage if was_admitted else None, outcome)
        self._channel.finish(failure)

    async def _generate_all(self) -> None:
        """Raises the first answer's error, after cancelling the others."""
        failures: list[GraftworkError] = []
        try:
            async with asyncio.TaskGroup() as group:
                for choice, generation in enumerate(self._generations):
                    group.create_task(self._generate(choice, generation))
        except* GraftworkError as errors:
            failures += [error for error in errors.exceptions if isinstance(error, GraftworkError)]
        if failures:
            raise failures[0]

    async def _generate(self, choice: int, generation: Generation) -> None:
        """The first choice of a prompt computes it; the others wait for that, and find it in the cache."""
        first = self._generations[choice - choice % self._choices_per_prompt]
        if generation is not first:
            await first.tally.prompt_computed.wait()
        async with aclosing(generation.generator.stream(generation.request)) as events:
            async for event in events:
                if isinstance(event, GenerationFinished):  # what lies behind the answer's end is nobody's usage
                    generation.tally.completion_tokens = event.completion_tokens
                await self._channel.put(ChoiceEvent(choice, event))

    def _finish(self, task: asyncio.Task[None]) -> None:
        """A job that ended out of order tells its reader too; after an orderly end this says nothing new."""
        if task.cancelled():
            self._channel.finish(CapacityAbsent("The server is shutting down: try again shortly.", retry_after_s=1.0))
        elif task.exception() is not None:  # the server's tasks have logged it
            self._channel.finish(internal_failure(self._request_id))
