"""Reads adapter files into host memory.

Owns the loading threads. Never blocks the engine loop. Touches the device only to test uploads (see verify.py).
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from graftwork.engine.lora.fuse import BaseModules, build_resident
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.verify import AdapterTester
from graftwork.engine.lora.weights import AdapterSource, AdapterWeights
from graftwork.platform.errors import GraftworkError, InternalFailure, ValidationFailed

_log = logging.getLogger(__name__)

_LOADING_THREADS = 2


_LOADS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Tells the engine loop the result of one load: the adapter, or the error."""

    digest: str
    outcome: ResidentAdapter | GraftworkError


def adapter_too_large(message: str, param: str | None = None) -> ValidationFailed:
    """Returns the error for an adapter that this engine could never place on its device."""
    return ValidationFailed(message, param=param, code="adapter_too_large")


class AdapterLoader:
    """Reads adapters from files into host memory, on its own threads.

    Also converts them into the form that the forward pass uses (see fuse.py).
    """

    def __init__(
        self,
        source: AdapterSource,
        base: BaseModules,
        dtype: torch.dtype,
        tester: AdapterTester,
        deliver: Callable[[AdapterLoaded], None],
        divide: Callable[[ResidentAdapter], ResidentAdapter] = lambda adapter: adapter,
    ) -> None:
        """`deliver` is called on the loading threads and must hand the event over to the loop.

        `divide` turns a whole adapter into the part of it that this process places on its device. It is called on the
        loading threads. The default keeps the adapter whole.
        """
        self._source = source
        self._base = base
        self._dtype = dtype
        self._tester = tester
        self._deliver = deliver
        self._divide = divide
        self._threads = ThreadPoolExecutor(max_workers=_LOADING_THREADS, thread_name_prefix="adapter-load")
        self.loading: set[str] = set()

    def start(self, digest: str) -> None:
        """Starts to load an adapter on a loading thread. The engine loop gets the result as an AdapterLoaded message.

        Does nothing if this adapter is already loading, or if the maximum number of loads is already running.
        """
        if digest not in self.loading and len(self.loading) < _LOADS_AT_ONCE:
            self.loading.add(digest)
            self._threads.submit(self._load, digest)

    def probe(
        self,
        digest: str,
        why_never: Callable[[Sequence[ResidentAdapter]], str | None],
        answer: Callable[[GraftworkError | None], None],
    ) -> None:
        """Loads an adapter only to test it. Tests that the engine computes the same deltas as plain torch.

        Also asks `why_never` whether the adapter fits on the device. Calls `answer` with the error, or with None if all
        is well. Both are called on the loading thread.
        """
        self._threads.submit(self._probe, digest, why_never, answer)

    def close(self) -> None:
        """Waits for the running loads, and ends the threads. Loads that have not begun are cancelled."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, digest: str) -> None:
        self._deliver(AdapterLoaded(digest, self._attempt(digest, lambda _, adapter: self._divide(adapter))))

    def _probe(
        self,
        digest: str,
        why_never: Callable[[Sequence[ResidentAdapter]], str | None],
        answer: Callable[[GraftworkError | None], None],
    ) -> None:
        def probe(weights: AdapterWeights, adapter: ResidentAdapter) -> ResidentAdapter:
            too_large = why_never([self._divide(adapter)])
            if too_large is not None:
                raise adapter_too_large(f"weights: the weights of this adapter {too_large}", "weights")
            self._tester.test(weights, adapter)
            return adapter

        outcome = self._attempt(digest, probe)
        answer(outcome if isinstance(outcome, GraftworkError) else None)

    def _attempt(
        self, digest: str, then: Callable[[AdapterWeights, ResidentAdapter], ResidentAdapter]
    ) -> ResidentAdapter | GraftworkError:
        try:
            weights = self._source.load(digest)
            return then(weights, build_resident(weights, self._base, self._dtype))
        except GraftworkError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever a load meets, it is the failure of that load alone
            _log.exception("adapter_load_failed", extra={"digest": digest})
            return InternalFailure(f"Adapter {digest} could not be loaded: {type(error).__name__}: {error}")
