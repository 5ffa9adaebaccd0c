"""Runs one worker of a tensor-parallel engine: a rank above 0. Rank 0 starts it as a process of its own.

    python -m graftwork.engine.build.worker

Reads its orders and all commands from standard input, and writes reports to standard output. Ends when rank 0 closes the
pipe or ends. If a command fails, reports the cause and ends.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, Timer
from typing import IO, Any

import torch

from graftwork.engine.build.devices import keep_freed_memory, load_weights, read_served_model
from graftwork.engine.build.kv import allocate_kv_storage, overlaps_loads
from graftwork.engine.build.limits import scheduler_limits
from graftwork.engine.build.lora import build_lora
from graftwork.engine.build.ranks import config_from, config_of_rank, connected, layout_of_rank, sizes_of
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.build.warm_up import choose_sizes
from graftwork.engine.build.weights import choose_weight_kernels
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.weights import open_weights
from graftwork.engine.parallel.collectives import connect
from graftwork.engine.parallel.commands import Envelope, receive
from graftwork.engine.parallel.follower import Follower, FollowerAdapters, FollowerPages, RankMemory
from graftwork.engine.parallel.ranks import Rank, model_of_rank
from graftwork.engine.parallel.weights import RankReader
from graftwork.platform.clock import SystemClock
from graftwork.platform.errors import InvalidRequest

_log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""The seconds that a worker may take to end after rank 0 has closed its pipe."""


class Reports:
    """Writes reports to rank 0. Any thread may use it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = Lock()

    def send(self, report: Envelope) -> None:
        """Writes one report. Does nothing if rank 0 has ended: then this worker ends too."""
        try:
            with self._lock:
                self._stream.write(report.encoded())
                self._stream.flush()
        except (BrokenPipeError, ValueError):
            _log.debug("rank_0_gone", exc_info=True)


def serve(commands: "SimpleQueue[Envelope | None]", reports: Reports) -> None:
    """Builds a rank by its orders, the first message, and carries out all commands. None ends the commands.

    Reports a failure and returns.
    """
    follower = None
    try:
        orders = commands.get()
        if orders is None:
            return
        follower = build_follower(orders.values, commands, reports)
        while follower is not None and (command := commands.get()) is not None and command.kind != "stop":
            follower.obey(command)
        if follower is not None:
            follower.close()
    except InvalidRequest as error:
        reports.send(Envelope("refused", {"message": str(error), "param": error.param}))
    except Exception as error:  # noqa: BLE001 - the outermost loop: rank 0 ends the engine with this cause
        _log.exception("worker_failed")
        reports.send(Envelope("failed", {"cause": f"{type(error).__name__}: {error}"}))


def build_follower(
    orders: dict[str, Any], commands: "SimpleQueue[Envelope | None]", reports: Reports
) -> Follower | None:
    """Builds one rank, reports that it is ready, and connects it with the others.

    Reports how many frames it could hold, and then waits for the number that all ranks take. Returns None if rank 0 ends
    instead.
    """
    whole = config_from(orders)
    rank = Rank(orders["rank"], whole.tensor_parallel)
    config, dtype = config_of_rank(whole, rank), getattr(torch, orders["dtype"])
    device = torch.device("cpu")
    if orders["device"] == "cuda":
        device = torch.device("cuda", rank.number)
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads)
    parts = _parts(config, rank, device, dtype)
    sizes = choose_sizes(parts, device)
    reports.send(Envelope("sized", {"frames": sizes.device_pages}))
    agreed = commands.get()
    if agreed is None:
        return None
    sizes = replace(sizes, device_pages=agreed.values["frames"])
    content = layout_of_rank(orders["fingerprint"], rank)
    storage = allocate_kv_storage(config, parts.model, sizes, content, device, dtype)
    memory = RankMemory(storage.device_memory, storage.cache, storage.host, storage.disk)
    pages = FollowerPages(memory, reports.send, SystemClock(), overlaps_loads=overlaps_loads(config, device))
    reports.send(Envelope("ready", sizes_of(storage)))
    adapters = FollowerAdapters(memory.device, parts.lora, dtype)
    ranks = connect(Path(orders["folder"]), rank, device)
    return Follower(connected(parts, ranks).follower(storage, adapters), adapters, pages)


def _parts(config: EngineConfig, rank: Rank, device: torch.device, dtype: torch.dtype) -> RunnerParts:
    """Loads this rank's part of the model, and chooses what computes it."""
    whole = read_served_model(config)
    model = model_of_rank(whole, rank.size)
    weights = load_weights(config, model, device, dtype, RankReader(open_weights(config.model, whole), whole, rank))
    choose_weight_kernels(config, weights, device, dtype)
    lora, limits = build_lora(config, model, device, dtype), scheduler_limits(config, model, device)
    return RunnerParts(config, model, weights, lora, limits, dtype, lambda: None, samples=False)


def queue_commands(stream: IO[bytes], on_end: Callable[[], None]) -> "SimpleQueue[Envelope | None]":
    """Starts a thread that reads commands. Returns the queue that it fills, with None at the end of the stream.

    `on_end` is called at the end of the stream, which may come while a command is carried out.
    """
    commands: SimpleQueue[Envelope | None] = SimpleQueue()

    def read() -> None:
        while (command := receive(stream)) is not None:
            commands.put(command)
        commands.put(None)
        on_end()

    Thread(target=read, name="rank-commands", daemon=True).start()
    return commands


def main() -> None:
    """Runs a worker as a process. Whatever the process prints goes to standard error, because reports must not mix."""
    reports = Reports(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands = queue_commands(os.fdopen(os.dup(sys.stdin.fileno()), "rb"), _end_after_grace)
    keep_freed_memory()
    serve(commands, reports)
    os._exit(0)  # a device may still compute a step that the other ranks have left


def _end_after_grace() -> None:
    timer = Timer(_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
