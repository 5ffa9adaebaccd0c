"""Defines `InferenceJob`, the server's task that answers a request (see request.py).

Owns the request's generations, and the account that has the request's usage and its quota reservation.
Never knows the form of the answer: the route gives the job a function that takes the events. Each generation calls this
function in its own task, so an event wakes no other task. If the client reads slowly, the generation waits.
When the client leaves, the route calls `abandon`, which cancels the engine's work at once.
Invariant: at the end of every job, with or without an error, the job writes its usage row and settles its quota
reservation, or its HeldAccount has both.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from graftwork.api.deps.background import ServerTasks
from graftwork.api.deps.resources import InferenceResources
from graftwork.api.http.errors import internal_failure
from graftwork.api.http.response_headers import MODEL, degraded_header
from graftwork.api.inference.request import InferenceRequest
from graftwork.engine.core.events import CacheReport, DraftReport, PromptAdmitted
from graftwork.platform.errors import GraftworkError, NotPermitted, Unavailable
from graftwork.platform.ids import RequestId
from graftwork.platform.ledger.journal import DeliveryCounts
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.platform.quotas.in_flight import HeldPlaces
from graftwork.sessions.generation.generator import Generation, GenerationEvent, GenerationFinished
from graftwork.sessions.generation.held_account import HeldAccount
from graftwork.sessions.generation.request import kv_limits
from graftwork.sessions.generation.usage import Charge, EngineUse, RequestAccount, UnbilledTokens, Usage


def _journal_prompt(journal: DeliveryCounts, cache: CacheReport) -> None:
    journal.admit(
        cache.prompt_tokens, cache.cached_tokens, host_tokens=cache.host_tokens, disk_tokens=cache.disk_tokens
    )


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The first fields of an answer, such as the id and the model. All chunks of one stream have the same values."""

    answer_id: str
    created: int
    model: str
    """The model name that the client sent."""
    system_fingerprint: str
    """Identifies the weights that make the answer: an adapter version, or the base model."""
    service_tier: str
    """The tier that the server used. It may be lower than the requested tier."""

    @classmethod
    def of(cls, prefix: str, inference: InferenceRequest, resources: InferenceResources) -> "ResponseHead":
        """Makes the first fields of one answer.

        The answer's id is `prefix`, such as `chatcmpl-`, followed by the request's id without `req_`.
        """
        digest = inference.resolved.digest or resources.description.fingerprint
        return cls(
            answer_id=prefix + inference.request_id.removeprefix("req_"),
            created=int(resources.clock.now()),
            model=inference.resolved.requested,
            system_fingerprint="fp_" + digest.removeprefix("sha256:")[:12],
            service_tier=inference.tier,
        )

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }


async def start_inference(
    resources: InferenceResources, inference: InferenceRequest, places: HeldPlaces, held: HeldAccount | None = None
) -> "InferenceJob":
    """Reserves the tenant's quota for the request, and starts the request's job, which keeps `places` until its end.

    With `held`, the caller stores the usage row itself, and settles the reservation (see HeldAccount).

    Raises LimitExceeded if the quota does not allow the request, and Unavailable if the operator has switched its service
    tier off; then the engine generates nothing.
    If the engine later refuses the request, the methods of the job raise the engine's error.
    """
    principal, accounting = inference.principal, resources.accounting
    limits = await accounting.limits_of(principal)
    batch_id = None if held is None else held.batch_id
    charge = Charge(inference.request_id, principal, inference.resolved, service_tier=inference.tier, batch_id=batch_id)
    requests = [
        resources.generator.prepared(request)
        for request in inference.generation_requests(
            principal.isolation(resources.pepper), kv_limits(limits, resources.pepper)
        )
    ]
    account = await accounting.open(charge, limits, inference.expected)
    if held is not None:
        held.take(account)
    job = InferenceJob(
        inference.request_id,
        [resources.generator.start(request) for request in requests],
        inference.choices_per_prompt,
        held or account,
        account.reservation.rate_limit_headers()
        | {MODEL: inference.resolved.label}
        | degraded_header(requests[0].output_cap),
        inference.at_once,
    )
    forget = resources.work.add(principal, job.end_access)
    principal.trace.hold()
    task = job.start(resources.tasks, places)
    task.add_done_callback(lambda _: forget())
    task.add_done_callback(lambda _: principal.trace.release())
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
        account: RequestAccount | HeldAccount,
        headers: Mapping[str, str],
        at_once: int | None = None,
    ) -> None:
        """At most `at_once` generations run at a time; None lets all run."""
        self._request_id = request_id
        self._generations = generations
        self._choices_per_prompt = choices_per_prompt
        self._turns = asyncio.Semaphore(at_once or max(1, len(generations)))
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
        cache = CacheReport.sum_of(prompt.cache for prompt in prompts if prompt.cache is not None)
        computed = sum(one.cache.prompt_tokens for one in self._generations if one.cache is not None)
        return Usage(
            cache=cache,
            completion_tokens=sum(generation.completion_tokens for generation in self._generations),
            drafts=DraftReport.sum_of(generation.drafts for generation in self._generations),
            engine=sum((generation.engine_use for generation in self._generations), EngineUse()),
            reasoning_tokens=sum(generation.reasoning_tokens for generation in self._generations),
            unbilled=UnbilledTokens(
                prompt=computed - cache.prompt_tokens,
                completion=sum(generation.unbilled_tokens for generation in self._generations),
            ),
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
        self._raise_failure()

    async def deliver(self, take: Take) -> None:
        """Calls `take` with every event of every answer, until the job ends.

        Until this call, each generation waits with its first event. Raises the job's error.
        """
        self._reader.set_result(take)
        await self._has_ended.wait()
        self._raise_failure()

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

        Further calls do nothing: a second cancel could interrupt the job while it settles its quota reservation.
        """
        if self._task is not None and not self._is_abandoned:
            self._is_abandoned = True
            self._task.cancel()

    def end_access(self, error: NotPermitted) -> None:
        """Cancels the job, because its tenant or key has lost its access. Its client gets `error`."""
        self._lost_access = error
        self.abandon()

    def _raise_failure(self) -> None:
        """Raises the job's error, and lets go of it: its frames will refer to this job."""
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    async def _run(self) -> None:
        failure: GraftworkError | None = None
        outcome = UsageOutcome.SERVER_ERROR  # unless it turns out otherwise, such as after a bug
        try:
            await self._generate_all()
            outcome = UsageOutcome.COMPLETED
        except GraftworkError as error:
            error.__traceback__ = None  # its frames refer to what keeps the error: a cycle; so below
            failure, outcome = error, UsageOutcome.of_error(error)
        except asyncio.CancelledError as error:
            error.__traceback__ = None
            outcome = UsageOutcome.CANCELLED if self._is_abandoned else UsageOutcome.SERVER_ERROR
            raise
        finally:
            self._release_places()
            was_admitted = any(generation.cache is not None for generation in self._generations)
            await self._account.close(self.usage if was_admitted else None, outcome)
        self._failure = failure

    async def _generate_all(self) -> None:
        """Generates all answers. If one answer fails, cancels the others and raises its error."""
        if len(self._generations) == 1:
            await self._generate(0, self._generations[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice, generation in enumerate(self._generations):
                    await self._turns.acquire()
                    group.create_task(self._generate(choice, generation)).add_done_callback(self._end_turn)
            return
        except BaseExceptionGroup as errors:
            errors.__traceback__ = None  # its frames refer to it: a cycle
            failures = [error for error in errors.exceptions if isinstance(error, GraftworkError)]
            if len(failures) < len(errors.exceptions):
                raise
            failure = failures[0]
        raise failure

    def _end_turn(self, task: asyncio.Task[None]) -> None:
        self._turns.release()

    async def _generate(self, choice: int, generation: Generation) -> None:
        """Generates one answer. The first answer to a prompt computes the prompt and puts the prompt's KV in the cache.

        All other answers to this prompt first wait until the KV is in the cache.
        """
        first = self._generations[choice - choice % self._choices_per_prompt]
        if generation is not first:
            await first.prompt_computed.wait()
        journal, num_journaled, journaled = self._account.journal(), 0, EngineUse()
        async with aclosing(generation.events()) as events:
            take: Take | None = None
            async for event in events:
                if (num_tokens := generation.completion_tokens) > num_journaled:
                    used = generation.engine_use
                    kv_byte_seconds = used.kv_byte_seconds - journaled.kv_byte_seconds
                    journal.add(num_tokens - num_journaled, kv_byte_seconds, used.engine_us - journaled.engine_us)
                    num_journaled, journaled = num_tokens, used
                elif isinstance(event, PromptAdmitted):
                    journal.add_adapters(event.adapter_bytes)
                    if generation is first:
                        _journal_prompt(journal, event.cache)
                if take is None:
                    self._has_news.set()
                    take = await self._reader
                await take(ChoiceEvent(choice, event))

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Ends the job, so that its reader goes on after all who wait for the task: its line of the log stands before the
        end of the answer. Lets go of the task, which refers to the job.
        """
        self._task = None
        self._release_places()  # a job that was cancelled before it ran has not done so
        if task.cancelled():
            shutdown = Unavailable("The server is shutting down: try again shortly.", retry_after_s=1.0)
            self._end(self._lost_access or shutdown)
        elif task.exception() is not None:  # ServerTasks has logged the error
            self._end(internal_failure(self._request_id))
        else:
            self._end(self._failure)

    def _release_places(self) -> None:
        if self._places is not None:
            self._places.release()

    def _end(self, failure: GraftworkError | None) -> None:
        self._failure = failure
        self._has_ended.set()
        self._has_news.set()
