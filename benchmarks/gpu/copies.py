"""What crosses the bus: plain copies, adapters that are loaded while others decode, and sessions that resume."""

import statistics
import time

import torch
from gpu.engine_steps import WAYS, StepCell, start_decoding, stop
from gpu.phase_run import PhaseRun
from gpu.random_engine import advance, close, raise_failures, random_engine, random_prompt, submit
from session_resume import PLACES, Bench, measure_round

from graftwork.engine.build.engine import Engine
from graftwork.engine.core.events import RequestOutput, TokensGenerated

_COPY_BYTES = 2**28
_QUIET_STEPS, _LOADS, _ROUNDS = 40, 5, 3


def measure_copies(run: PhaseRun) -> None:
    """Plain copies first, then loads and resumes on engines of their own."""
    for name in ("host to device", "device to host"):
        run.add("copies", {"copy": name, "bytes": _COPY_BYTES, "bytes_per_s": None if run.is_dry else _copy_rate(name)})
    with random_engine(run, **WAYS["overlap"]) as (engine, _):
        _measure_loads(run, engine)
        close(engine)
    with random_engine(run, disk_kv_bytes=2**30 if run.is_dry else 2**33) as (engine, folder):
        _measure_resume(run, Bench(engine, folder / "kv"))


def _copy_rate(name: str) -> float:
    """Bytes a second, the best of several."""
    on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target, source = (on_device, on_host) if name == "host to device" else (on_host, on_device)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return _COPY_BYTES / min(seconds)


def _measure_loads(run: PhaseRun, engine: Engine) -> None:
    """How long a new adapter takes to its request's first token, and what that adds to the steps of those who decode.

    The same request follows with the adapter on the device. What its steps take is not the load's: they read a prompt.
    """
    rows = 2 if run.shape.name == "tiny" else 32
    decoding = start_decoding(run, engine, StepCell(rows, rows // 2), "loads")
    quiet = [_step_s(engine) for _ in range(_QUIET_STEPS)]
    for number in run.while_time(range(_LOADS), name=lambda number: f"load {number}"):
        loading_s, loading_steps = _first_token(run, engine, number, "loading")
        resident_s, resident_steps = _first_token(run, engine, number, "resident")
        figures = {
            "first_token_ms": loading_s * 1e3,
            "first_token_resident_ms": resident_s * 1e3,
            "quiet_step_ms": statistics.median(quiet) * 1e3,
            "slowest_quiet_step_ms": max(quiet) * 1e3,
            "slowest_step_ms": max(loading_steps) * 1e3,
            "slowest_step_resident_ms": max(resident_steps) * 1e3,
            "slowest_decoding_step_ms": max(loading_steps[:-1], default=0.0) * 1e3,
        }
        run.add("adapter_loads", {name: None if run.is_dry else value for name, value in figures.items()})
    stop(engine, decoding)


def _first_token(run: PhaseRun, engine: Engine, number: int, salt: str) -> tuple[float, list[float]]:
    """Submits a request of an adapter. Returns the seconds to its first token, and those of each step until then. The
    last step reads its prompt, and those before it only decode the others while the adapter is loaded.
    """
    outputs: list[RequestOutput] = []
    started = time.perf_counter()
    submit(engine, random_prompt(run.shape, (salt, number), 8), f"new-{number}", 1, outputs)
    steps = []
    while not any(isinstance(output.event, TokensGenerated) for output in outputs):
        steps.append(_step_s(engine))
        raise_failures(outputs)
    return time.perf_counter() - started, steps


def _step_s(engine: Engine) -> float:
    started = time.perf_counter()
    advance(engine)
    return time.perf_counter() - started


def _measure_resume(run: PhaseRun, bench: Bench) -> None:
    """Seconds to the first token of a turn of 16 tokens, by where the KV before it has been. Round 0 warms up."""
    history = 2000
    try:
        for number in run.while_time(range(_ROUNDS + 1), name=lambda number: f"resume round {number}"):
            seconds = measure_round(bench, number, history, is_exact=False)
            if number:
                row = {place: None if run.is_dry else seconds[place] for place in PLACES}
                run.add("resume", {"history_tokens": history, "seconds": row})
    finally:
        bench.close()
