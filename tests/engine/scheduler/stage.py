"""A scheduler without torch: its adapters and its steps are the test's own, and its clock stands still."""

from random import Random

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, RequestOutput
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.kv_lab import FixedLeases, KvLab

PAGE = 4
CONTEXT = 40
EOS = 1


class Shelf:
    """An AdapterProvider whose adapters become ready when the test says so."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.pins: dict[str, int] = {}

    def want(self, groups: list[tuple[str, ...]]) -> None:
        """Does nothing: the test makes adapters ready."""

    def is_ready(self, digest: str) -> bool:
        return digest in self.ready

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        return None

    def pin(self, digest: str) -> None:
        self.pins[digest] = self.pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1


class Stage:
    """A scheduler with its KV cache, and all its outputs."""

    def __init__(
        self,
        *,
        pages: int = 40,
        host: int = 0,
        budget: int = 16,
        max_running: int = 8,
        max_waiting: int = 100,
        **queue: float,
    ) -> None:
        self.lab = KvLab(device=pages, host=host, page_tokens=PAGE, context=CONTEXT // PAGE)
        self.clock = self.lab.clock
        self.pool = self.lab.kv_cache.page_store.device
        self.shelf = Shelf()
        sizes = (PAGE, budget, max_running, max_waiting, CONTEXT, 100, frozenset({EOS}))
        limits = SchedulerLimits(*sizes, **queue)  # type: ignore[arg-type]
        scopes = CacheScopes("sha256:model", "float32")
        tender = SessionCache(self.lab.kv_cache, scopes, FixedLeases(), self.clock)
        self.scheduler = Scheduler(
            limits, self.lab.kv_cache, tender, self.shelf, scopes, clock=self.clock, seeds=Random(0)
        )
        self.outputs: list[RequestOutput] = []
        self.plans: list[StepPlan] = []

    def submit(self, name: str, prompt: int | list[int] = 5, max_tokens: int = 4, **options: object) -> None:
        tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        sampling_options = options.pop("sampling", {})
        assert isinstance(sampling_options, dict)
        self.outputs += self.scheduler.submit(
            EngineRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(tokens),
                sampling=SamplingParams(max_tokens=max_tokens, **sampling_options),
                **{"domain": IsolationDomain(b"tenant"), **options},  # type: ignore[arg-type]
            )
        )

    def step(self, token: int = 7) -> StepPlan | None:
        """Run one step, and then finish the copies that it started."""
        self.outputs += self.scheduler.admit()
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            chosen = {piece.request_id: (token,) for piece in plan.slices if piece.samples}
            self.outputs += self.scheduler.absorb(plan, StepResult(chosen))
        self.scheduler.check_integrity()
        while self.lab.copies.under_way:
            self.outputs += self.scheduler.finish_transfer(self.lab.copies.fire())
        return plan

    def drain(self) -> None:
        """Step until all requests have ended."""
        for _ in range(1000):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("nobody gets anywhere")

    def admitted(self) -> list[str]:
        return [output.request_id for output in self.outputs if isinstance(output.event, PromptAdmitted)]

    def errors(self) -> dict[str, GraftworkError]:
        events = ((output.request_id, output.event) for output in self.outputs)
        return {name: event for name, event in events if isinstance(event, GraftworkError)}

    def finished(self) -> dict[str, RequestFinished]:
        events = ((output.request_id, output.event) for output in self.outputs)
        return {name: event for name, event in events if isinstance(event, RequestFinished)}
