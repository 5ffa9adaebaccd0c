"""Decode steps of the whole engine: how long they take beside their byte floor, what they launch, where they wait.

A cell has so many rows, each with a context of its own and in turn one of so many distinct adapters.
"""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from gpu.phase_run import ModelShape, PhaseRun
from gpu.random_engine import DOMAIN, RANK, advance, close, raise_failures, random_engine, random_prompt, submit
from torch.autograd import DeviceType

from graftwork.engine.build.engine import Engine
from graftwork.engine.core.events import RequestOutput, TokensGenerated
from graftwork.engine.messages import CancelRequest, ForgetDomain
from graftwork.platform.ids import RequestId

WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_steps": True},
    "graph": {"overlap_steps": False},
    "eager": {"overlap_steps": False, "cuda_graphs": "off"},
}
"""The ways to run steps that are compared: settings of the engine by name. The slowest comes last, because the time may
not do for all."""
KV_WAYS: dict[str, dict[str, Any]] = {f"kv {name}": {"kv_dtype": name} for name in ("auto", "int8", "fp8")}
"""The ways to store KV that are compared."""
_SYNC_STEPS, _TRACED_STEPS, _WARM_STEPS, _TIMED_STEPS = 3, 5, 5, 40
_ENOUGH_TOKENS = 2 * (_SYNC_STEPS + _TRACED_STEPS + _WARM_STEPS + _TIMED_STEPS) + 300


@dataclass(frozen=True, slots=True)
class StepCell:
    """Rows of one step, and the distinct adapters among them."""

    rows: int
    adapters: int


CELLS = (
    StepCell(32, 16), StepCell(32, 0), StepCell(32, 32), StepCell(8, 8), StepCell(8, 0), StepCell(1, 1), StepCell(1, 0),
    StepCell(128, 16), StepCell(128, 0), StepCell(128, 32),
)  # fmt: skip


KV_CELLS = (StepCell(128, 0), StepCell(32, 16), StepCell(32, 0))
"""The cells for KV in bytes. With most rows, KV is the largest part of what a step reads."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One cell in one way. None where only a GPU can tell."""

    way: str
    cell: StepCell
    context_tokens: int
    """The mean over rows and steps."""
    step_ms: float | None
    """The time on the wall of all timed steps, by their number."""
    median_step_ms: float | None
    slowest_step_ms: float | None
    tokens_per_s: float | None
    floor_ms: float | None
    """The bytes of weights, KV and adapters that a step reads, by the bandwidth of a large copy."""
    syncs_per_step: float | None
    """How often torch has waited for the device, as its sync debug mode counts. Waits for events are not among them."""
    graph_share: float | None
    """The part of the timed steps that a CUDA graph computed."""


def measure_steps(run: PhaseRun) -> None:
    """Every cell in every way. Each way has an engine of its own."""
    bandwidth = None if run.is_dry else _bandwidth()
    for way, settings in WAYS.items():
        _measure_way(run, (way, settings), CELLS, bandwidth)


def measure_coded_kv(run: PhaseRun) -> None:
    """Some cells with KV in bytes, beside KV in bf16 on the same device. Each way has an engine of its own."""
    bandwidth = None if run.is_dry else _bandwidth()
    for way, settings in KV_WAYS.items():
        _measure_way(run, (way, settings), KV_CELLS, bandwidth)


def _measure_way(
    run: PhaseRun, named: tuple[str, dict[str, Any]], cells: Sequence[StepCell], bandwidth: float | None
) -> None:
    way, settings = named
    if run.shape.name == "tiny":
        cells = StepCell(2, 2), StepCell(3, 0)
    started = time.perf_counter()
    with random_engine(run, **settings) as (engine, _):
        run.add("starts", {"way": way, "seconds": None if run.is_dry else time.perf_counter() - started})
        for cell in run.while_time(cells, name=partial("{} {}".format, way)):
            run.add("steps", asdict(_measure(run, engine, way, cell, bandwidth)))
        close(engine)


def _bandwidth() -> float:
    from lora_kernels import copy_bandwidth

    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    return bandwidth


def _measure(run: PhaseRun, engine: Engine, way: str, cell: StepCell, bandwidth: float | None) -> StepFigures:
    rows = start_decoding(run, engine, cell, way)
    for _ in range(_WARM_STEPS):
        advance(engine)
    num_syncs = _count_syncs(run, engine)
    durations = []
    tokens_before, graphs_before = rows.num_tokens, engine.loop.stats().graph_steps
    _wait(run)
    for _ in range(_TIMED_STEPS):
        started = time.perf_counter()
        advance(engine)
        durations.append(time.perf_counter() - started)
    _wait(run)
    graph_share = (engine.loop.stats().graph_steps - graphs_before) / _TIMED_STEPS
    context = run.shape.prompt_tokens + (tokens_before + rows.num_tokens) // (2 * cell.rows)
    stop(engine, rows)
    if bandwidth is None:
        return StepFigures(way, cell, context, None, None, None, None, None, None, None)
    step_s = statistics.fmean(durations)
    return StepFigures(
        way,
        cell,
        context,
        step_ms=step_s * 1e3,
        median_step_ms=statistics.median(durations) * 1e3,
        slowest_step_ms=max(durations) * 1e3,
        tokens_per_s=cell.rows / step_s,
        floor_ms=step_bytes(engine, run.shape, cell, context) / bandwidth * 1e3,
        syncs_per_step=num_syncs,
        graph_share=graph_share,
    )


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """The requests of a cell, and what they have answered so far."""

    request_ids: list[RequestId]
    outputs: list[RequestOutput]

    @property
    def num_tokens(self) -> int:
        return sum(len(one.event.token_ids) for one in self.outputs if isinstance(one.event, TokensGenerated))

    @property
    def have_begun(self) -> bool:
        begun = {one.request_id for one in self.outputs if isinstance(one.event, TokensGenerated)}
        return len(begun) == len(self.request_ids)


def start_decoding(run: PhaseRun, engine: Engine, cell: StepCell, salt: str) -> DecodingRows:
    """Submits the requests of a cell, and runs until each has its first token. Raises the error of one that fails.

    No two prompts are alike, so that no row reads another's pages.
    """
    rows = DecodingRows([], [])
    for row in range(cell.rows):
        adapter = f"adapter-{row % cell.adapters}" if cell.adapters else None
        prompt = random_prompt(run.shape, (salt, cell, row), run.shape.prompt_tokens)
        rows.request_ids.append(submit(engine, prompt, adapter, _ENOUGH_TOKENS, rows.outputs))
    while not rows.have_begun:
        advance(engine)
        raise_failures(rows.outputs)
    return rows


def stop(engine: Engine, rows: DecodingRows) -> None:
    """Cancels the requests, runs until none is left, and drops their KV, so that later cells evict nothing."""
    for request_id in rows.request_ids:
        engine.loop.take(CancelRequest(request_id))
    while engine.loop.step():
        pass
    engine.loop.take(ForgetDomain(DOMAIN))


def step_bytes(engine: Engine, shape: ModelShape, cell: StepCell, context: int) -> int:
    """Bytes that a step must read: the weights without the embedding, each row's KV, and each adapter once."""
    head_dim = shape.hidden_size // shape.num_heads
    form = engine.cache.format
    kv_row = 2 * shape.num_layers * shape.num_kv_heads * form.width(head_dim) * form.storage_dtype.itemsize
    weights = engine.memory.weights_bytes - 2 * shape.vocab_size * shape.hidden_size
    adapter = 2 * RANK * shape.num_layers * sum(map(sum, engine.description.target_shapes.values()))
    return weights + cell.rows * context * kv_row + cell.adapters * adapter


def _count_syncs(run: PhaseRun, engine: Engine) -> float | None:
    if run.is_dry:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(_SYNC_STEPS):
                advance(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught) / _SYNC_STEPS


def _wait(run: PhaseRun) -> None:
    if not run.is_dry:
        torch.cuda.synchronize()


def measure_trace(run: PhaseRun) -> None:
    """What the profiler sees in some steps: launches, copies, and the device's time by kernel."""
    for way in run.while_time(("graph", "eager")):
        _trace_way(run, way)


def _trace_way(run: PhaseRun, way: str) -> None:
    cell = StepCell(2, 2) if run.shape.name == "tiny" else StepCell(32, 16)
    with random_engine(run, **WAYS[way]) as (engine, _):
        rows = start_decoding(run, engine, cell, "trace")
        for _ in range(_WARM_STEPS):
            advance(engine)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [] if run.is_dry else [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as watched:
            for _ in range(_TRACED_STEPS):
                advance(engine)
            _wait(run)
        stop(engine, rows)
        close(engine)
    calls: Counter[str] = Counter()
    for event in watched.key_averages():
        calls[event.key] += event.count
    run.add("launches", {"way": way, "cell": asdict(cell)} | _launches(calls, is_dry=run.is_dry))
    for row in _kernels(watched, is_dry=run.is_dry):
        run.add("kernels", {"way": way} | row)


_CALLS = {
    "kernel_launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graph_launches": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "allocations": ("cudaMalloc", "cudaHostAlloc"),
}
"""The calls of the CUDA interfaces that are counted, by the name of the figure."""


def _launches(calls: Counter[str], *, is_dry: bool) -> dict[str, float | None]:
    return {
        f"{name}_per_step": None if is_dry else sum(calls[call] for call in of_them) / _TRACED_STEPS
        for name, of_them in _CALLS.items()
    }


def _kernels(watched: Any, *, is_dry: bool) -> list[dict[str, Any]]:
    """The thirty kernels with the most time on the device; in a dry run one row without figures."""
    if is_dry:
        return [{"kernel": None, "calls_per_step": None, "device_us_per_step": None}]
    on_device = [event for event in watched.key_averages() if event.device_type == DeviceType.CUDA]
    on_device.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "kernel": event.key,
            "calls_per_step": event.count / _TRACED_STEPS,
            "device_us_per_step": event.self_device_time_total / _TRACED_STEPS,
        }
        for event in on_device[:30]
    ]
