"""Defines `InferenceJob`, a task of the server that generates the answers to one inference request.

Owns the request's generations, and the account that has the request's usage and its quota reservation.
Never knows the form of the answer: the route gives the job a function that takes the events. Each generation calls this
function in its own task, so an event wakes no other task. If the client reads slowly, the generation waits.
When the client leaves, the route calls `abandon`, which cancels the engine's work at once.
Invariant: at the end of every job, with or without an error, the job writes its usage row and settles its quota
reservation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from graftwork.api.deps.background import ServerTasks
from graftwork.api.deps.resources import InferenceResources
from graftwork.api.http.errors import internal_failure
from graftwork.api.inference.request import InferenceRequest
from graftwork.engine.core.events import CacheReport, DraftReport, PromptAdmitted
from graftwork.platform.errors import GraftworkError, NotPermitted, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.quotas.in_flight import HeldPlaces
from graftwork.platform.tenancy.metering import UsageOutcome
from graftwork.sessions.generation.generator import Generation, GenerationEvent, GenerationFinished
from graftwork.sessions.generation.usage import Charge, RequestAccount, Usage, kv_limits


async def start_inference(
    resources: InferenceResources, inference: InferenceRequest, places: HeldPlaces
) -> "InferenceJob":
    """Reserves the tenant's quota for the request, and starts the request's job, which keeps `places` until its end.

    Raises LimitExceeded if the quota does not allow the request; then the engine generates nothing.
    If the engine later refuses the request, the methods of the job raise the engine's error.
    """
    principal, accounting = inference.principal, resources.accounting
    quota = await accounting.quota_of(principal.tenant_id)
    charge = Charge(inference.request_id, principal, inference.resolved)
    account = await accounting.open(charge, quota, inference.estimated_tokens, inference.num_answers)
    requests = inference.generation_requests(principal.isolation(resources.pepper), kv_limits(quota))
    job = InferenceJob(
        inference.request_id,
        [resources.generator.start(request) for request in requests],
        inference.choices_per_prompt,
        account,
        account.reservation.rate_limit_headers() | {"x-graftwork-model": inference.resolved.label},
    )
    forget = resources.work.add(principal, job.end_access)
    job.start(resources.tasks, places).add_done_callback(lambda _: forget())
    return job


class ChoiceEvent(NamedTuple):
    """One generation event, and the index of the answer to which the event belongs."""

    choice: int
    """The index of the answer, from 0."""
    event: GenerationEvent


Take = Callable[[ChoiceEvent], Awaitable[None]]
"""A function that takes the events of a job. The events of one answer come in order; two answers' events can alternate.
"""


class InferenceJob:
    """Generates all answers to one inference request. Each answer is one generation of the engine."""

    def __init__(
        self,
        request_id: RequestId,
        generations: Sequence[Generation],
        choices_per_prompt: int,
        account: RequestAccount,
        headers: Mapping[str, str],
    ) -> None:
        self._request_id = request_id
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._account = account
        self._places: HeldPlaces | None = None
        self._has_news = asyncio.Event()
        """Is set by the first event, or when the job ends."""
        self._has_ended = asyncio.Event()
        self._failure: GraftworkError | None = None
        self._reader: asyncio.Future[Take] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._is_abandoned = False
        self._lost_access: NotPermitted | None = None
        self.headers = headers
        """The headers of the answer that name the tenant's limits and the served model."""

    @property
    def usage(self) -> Usage:
        """The tokens that all answers have used so far. A prompt counts only once, even if it has several answers."""
        prompts = self._generations[:: self._choices_per_prompt]
        return Usage(
            cache=CacheReport.sum_of(prompt.cache for prompt in prompts if prompt.cache is not None),
            completion_tokens=sum(generation.completion_tokens for generation in self._generations),
            drafts=DraftReport.sum_of(generation.drafts for generation in self._generations),
        )

    def start(self, tasks: ServerTasks, places: HeldPlaces | None = None) -> asyncio.Task[None]:
        """Runs the job in its own task, and returns it. The job keeps `places` until the engine has ended all its
        generations.
        """
        self._places = places
        if places is not None:
            places.keep()
        self._task = tasks.start(self._run(), f"inference {self._request_id}")
        self._task.add_done_callback(self._finish)
        return self._task

    async def admitted(self) -> None:
        """Waits until the engine starts the first answer.

        Raises the engine's error if the engine refuses the request.
        """
        await self._has_news.wait()
        if self._failure is not None:
            raise self._failure

    async def deliver(self, take: Take) -> None:
        """Calls `take` with every event of every answer, until the job ends.

        Until this call, each generation waits with its first event. Raises the job's error.
        """
        self._reader.set_result(take)
        await self._has_ended.wait()
        if self._failure is not None:
            raise self._failure

    async def answers(self) -> list[GenerationFinished]:
        """Waits for all answers, and returns the last event of each answer, in the order of the answers.

        Raises the job's error.
        """
        finished: dict[int, GenerationFinished] = {}

        async def take(item: ChoiceEvent) -> None:
            if isinstance(item.event, GenerationFinished):
                finished[item.choice] = item.event

        await self.deliver(take)
        return [finished[choice] for choice in sorted(finished)]

    def abandon(self) -> None:
        """Cancels the job if it still runs. Call this when the client has left.

        Further calls do nothing, because a second cancel could interrupt the job while it settles its quota
        reservation.
        """
        if self._task is not None and not self._is_abandoned:
            self._is_abandoned = True
            self._task.cancel()

    def end_access(self, error: NotPermitted) -> None:
        """Cancels the job, because its tenant or key has lost its access. Its client gets `error`."""
        self._lost_access = error
        self.abandon()

    async def _run(self) -> None:
        failure: GraftworkError | None = None
        outcome = UsageOutcome.SERVER_ERROR  # unless it turns out otherwise, such as after a bug
        try:
            await self._generate_all()
            outcome = UsageOutcome.COMPLETED
        except GraftworkError as error:
            failure, outcome = error, UsageOutcome.of_error(error)
        except asyncio.CancelledError:
            outcome = UsageOutcome.CANCELLED if self._is_abandoned else UsageOutcome.SERVER_ERROR
            raise
        finally:
            self._release_places()
            was_admitted = any(generation.cache is not None for generation in self._generations)
            await self._account.close(self.usage if was_admitted else None, outcome)
        self._end(failure)

    async def _generate_all(self) -> None:
        """Generates all answers. If one answer fails, cancels the others and raises its error."""
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
        """Generates one answer. The first answer to a prompt computes the prompt and puts the prompt's KV in the cache.

        All other answers to this prompt first wait until the KV is in the cache.
        """
        first = self._generations[choice - choice % self._choices_per_prompt]
        if generation is not first:
            await first.prompt_computed.wait()
        journal, num_journaled = self._account.journal(), 0
        async with aclosing(generation.events()) as events:
            take: Take | None = None
            async for event in events:
                if generation.completion_tokens > num_journaled:
                    journal.add(generation.completion_tokens - num_journaled)
                    num_journaled = generation.completion_tokens
                elif isinstance(event, PromptAdmitted) and generation is first:
                    journal.admit(event.cache.prompt_tokens, event.cache.cached_tokens)
                if take is None:
                    self._has_news.set()
                    take = await self._reader
                await take(ChoiceEvent(choice, event))

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Ends a job that was cancelled or crashed."""
        self._release_places()  # a job that was cancelled before it ran has not done so
        if task.cancelled():
            shutdown = Unavailable("The server is shutting down: try again shortly.", retry_after_s=1.0)
            self._end(self._lost_access or shutdown)
        elif task.exception() is not None:  # ServerTasks has logged the error
            self._end(internal_failure(self._request_id))

    def _release_places(self) -> None:
        if self._places is not None:
            self._places.release()

    def _end(self, failure: GraftworkError | None) -> None:
        self._failure = failure
        self._has_ended.set()
        self._has_news.set()
