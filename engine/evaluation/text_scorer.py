"""Runs a model over texts, and hands out the log-probabilities of all tokens at each position.

The model runs as it is served: with the engine's kernels, dtype and cache, one text after the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from graftwork.engine.build.engine import Engine, build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.evaluation.comparison import Take
from graftwork.engine.evaluation.forced_decoding import ForcedRunner, prompt_tokens
from graftwork.engine.kv.index.cost_model import UNMEASURED, CostTracker
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.messages import Stop, SubmitRequest
from graftwork.platform.errors import GraftworkError, NotFound
from graftwork.platform.ids import IsolationDomain, RequestId

_WITHIN_S = 600.0
"""The longest time for which the engine waits for a copy of its own."""


class NoAdapters:
    """The source of adapters for an engine that serves none."""

    def load(self, digest: str) -> AdapterWeights:
        raise NotFound(f"This engine serves no adapters, and so not {digest}.")


class TextScorer:
    """One model, loaded as an engine would serve it. Close it to free its memory."""

    def __init__(self, config: EngineConfig, window: RollingWindow | None = None, kv_budget: int | None = None) -> None:
        """Loads the model. With a window, its tokens attend to no others; with a budget, the end of each text is decoded from
        what is kept of its beginning. Raises InvalidRequest if it cannot be served.
        """
        self._window, self._kv_budget = window, kv_budget
        if kv_budget is not None:
            config = replace(config, max_draft_tokens=0, overlap_steps=False)
        self._engine: Engine = build_engine(config, lambda _: NoAdapters(), costs=CostTracker(UNMEASURED))
        self._failure: GraftworkError | None = None
        self._is_over = False

    @property
    def vocab_size(self) -> int:
        return self._engine.description.vocab_size

    @property
    def weights_bytes(self) -> int:
        """The bytes of the model's weights on the device."""
        return self._engine.memory.weights_bytes

    @property
    def kv_token_bytes(self) -> int:
        """The bytes of KV of one token of context, in all layers. Layers with a window keep those of their window alone."""
        cache = self._engine.cache
        _, _, page_tokens, _, _ = cache.page_shape
        return len(cache.groups.groups) * math.prod(cache.page_shape) // page_tokens * cache.dtype.itemsize

    def score(self, texts: Sequence[Sequence[int]], take: Take, told: Callable[[int], None] = lambda _: None) -> None:
        """Runs the model over texts, which are token ids, and passes what it expects after each token but the last.

        `told` gets the number of tokens of each text when it is done. Raises the engine's error.
        """
        if self._kv_budget is not None:
            self._decode(texts, take, told, self._kv_budget)
            return
        scorer, row = self._engine.runner.scorer, 0
        for number, text in enumerate(texts):
            scorer.observer = lambda position, rows, base=row: take(base + position, rows.float().cpu())
            try:
                self._run(number, text, _sampling(self._window))
            finally:
                scorer.observer = None
            row += len(text) - 1
            told(len(text))

    def close(self) -> None:
        """Ends the engine's threads."""
        self._engine.loop.inbox.put(Stop())
        self._engine.loop.run()

    def _decode(self, texts: Sequence[Sequence[int]], take: Take, told: Callable[[int], None], kv_budget: int) -> None:
        """Decodes the end of each text with the text's own tokens, and passes on what the model expects there."""
        forced, row = ForcedRunner(self._engine.runner), 0
        self._engine.loop.steps.runner = forced
        for number, text in enumerate(texts):
            start = prompt_tokens(len(text))
            sampling = SamplingParams(
                max_tokens=len(text) - start, temperature=0.0, ignore_eos=True, kv_budget=kv_budget
            )
            forced.text = (*text, 0)  # the last token is followed by any
            forced.take = partial(_take_known, take, row, len(text) - 1)
            self._run(number, text[:start], sampling)
            row += len(text) - 1
            told(len(text))

    def _run(self, number: int, text: Sequence[int], sampling: SamplingParams) -> None:
        loop = self._engine.loop
        self._is_over = False
        request = EngineRequest(
            request_id=RequestId(f"text_{number}"),
            prompt_token_ids=tuple(text),
            sampling=sampling,
            domain=IsolationDomain(number.to_bytes(8, "big")),
        )
        loop.take(SubmitRequest(request, self._hear))
        while not self._is_over:
            while not loop.inbox.empty():
                loop.take(loop.inbox.get())
            if not loop.step() and not self._is_over:
                loop.take(loop.inbox.get(timeout=_WITHIN_S))
        if self._failure is not None:
            raise self._failure

    def _hear(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, GraftworkError):
                self._failure = output.event
            self._is_over = self._is_over or output.is_last


def _take_known(take: Take, base: int, num_known: int, position: int, rows: torch.Tensor) -> None:
    """Passes on what the model expects after a token of a text, if the text says what follows it."""
    if position < num_known:
        take(base + position, rows)


def _sampling(window: RollingWindow | None) -> SamplingParams:
    """Asks for the log probabilities of a prompt."""
    plain = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    if window is None:
        return plain
    return replace(plain, attention_window=window.window, attention_sinks=window.sinks)
