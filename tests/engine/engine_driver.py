"""Drives an engine's loop by hand, without threads or gRPC: submit requests, then step until all have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from graftwork.engine.build.engine import Engine
from graftwork.engine.core.events import (
    CacheReport,
    DraftReport,
    FinishReason,
    PromptAdmitted,
    PromptEmbedded,
    PromptScored,
    RequestFinished,
    RequestOutput,
    StepsTraced,
    TokenLogprobs,
    TokensGenerated,
)
from graftwork.engine.core.pooling import Pooling
from graftwork.engine.core.requests import (
    NO_KV_LIMITS,
    AdapterUse,
    EngineRequest,
    GrammarSource,
    KvFileKey,
    KvLimits,
    ReasoningRule,
    ServiceTier,
    SessionKey,
    SessionUse,
)
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.engine.core.step_spans import EngineSpan
from graftwork.engine.messages import CancelRequest, RunSessionCommand, Stop, SubmitRequest
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId

_LOAD_WITHIN_S = 60


@dataclass
class Outcome:
    """All outputs of one request."""

    num_emitted: int = 0
    """The number of tokens of an earlier run."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: list[float] | None = None
    cache: CacheReport | None = None
    finish: FinishReason | None = None
    drafts: DraftReport = field(default_factory=DraftReport)
    error: GraftworkError | None = None
    spans: list[EngineSpan] = field(default_factory=list)
    """What the engine has reported of a traced request's steps."""

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.error is not None


class EngineDriver:
    """One engine, and the outcomes of its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.outcomes: dict[RequestId, Outcome] = {}
        self._numbers = count(1)

    def submit(
        self,
        prompt: list[int],
        *,
        adapter: str | None = None,
        adapters: tuple[AdapterUse, ...] = (),
        domain: bytes = b"tenant",
        tier: ServiceTier = ServiceTier.DEFAULT,
        session: SessionUse | None = None,
        grammar: GrammarSource | None = None,
        prediction: tuple[int, ...] = (),
        emitted: Sequence[int] = (),
        kv_limits: KvLimits = NO_KV_LIMITS,
        kv_key: KvFileKey | None = None,
        public_tokens: int = 0,
        traced: bool = False,
        reasoning: ReasoningRule | None = None,
        pooling: Pooling | None = None,
        **sampling: Any,
    ) -> Outcome:
        """Queue a greedy request, unless `sampling` says otherwise."""
        request_id = RequestId(f"req_{next(self._numbers)}")
        options: dict[str, Any] = {"max_tokens": 8 if pooling is None else 0, "temperature": 0.0} | sampling
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**options),
            domain=IsolationDomain(domain),
            adapters=adapters or ((AdapterUse(adapter),) if adapter is not None else ()),
            tier=tier,
            session=session,
            grammar=grammar,
            prediction_token_ids=prediction,
            emitted_token_ids=tuple(emitted),
            kv_limits=kv_limits,
            kv_key=kv_key,
            public_tokens=public_tokens,
            traced=traced,
            reasoning=reasoning,
            pooling=pooling,
        )
        self.outcomes[request_id] = Outcome(len(emitted))
        self.loop.take(SubmitRequest(request, self.sink))
        return self.outcomes[request_id]

    def cancel(self, outcome: Outcome) -> None:
        request_id = next(key for key, value in self.outcomes.items() if value is outcome)
        self.loop.take(CancelRequest(request_id))
        outcome.error = GraftworkError("cancelled by the test")

    def step(self) -> None:
        """Run one step. If all requests wait for a load, wait for it."""
        while not self.loop.inbox.empty():
            self.loop.take(self.loop.inbox.get())
        worked = self.loop.step()
        stats = self.loop.stats()
        if not worked and stats.waiting_requests + stats.running_requests:
            self.loop.take(self.loop.inbox.get(timeout=_LOAD_WITHIN_S))

    def finish(self) -> None:
        """Step until every request is over."""
        while not all(outcome.is_over for outcome in self.outcomes.values()):
            self.step()

    def run(self, prompt: list[int], **options: Any) -> Outcome:
        """Submit one request and run it to its end."""
        outcome = self.submit(prompt, **options)
        self.finish()
        return outcome

    def command(
        self, verb: SessionVerb, session: str, tokens: list[int], *waits: ToolWait, **options: Any
    ) -> SessionMemory:
        """Carry out a session command, and wait for the copies that it starts."""
        answer = self.command_now(verb, session, tokens, *waits, **options)
        self.rest()
        return answer

    def command_now(
        self, verb: SessionVerb, session: str, tokens: list[int], *waits: ToolWait, **options: Any
    ) -> SessionMemory:
        """Carry out a session command. The copies that it starts still run."""
        answers: list[SessionMemory] = []
        adapter = options.get("adapter")
        adapters = (AdapterUse(adapter),) if adapter is not None else ()
        domain = IsolationDomain(options.get("domain", b"tenant"))
        rest = options.get("public_tokens", 0), waits, options.get("kv_key"), options.get("window")
        command = SessionCommand(verb, SessionKey(session), domain, adapters, tuple(tokens), *rest)
        self.loop.take(RunSessionCommand(command, answers.append))
        return answers[0]

    def rest(self) -> None:
        """Wait until no copy runs."""
        stats = self.loop.stats()
        while stats.in_flight_pages + stats.host_in_flight_pages:
            self.loop.take(self.loop.inbox.get(timeout=_LOAD_WITHIN_S))
            stats = self.loop.stats()

    def close(self) -> None:
        """End the engine's threads, as a shutdown does."""
        self.loop.inbox.put(Stop())
        self.loop.run()

    def warm(self, *digests: str | None) -> None:
        """Load some adapters onto the device before the test begins."""
        for digest in digests:
            self.run([2], adapter=digest, max_tokens=1)

    def poison_unused_pages(self) -> None:
        """Fill every page that nobody holds, and that is no part of an adapter, with NaN: of codes, the scales become NaN."""
        occupancy, cache = self.engine.kv_cache.page_store.device.occupancy(), self.engine.cache
        bits = torch.full(cache.page_shape, 0xFF, dtype=torch.uint8)
        poison = torch.full_like(bits, float("nan"), dtype=cache.dtype) if cache.dtype.is_floating_point else bits
        for page in np.flatnonzero(~occupancy.is_fixed & ~occupancy.is_held):
            cache.write_page(int(page), poison)

    def sink(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            outcome = self.outcomes[output.request_id]
            match output.event:
                case PromptAdmitted(cache):
                    outcome.cache = cache
                case PromptScored(prompt_logprobs):
                    assert not outcome.token_ids
                    outcome.prompt_logprobs.extend(prompt_logprobs)
                case PromptEmbedded(values):
                    assert outcome.embedding is None
                    outcome.embedding = np.frombuffer(values, "<f4").tolist()
                case StepsTraced(_, _, spans):
                    assert not outcome.is_over
                    outcome.spans.extend(spans)
                case TokensGenerated(token_ids, logprobs):
                    outcome.token_ids.extend(token_ids)
                    outcome.logprobs.extend(logprobs)
                case RequestFinished(reason, completion_tokens, drafts):
                    assert completion_tokens == outcome.num_emitted + len(outcome.token_ids)
                    outcome.finish, outcome.drafts = reason, drafts
                case GraftworkError() as error:
                    outcome.error = error
