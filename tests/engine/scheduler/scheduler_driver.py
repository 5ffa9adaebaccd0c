"""A scheduler over a tagged KV cache, driven step by step without torch."""

from collections.abc import Callable

from hypothesis import strategies as st

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, RequestOutput
from graftwork.engine.core.requests import AdapterUse, EngineRequest
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.errors import (
    GraftworkError,
)
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.tagged_kv_cache import FixedLeases, TaggedKvCache

PAGE = 4
CONTEXT = 40
EOS = 1
FLOOD, LIGHT = IsolationDomain(b"flood"), IsolationDomain(b"light")


class ManualAdapterProvider:
    """An AdapterProvider whose adapters become ready when the test says so."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.placed: list[tuple[str, int]] = []
        self.pins: dict[str, int] = {}
        self.loaded_bytes: dict[str, int] = {}
        """Bytes of adapters that were loaded, and that no request has reported."""

    def want(self, groups: list[tuple[str, ...]], *, may_place: bool) -> bool:
        """Does nothing: the test makes adapters ready."""
        return False

    def take_placed(self) -> list[tuple[str, int]]:
        placed, self.placed = self.placed, []
        return placed

    def is_ready(self, digest: str) -> bool:
        return digest in self.ready

    def refusal(self, uses: tuple[AdapterUse, ...]) -> GraftworkError | None:
        return None

    def pin(self, digest: str) -> None:
        self.pins[digest] = self.pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1

    def take_loaded_bytes(self, digest: str) -> int:
        return self.loaded_bytes.pop(digest, 0)


class SchedulerDriver:
    """A scheduler with its KV cache, and all its outputs."""

    def __init__(
        self,
        *,
        pages: int = 40,
        host: int = 0,
        budget: int = 16,
        max_running: int = 8,
        max_waiting: int = 100,
        context: int = CONTEXT,
        make_order: Callable[["SchedulerDriver"], WaitingOrder | None] = lambda driver: None,
        **more: float,
    ) -> None:
        """`make_order` gets the driver before it has a scheduler. `more` are the other limits: `max_waiting_tokens`,
        `waiting_share` and `target_itl_s`.
        """
        self.cache = TaggedKvCache(device=pages, host=host, page_tokens=PAGE, context=context // PAGE)
        self.clock = self.cache.clock
        self.pool = self.cache.kv_cache.page_store.device
        self.adapters = ManualAdapterProvider()
        sizes = (PAGE, budget, max_running, max_waiting, context, 100, frozenset({EOS}))
        limits = SchedulerLimits(*sizes, **more)  # type: ignore[arg-type]
        scopes = CacheScopes("sha256:model", "float32")
        session_cache = SessionCache(self.cache.kv_cache, scopes, FixedLeases(), self.clock)
        self.scheduler = Scheduler(
            limits,
            self.cache.kv_cache,
            session_cache,
            self.adapters,
            scopes,
            clock=self.clock,
            order=make_order(self),
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
            self.ran(plan)
            chosen = {piece.request_id: (token,) for piece in plan.slices if piece.samples}
            self.outputs += self.scheduler.absorb(self.scheduler.land(plan), StepResult(chosen))
        self.scheduler.check_integrity()
        while self.cache.copies.under_way:
            self.outputs += self.scheduler.finish_transfer(self.cache.copies.fire())
        return plan

    def ran(self, plan: StepPlan) -> None:
        """Is called when a step has run, before its result is processed. A subclass may let time pass here."""

    def drain(self) -> None:
        """Step until all requests have ended."""
        for _ in range(1000):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("nobody gets anywhere")

    def admitted(self) -> list[str]:
        return [output.request_id for output in self.outputs if isinstance(output.event, PromptAdmitted)]

    def finished(self) -> dict[str, RequestFinished]:
        events = ((output.request_id, output.event) for output in self.outputs)
        return {name: event for name, event in events if isinstance(event, RequestFinished)}

    def errors(self) -> dict[str, GraftworkError]:
        events = ((output.request_id, output.event) for output in self.outputs)
        return {name: event for name, event in events if isinstance(event, GraftworkError)}


def crowd(driver: SchedulerDriver, number: int, domain: IsolationDomain = FLOOD, **options: object) -> None:
    """Submits equal requests, named by their domain and a number."""
    for index in range(number):
        driver.submit(f"{domain.decode()} {index}", [30 + index] * 3, domain=domain, **options)  # type: ignore[arg-type]


requests = st.tuples(
    st.integers(1, CONTEXT - 1), st.integers(1, 20), st.integers(0, 3), st.sampled_from([b"x", b"y", b"z"])
)
