"""Runs steps on the device, and measures how long prefills take.

Owns the decoder and the running measurement. Reads the adapter pool. For each step it builds input tensors, runs the
forward pass and samples tokens. Keeps nothing between steps but the tokens of the last one, which stay on the device so
that the next step can take them from there. The scheduler keeps the state of requests.

The measurement never waits for the device. It reads the clock around each step, and uses the times of steps that sample
tokens: for these tokens the host has waited anyway. A time is recorded only if the steps did nothing but this prefill:
no decoding, no draft tokens, no log probabilities of the prompt, no waiting for a copy of KV pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.step import RequestSlice, StepPlan, StepResult
from graftwork.engine.core.step_timer import StepTimer
from graftwork.engine.kernels.step_inputs import Passenger, PinnedMemory
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.runner.forward import ForwardPass, SampledTokens
from graftwork.engine.runner.hidden_taps import HiddenTaps
from graftwork.engine.runner.input_batch import BatchRows
from graftwork.engine.runner.prompt_pooler import PromptPooler
from graftwork.engine.runner.prompt_scorer import PromptScorer
from graftwork.engine.sampling.sampler import AwaitedTokens, Sampled, SampledRows, Sampler, StepSampling
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

_FEWEST_TOKENS = 32
"""The fewest tokens of a prefill that is measured. A shorter prefill tells little about the cost of tokens, because
most of its time is the fixed cost.
"""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The prefill that is measured now: tokens [start, end) of a prompt, and the seconds that their steps took."""

    piece: RequestSlice
    """The slice of the prompt that the last step computed."""
    start: int
    seconds: float


class PrefillMeter:
    """Measures the seconds that prefills take. The engine loop calls it before and after each step.

    If the prefill of a prompt takes several steps, their times are added up.
    """

    def __init__(self, costs: CostTracker, clock: Clock) -> None:
        self._costs = costs
        self._previous: StepPlan | None = None
        self._prefill: _Prefill | None = None
        self._timer = StepTimer(clock)

    def step_begins(self) -> None:
        """Records the time at which a step begins. Must be called right before the step is launched."""
        self._timer.begin()

    def step_ended(self, plan: StepPlan, *, waited: bool) -> None:
        """Adds the time of the step that has just ended to the measured prefill.

        Must be called as soon as the result of the oldest step is known. `waited` says whether the step waited for KV
        pages that were being copied to the device, or has failed. Such a step is not measured.
        """
        seconds = self._timer.end()
        previous, self._previous = self._previous, plan
        begun, self._prefill = self._prefill, None
        piece = plan.slices[0]
        if len(plan.slices) > 1 or waited or piece.num_drafts or piece.reads_prompt or seconds <= 0:
            return
        if piece.rolling_window is not None:
            return  # it attends to fewer tokens than other prompts
        if begun is not None and begun.piece.request_id == piece.request_id and begun.piece.end == piece.start:
            prefill = _Prefill(piece, begun.start, begun.seconds + seconds)
        elif previous is None or _samples(previous):
            prefill = _Prefill(piece, piece.start, seconds)
        else:
            return  # the device may still have worked on the previous step when this one began
        if not piece.samples:
            self._prefill = prefill
        elif piece.end - prefill.start >= _FEWEST_TOKENS:
            self._costs.observe_prefill(piece.end - prefill.start, prefill.start, prefill.seconds)


def _samples(plan: StepPlan) -> bool:
    """Returns whether a step samples tokens. The host waits for the device only to read sampled tokens."""
    return any(piece.samples for piece in plan.slices)


class ModelRunner:
    """Runs the steps of one model on one device."""

    def __init__(
        self,
        forward: ForwardPass,
        sampler: Sampler,
        scorer: PromptScorer,
        pooler: PromptPooler,
        device: torch.device,
        taps: HiddenTaps | None = None,
    ) -> None:
        """`taps` are those of the decoder: a draft head reads the hidden states of each step from them."""
        self.forward = forward
        self._sampler = sampler
        self.scorer = scorer
        self._pooler = pooler
        self._device = device
        self.taps = taps
        self._launched: StepFlight | None = None
        """The step that was launched last. The next one may take tokens from it."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "StepFlight":
        """Starts the forward pass of one step. On a CPU, the forward pass has ended when this method returns."""
        rows = self.forward.arrange(plan)
        flight = StepFlight(rows.slices, self._sampler, self.scorer, self._pooler)
        tokens: SampledTokens | None = None
        if plan.awaits_tokens:
            assert self._launched is not None, "a plan awaits tokens of no step"
            tokens = self._launched.sampled_tokens()
        passenger: Passenger | None = None
        if plan.can_prepare_sampling or self._sampler.takes_awaited_tokens:
            passenger = flight.prepare(tokens)  # so that its numbers travel with those of the forward pass
        flight.computes(*self.forward.compute(rows, tokens, passenger))
        if self.taps is not None:
            self.taps.deliver(rows.slices)
        self._launched = flight
        return flight

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, and waits for its end. The plan must not await tokens."""
        flight = self.launch(plan)
        flight.sample()
        return flight.result()

    def recover(self) -> None:
        """Waits until the device is idle, and frees memory that is not in use. See Runner.recover."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def batch(self, plan: StepPlan) -> BatchRows:
        """Arranges the rows of one step."""
        return self.forward.arrange(plan)

    def logits(self, rows: BatchRows) -> torch.Tensor:
        """Computes the forward pass. Returns the logits of the sampled rows: [num_sampled, vocab] fp32.

        A row is one token of the step. A sampled row is one whose next token the step samples.
        """
        return self.forward.compute(rows)[1].to(torch.float32, copy=True)


class StepFlight:
    """A step of a ModelRunner. The device may still compute it.

    The sampled rows of the step are the rows of its logits, in the order of its slices.
    """

    def __init__(
        self, slices: tuple[RequestSlice, ...], sampler: Sampler, scorer: PromptScorer, pooler: PromptPooler
    ) -> None:
        self._slices = slices
        self._sampler = sampler
        self._scorer = scorer
        self._pooler = pooler
        self._sampling: StepSampling | None = None
        self._hidden: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._sampled: Sampled | None = None
        self._wait: Callable[[], None] | None = None

    def prepare(self, tokens: SampledTokens | None = None) -> Passenger | None:
        """Prepares the sampling. `tokens` has those that the slices await; without it, all tokens must be known.

        Returns the numbers that the sampling sends to the device, if they may travel with others.
        """
        specs = [spec for piece in self._slices for spec in piece.samples]
        awaited = None if tokens is None else AwaitedTokens(tokens.token_ids, _sources(self._slices, tokens))
        self._sampling = self._sampler.begin(specs, awaited)
        return self._sampling.passenger

    def computes(self, hidden: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Takes the results of the forward pass, which the device may still compute.

        hidden: [num_tokens, hidden], or None if no slice reads its prompt; logits: [num_sampled, vocab].
        """
        self._hidden, self._logits = hidden, logits

    @torch.inference_mode()
    def sample(self) -> None:
        """Starts to choose the tokens. See Flight.sample."""
        if self._sampling is None:
            self.prepare()
        assert self._sampling is not None
        assert self._logits is not None, "a step is sampled once, after its forward pass was launched"
        self._sampled = self._sampling.sample(self._logits)
        self._wait = PinnedMemory(self._logits.device).mark()
        self._logits = None

    def sampled_tokens(self) -> SampledTokens:
        """Returns the first token that this step samples for each request, on the device. Does not wait for it."""
        assert self._sampled is not None, "a step that another awaits must be sampled first"
        first_rows = accumulate((len(piece.samples) for piece in self._slices), initial=0)
        row_by_id = {piece.request_id: row for piece, row in zip(self._slices, first_rows, strict=False)}
        return SampledTokens(self._sampled.token_ids, row_by_id)

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Waits for the device, and returns the tokens of the step. Also scores and embeds prompts, which takes the device's
        time.

        If the step reads a prompt, no other step may have been launched after it.
        """
        assert self._sampled is not None
        assert self._wait is not None
        self._wait()
        found = _by_request(self._slices, self._sampled.result())
        if self._hidden is None or not any(piece.reads_prompt for piece in self._slices):
            return found
        scores = self._scorer.score(self._slices, self._hidden)
        return replace(found, prompt_logprobs=scores, pooled=self._pooler.pool(self._slices, self._hidden))


def _sources(slices: Sequence[RequestSlice], tokens: SampledTokens) -> list[int | None]:
    """Returns, for each sampled row, where the token right before it is, if its slice awaits this token."""
    return [
        tokens.row_by_id[piece.request_id] if piece.awaits_token else None for piece in slices for _ in piece.samples
    ]


def _by_request(slices: Sequence[RequestSlice], sampled: SampledRows) -> StepResult:
    """Returns the results of all sampled rows, grouped by request."""
    chosen: dict[RequestId, tuple[int, ...]] = {}
    scored: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    ended: dict[RequestId, dict[int, GraftworkError | None]] = {}
    start = 0
    for piece in slices:
        end = start + len(piece.samples)
        if piece.samples:
            chosen[piece.request_id] = tuple(sampled.token_ids[start:end])
        if own := tuple(one for one in sampled.logprobs[start:end] if one is not None):
            scored[piece.request_id] = own
        if rows := {row - start: sampled.ends[row] for row in range(start, end) if row in sampled.ends}:
            ended[piece.request_id] = rows
        start = end
    return StepResult(chosen, scored, ended)
